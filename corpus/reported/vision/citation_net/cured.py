import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(2)
N, D, K = 560, 300, 5


def make_graph():
    y = torch.randint(0, K, (N,))
    same = (y[:, None] == y[None]).float()
    prob = 0.03 * same + 0.006 * (1 - same)
    upper = torch.triu((torch.rand(N, N) < prob).float(), 1)
    adj = upper + upper.T + torch.eye(N)
    d = adj.sum(1).rsqrt()
    topics = torch.randn(K, 12) * 1.2
    x = torch.randn(N, D)
    x[:, :12] += topics[y]
    return d[:, None] * adj * d[None], x, y


class GraphConvolution(nn.Module):
    def __init__(self, d_in, d_out):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_in, d_out))
        self.bias = nn.Parameter(torch.zeros(d_out))
        nn.init.xavier_uniform_(self.weight)

    def forward(self, x, a):
        return a @ (x @ self.weight) + self.bias


class GCN(nn.Module):
    def __init__(self, d_input, d_hids, d_output, dropout):
        super().__init__()
        dims = [d_input, *d_hids]
        gcs = []
        for i in range(len(dims) - 1):
            gcs.append(GraphConvolution(dims[i], dims[i + 1]))
        self.gcs = nn.ModuleList(gcs)
        self.out = nn.Linear(dims[-1], d_output)
        self.dropout = dropout

    def forward(self, x, a):
        for gc in self.gcs:
            x = F.relu(gc(x, a))
            x = F.dropout(x, self.dropout, training=self.training)
        return self.out(x)


a, x, y = make_graph()
perm = torch.randperm(N)
train, test = perm[:200], perm[200:]
model = GCN(D, [16, 16], K, dropout=0.2)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)

for epoch in range(401):
    model.train()
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x, a)[train], y[train])
    loss.backward()
    optimizer.step()
    if epoch % 80 == 0:
        print("epoch", epoch, "loss", loss.item())

model.eval()
with torch.no_grad():
    print("FINAL", (model(x, a)[test].argmax(1) != y[test]).float().mean().item())
