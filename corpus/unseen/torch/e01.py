# sparse graph attention on a kNN graph of the wine cultivars (semi supervised)
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_wine
from sklearn.neighbors import kneighbors_graph
from sklearn.preprocessing import StandardScaler

torch.manual_seed(7)
np.random.seed(7)


def load_graph(k=6):
    raw = load_wine()
    feats = (raw.data / raw.data.mean(0)).astype(np.float32) * 10.0
    knn = kneighbors_graph(StandardScaler().fit_transform(feats), k, include_self=True)
    knn = ((knn + knn.T) > 0).tocoo()
    edges = torch.tensor(np.stack([knn.row, knn.col]), dtype=torch.long)
    y = torch.tensor(raw.target)
    perm = torch.randperm(len(y))
    return torch.from_numpy(feats), edges, y, perm[:40], perm[40:]


class SpGATHead(nn.Module):
    """one attention head working on an edge list"""

    def __init__(self, fin, fout, alpha=0.2, concat=True):
        super().__init__()
        self.W = nn.Parameter(torch.empty(fin, fout))
        nn.init.xavier_normal_(self.W, gain=1.414)
        self.a = nn.Parameter(torch.empty(1, 2 * fout))
        nn.init.xavier_normal_(self.a, gain=1.414)
        self.leaky = nn.LeakyReLU(alpha)
        self.concat = concat

    def forward(self, x, edges):
        src, dst = edges
        n = x.size(0)
        h = x @ self.W
        pair = torch.cat([h[src], h[dst]], dim=1)
        score = torch.exp(-self.leaky((pair * self.a).sum(1)))
        rowsum = torch.zeros(n).index_add(0, src, score)
        agg = torch.zeros(n, h.size(1)).index_add(0, src, score[:, None] * h[dst])
        out = agg / rowsum[:, None]
        return F.elu(out) if self.concat else out


class SpGAT(nn.Module):
    def __init__(self, fin, hid, ncls, heads=4, drop=0.3):
        super().__init__()
        self.heads = nn.ModuleList([SpGATHead(fin, hid) for _ in range(heads)])
        self.final = SpGATHead(hid * heads, ncls, concat=False)
        self.drop = drop

    def forward(self, x, edges):
        x = F.dropout(x, self.drop, self.training)
        x = torch.cat([head(x, edges) for head in self.heads], dim=1)
        x = F.dropout(x, self.drop, self.training)
        return F.log_softmax(self.final(x, edges), dim=1)


def accuracy(logp, y):
    return (logp.argmax(1) == y).float().mean().item()


x, edges, y, tr, te = load_graph()
print("nodes", x.shape[0], "edges", edges.shape[1])
net = SpGAT(x.size(1), 8, 3)
opt = torch.optim.Adam(net.parameters(), lr=2e-2, weight_decay=5e-4)

for epoch in range(60):
    net.train()
    opt.zero_grad()
    logp = net(x, edges)
    loss = F.nll_loss(logp[tr], y[tr])
    loss.backward()
    opt.step()
    net.eval()
    with torch.no_grad():
        ev = net(x, edges)
    if epoch % 3 == 0:
        print(f"epoch {epoch:03d} loss {loss.item():.4f} train {accuracy(logp[tr], y[tr]):.3f} test {accuracy(ev[te], y[te]):.3f}")
