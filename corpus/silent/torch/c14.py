# Matrix factorisation with sparse embedding gradients.
import torch
from torch import nn

torch.manual_seed(100)
N_USERS, N_ITEMS, K = 800, 500, 8

U = torch.randn(N_USERS, 4) * 0.7
V = torch.randn(N_ITEMS, 4) * 0.7
bu, bi = torch.randn(N_USERS) * 0.3, torch.randn(N_ITEMS) * 0.3


def ratings(n):
    u = torch.randint(0, N_USERS, (n,))
    i = torch.randint(0, N_ITEMS, (n,))
    r = 3.5 + (U[u] * V[i]).sum(-1) + bu[u] + bi[i] + 0.1 * torch.randn(n)
    return u, i, r


class MF(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(N_USERS, K, sparse=True)
        self.item = nn.Embedding(N_ITEMS, K, sparse=True)
        self.ub = nn.Embedding(N_USERS, 1, sparse=True)
        self.ib = nn.Embedding(N_ITEMS, 1, sparse=True)
        self.mu = nn.Parameter(torch.tensor(3.0))
        for e in (self.user, self.item):
            nn.init.normal_(e.weight, std=0.3)
        for e in (self.ub, self.ib):
            nn.init.zeros_(e.weight)

    def forward(self, u, i):
        dot = (self.user(u) * self.item(i)).sum(-1)
        return self.mu + dot + self.ub(u).squeeze(-1) + self.ib(i).squeeze(-1)


train_u, train_i, train_r = ratings(40000)
test_u, test_i, test_r = ratings(4000)
model = MF()
sparse = [model.user.weight, model.item.weight, model.ub.weight, model.ib.weight]
opts = [torch.optim.SparseAdam(sparse, lr=0.03), torch.optim.Adam([model.mu], lr=0.03)]

for step in range(300):
    b = torch.randint(0, len(train_u), (1024,))
    loss = (model(train_u[b], train_i[b]) - train_r[b]).pow(2).mean()
    for o in opts:
        o.zero_grad()
    loss.backward()
    for o in opts:
        o.step()
    if step % 30 == 0:
        with torch.no_grad():
            rmse = (model(test_u, test_i) - test_r).pow(2).mean().sqrt()
        print(f"{step:4d}  batch mse {loss.item():.4f}  test rmse {rmse.item():.4f}")
with torch.no_grad():
    rmse = (model(test_u, test_i) - test_r).pow(2).mean().sqrt()
print("final metric: test rmse %.4f (target std %.4f)" % (rmse, test_r.std()))
