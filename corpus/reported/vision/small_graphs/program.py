import random
import torch
from torch import nn

random.seed(9)
torch.manual_seed(9)


def random_molecule(label):
    n = random.randint(8, 14)
    edges = set()
    order = list(range(n))
    random.shuffle(order)
    for a, b in zip(order[:-1], order[1:]):
        edges.add((a, b))
    if label == 1:
        for _ in range(3):
            i = random.randint(0, n - 3)
            edges.add((order[i], order[i + 2]))
    if random.random() < 0.01:
        lone = order[0]
        edges = {e for e in edges if lone not in e}
    x = torch.randn(n, 4)
    x[:, 0] = label * 0.6 + 0.8 * torch.randn(n)
    row = torch.tensor([e[0] for e in edges] + [e[1] for e in edges])
    col = torch.tensor([e[1] for e in edges] + [e[0] for e in edges])
    return x, row, col, label


def collate(graphs):
    xs, rows, cols, batch, ys, off = [], [], [], [], [], 0
    for i, (x, r, c, y) in enumerate(graphs):
        xs.append(x); rows.append(r + off); cols.append(c + off)
        batch += [i] * len(x); ys.append(y)
        off += len(x)
    return torch.cat(xs), torch.cat(rows), torch.cat(cols), torch.tensor(batch), torch.tensor(ys)


class GCNConv(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.lin = nn.Linear(i, o, bias=False)
        self.root = nn.Linear(i, o)

    def forward(self, x, row, col):
        deg = torch.zeros(x.size(0)).index_add_(0, row, torch.ones(row.size(0)))
        dinv = deg.pow(-0.5)
        h = self.lin(x) * dinv[:, None]
        agg = torch.zeros_like(h).index_add(0, col, h[row])
        return agg * dinv[:, None] + self.root(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1, self.c2, self.fc = GCNConv(4, 32), GCNConv(32, 32), nn.Linear(32, 2)

    def forward(self, x, row, col, batch):
        x = torch.relu(self.c1(x, row, col))
        x = torch.relu(self.c2(x, row, col))
        size = int(batch.max()) + 1
        pooled = torch.zeros(size, 32).index_add(0, batch, x)
        return self.fc(pooled / torch.bincount(batch, minlength=size)[:, None])


graphs = [random_molecule(i % 2) for i in range(1400)]
train, test = graphs[:1000], graphs[1000:]
model = Net()
opt = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-5)
for epoch in range(11):
    random.shuffle(train)
    tot = 0.0
    for i in range(0, len(train), 32):
        x, row, col, batch, y = collate(train[i:i + 32])
        loss = nn.functional.cross_entropy(model(x, row, col, batch), y)
        opt.zero_grad(); loss.backward(); opt.step()
        tot += loss.item()
    print("Epoch", epoch, "Loss", tot / 32)

with torch.no_grad():
    x, row, col, batch, y = collate(test)
    print("FINAL", nn.functional.cross_entropy(model(x, row, col, batch), y).item())
