"""Two-layer GCN on a small citation-like graph (semi-supervised)."""
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

np.random.seed(3)
torch.manual_seed(3)

N, C, D = 240, 4, 32


def load_graph():
    labels = np.random.randint(0, C, N)
    proto = np.random.randn(C, D)
    feats = proto[labels] + 1.5 * np.random.randn(N, D)
    src, dst = [], []
    while len(src) < 420:
        i, j = np.random.randint(0, N, 2)
        if i == j:
            continue
        if labels[i] == labels[j] or np.random.rand() < 0.12:
            src += [i, j]
            dst += [j, i]
    edges = torch.tensor(np.stack([src, dst]), dtype=torch.long)
    return torch.tensor(feats, dtype=torch.float32), torch.tensor(labels), edges


def build_adj(edges, n):
    adj = torch.zeros(n, n)
    adj[edges[0], edges[1]] = 1.0
    deg = adj.sum(dim=1)
    d_inv_sqrt = deg.pow(-0.5)
    d_mat = torch.diag(d_inv_sqrt)
    return d_mat @ adj @ d_mat


class GraphConv(nn.Module):
    def __init__(self, fin, fout):
        super().__init__()
        self.lin = nn.Linear(fin, fout, bias=False)
        self.bias = nn.Parameter(torch.zeros(fout))

    def forward(self, x, adj):
        return adj @ self.lin(x) + self.bias


class GCN(nn.Module):
    def __init__(self, fin, hid, ncls, p=0.5):
        super().__init__()
        self.gc1 = GraphConv(fin, hid)
        self.gc2 = GraphConv(hid, ncls)
        self.p = p

    def forward(self, x, adj):
        h = F.relu(self.gc1(x, adj))
        h = F.dropout(h, self.p, self.training)
        return F.log_softmax(self.gc2(h, adj), dim=1)


def main():
    x, y, edges = load_graph()
    adj = build_adj(edges, N)
    perm = torch.randperm(N)
    idx_train, idx_val = perm[:80], perm[80:160]

    model = GCN(D, 16, C)
    opt = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    for epoch in range(40):
        model.train()
        opt.zero_grad()
        out = model(x, adj)
        loss = F.nll_loss(out[idx_train], y[idx_train])
        loss.backward()
        opt.step()
        if epoch % 5 == 0:
            model.eval()
            with torch.no_grad():
                pred = model(x, adj)[idx_val].argmax(1)
            acc = (pred == y[idx_val]).float().mean().item()
            print(f"epoch {epoch:03d} loss {loss.item():.4f} val acc {acc:.3f}")


if __name__ == "__main__":
    main()
