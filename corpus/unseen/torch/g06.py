"""Graph classification (GIN with a sum readout), run entirely in half precision."""
import torch
import torch.nn as nn
import torch.nn.functional as F

gen = torch.Generator().manual_seed(21)
HALF = torch.float16


def community(n, dense):
    p = 12.0 / n if dense else 4.0 / n
    adj = (torch.rand(n, n, generator=gen) < p).float().triu(1)
    adj = adj + adj.T
    age = 20 + 50 * torch.rand(n, 1, generator=gen)
    kids = torch.randint(0, 5, (n, 1), generator=gen).float()
    activity = torch.rand(n, 4, generator=gen) * (20 if dense else 5)
    return torch.cat([age, kids, activity], 1).to(HALF), adj.to(HALF), int(dense)


sizes = [int(s) for s in torch.randint(40, 160, (59,), generator=gen)]
sizes.insert(37, 2400)
graphs = [community(n, dense=bool(torch.rand(1, generator=gen) < 0.5)) for n in sizes]


class GIN(nn.Module):
    def __init__(self, d_in=6, d=32):
        super().__init__()
        self.lin1 = nn.Linear(d_in, d)
        self.lin2 = nn.Linear(d, d)
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, 2)

    def forward(self, x, adj):
        h = F.relu(self.lin1(x + adj @ x))
        h = F.relu(self.lin2(h))
        g = h.sum(dim=0)
        return self.head(self.norm(g))


torch.manual_seed(0)
model = GIN().to(HALF)
opt = torch.optim.SGD(model.parameters(), lr=0.02)

for epoch in range(8):
    total, right = 0.0, 0
    for x, adj, y in graphs:
        logits = model(x, adj).float()
        loss = F.cross_entropy(logits[None], torch.tensor([y]))
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += loss.item()
        right += int(logits.argmax() == y)
    print(f"epoch {epoch}: loss {total / len(graphs):.4f}  acc {right / len(graphs):.2f}")
