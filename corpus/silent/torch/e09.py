import torch
import torch.nn as nn


class Recommender(nn.Module):
    def __init__(self, users, items, dim=8):
        super().__init__()
        self.dim = dim
        self.user = nn.Embedding(users, dim)
        self.item = nn.Embedding(items, dim)
        self.offset = nn.Parameter(torch.zeros(1))
        nn.init.normal_(self.user.weight, std=0.3)
        nn.init.normal_(self.item.weight, std=0.3)

    def resize(self, users, items):
        self.user = self._grown(self.user, users)
        self.item = self._grown(self.item, items)

    def _grown(self, old, n):
        new = nn.Embedding(n, self.dim)
        nn.init.normal_(new.weight, std=0.3)
        with torch.no_grad():
            new.weight[: old.num_embeddings] = old.weight
        return new

    def forward(self, u, i):
        return (self.user(u) * self.item(i)).sum(-1) + self.offset


def ratings(users, items, n, gen):
    pu = torch.randn(users, 4, generator=gen)
    qi = torch.randn(items, 4, generator=gen)
    u = torch.randint(0, users, (n,), generator=gen)
    i = torch.randint(0, items, (n,), generator=gen)
    r = (pu[u] * qi[i]).sum(-1) / 2 + 0.1 * torch.randn(n, generator=gen) + 3.0
    return u, i, r


class Session:
    def __init__(self, catalogue=(100, 80), lr=0.03):
        self.model = Recommender(*catalogue)
        self.opt = torch.optim.Adam(self.model.parameters(), lr=lr)

    def ingest(self, u, i, r):
        users, items = int(u.max()) + 1, int(i.max()) + 1
        if users > self.model.user.num_embeddings or items > self.model.item.num_embeddings:
            self.model.resize(users, items)
        self.data = (u, i, r)

    def fit(self, steps=300, batch=512, holdout=2000):
        u, i, r = self.data
        cut = len(r) - holdout
        for step in range(steps):
            k = torch.randint(0, cut, (batch,))
            loss = (self.model(u[k], i[k]) - r[k]).pow(2).mean()
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            if step % 50 == 0 or step == steps - 1:
                with torch.no_grad():
                    val = (self.model(u[cut:], i[cut:]) - r[cut:]).pow(2).mean()
                print(f"step {step:3d} train {loss.item():.4f} held-out {val.item():.4f}")


if __name__ == "__main__":
    torch.manual_seed(0)
    gen = torch.Generator().manual_seed(2)
    session = Session()
    session.ingest(*ratings(300, 200, 16000, gen))
    session.fit()
