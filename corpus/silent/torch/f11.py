import torch
import torch.nn as nn
import torch.nn.functional as F


def block_graph(n=480, groups=4, p_in=0.16, p_out=0.02, feats=16, seed=0):
    g = torch.Generator().manual_seed(seed)
    block = torch.randint(0, groups, (n,), generator=g)
    same = block[:, None] == block[None, :]
    prob = torch.where(same, torch.tensor(p_in), torch.tensor(p_out))
    upper = torch.triu((torch.rand(n, n, generator=g) < prob).float(), diagonal=1)
    adj = upper + upper.t()
    centers = torch.randn(groups, feats, generator=g)
    x = centers[block] + 0.5 * torch.randn(n, feats, generator=g)
    level = torch.linspace(-1.3, 1.3, groups)[block]
    y = level + 0.1 * torch.randn(n, generator=g)
    return adj, x, y


def propagation_matrix(adj):
    a = adj + torch.eye(adj.shape[0])
    deg = a.sum(1)
    inv = deg.sqrt()
    return (a * inv[:, None] / inv[None, :]).to_sparse()


class GCN(nn.Module):
    def __init__(self, dims):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in zip(dims[:-1], dims[1:]))

    def forward(self, prop, x):
        for k, layer in enumerate(self.layers):
            x = torch.sparse.mm(prop, layer(x))
            if k + 1 < len(self.layers):
                x = F.relu(x)
        return x.squeeze(-1)


def main():
    torch.manual_seed(0)
    adj, x, y = block_graph()
    prop = propagation_matrix(adj)
    perm = torch.randperm(len(y))
    train, test = perm[:240], perm[240:]
    model = GCN([x.shape[1], 32, 32, 32, 1])
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(300):
        model.train()
        pred = model(prop, x)
        loss = F.mse_loss(pred[train], y[train])
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        opt.step()
        if step % 30 == 0:
            print(f"step {step:3d}  loss {loss.item():.4f}  prediction std {pred.std().item():.3g}")
    model.eval()
    with torch.no_grad():
        pred = model(prop, x)
    print(f"train mse {F.mse_loss(pred[train], y[train]).item():.4f}"
          f"  test mse {F.mse_loss(pred[test], y[test]).item():.4f}  target var {y.var().item():.3f}")


if __name__ == "__main__":
    main()
