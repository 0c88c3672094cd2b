import argparse

import torch
from torch import nn


def random_graphs(n_graphs, n_nodes, n_feat, gen):
    """Dense adjacency, node features and a scalar property per graph."""
    a = (torch.rand(n_graphs, n_nodes, n_nodes, generator=gen) < 0.25).float()
    a = torch.triu(a, 1)
    a = a + a.transpose(1, 2)
    x = torch.randn(n_graphs, n_nodes, n_feat, generator=gen)
    w = torch.randn(n_feat, generator=gen)
    charge = x @ w
    energy = torch.einsum("bi,bij,bj->b", charge, a, charge) / n_nodes
    level = charge.mean(1) * 3
    y = torch.tanh(energy / 4) + level
    y = (y - y.mean()) / y.std()
    return x, a, y


class GraphConv(nn.Module):
    def __init__(self, d_in, d_out):
        super().__init__()
        self.own = nn.Linear(d_in, d_out)
        self.nbr = nn.Linear(d_in, d_out, bias=False)

    def forward(self, h, adj):
        deg = adj.sum(-1, keepdim=True).clamp(min=1)
        return torch.relu(self.own(h) + self.nbr(adj @ h / deg))


class PropertyNet(nn.Module):
    def __init__(self, n_feat, width):
        super().__init__()
        self.c1 = GraphConv(n_feat, width)
        self.c2 = GraphConv(width, width)
        self.readout = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, x, adj):
        h = self.c2(self.c1(x, adj), adj)
        return self.readout(h.mean(1))


def squared_error(pred, target):
    return ((pred - target) ** 2).mean()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=300)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--width", type=int, default=48)
    args = ap.parse_args()

    torch.manual_seed(3)
    gen = torch.Generator().manual_seed(3)
    x, adj, y = random_graphs(1600, 14, 6, gen)
    xt, at, yt = x[:1300], adj[:1300], y[:1300]
    net = PropertyNet(6, args.width)
    opt = torch.optim.Adam(net.parameters(), lr=args.lr)
    for step in range(args.steps):
        idx = torch.randint(0, len(xt), (args.batch,), generator=gen)
        out = net(xt[idx], at[idx])
        loss = squared_error(out, yt[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 30 == 0:
            print(f"{step:4d}  mse {loss.item():.4f}")
    with torch.no_grad():
        out = net(x[1300:], adj[1300:])
        print("spread of predictions", out.std().item())
        r = torch.corrcoef(torch.stack([out.flatten(), y[1300:]]))[0, 1]
        print(f"FINAL train_loss {loss.item():.4f} test corr {r.item():.3f}")


if __name__ == "__main__":
    main()
