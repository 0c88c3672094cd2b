import torch
import torch.nn as nn


def ratings(users=150, items=120, rank=4, keep=0.8, seed=0):
    g = torch.Generator().manual_seed(seed)
    u = torch.randn(users, rank, generator=g)
    v = torch.randn(items, rank, generator=g)
    full = 3.0 + (u @ v.t()) / rank ** 0.5
    mask = torch.rand(users, items, generator=g) < keep
    ui, vi = torch.where(mask)
    return ui, vi, full[ui, vi] + 0.1 * torch.randn(len(ui), generator=g)


class Recommender(nn.Module):
    def __init__(self, users, items, dim=8):
        super().__init__()
        self.user = nn.Embedding(users, dim)
        self.item = nn.Embedding(items, dim)
        self.user_bias = nn.Embedding(users, 1)
        self.item_bias = nn.Embedding(items, 1)
        self.mean = nn.Parameter(torch.tensor(3.0))
        nn.init.zeros_(self.user_bias.weight)
        nn.init.zeros_(self.item_bias.weight)
        self.scale = dim ** -0.5

    def forward(self, u, i):
        dot = (self.user(u) * self.item(i)).sum(-1) * self.scale
        return dot + self.user_bias(u).squeeze(-1) + self.item_bias(i).squeeze(-1) + self.mean


def rmse(model, u, i, r):
    with torch.no_grad():
        return (model(u, i).float() - r).pow(2).mean().sqrt().item()


def main(steps=400, batch=8192, lr=3e-3, dtype=torch.bfloat16):
    torch.manual_seed(0)
    u, i, r = ratings()
    cut = int(0.9 * len(u))
    order = torch.randperm(len(u))
    tr, te = order[:cut], order[cut:]
    model = Recommender(150, 120).to(dtype)
    opt = torch.optim.Adam(model.parameters(), lr=lr)
    print(f"{len(tr)} ratings, std {r.std().item():.3f}")
    for step in range(steps):
        pick = tr[torch.randint(0, len(tr), (batch,))]
        pred = model(u[pick], i[pick])
        loss = (pred.float() - r[pick]).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 40 == 0:
            print(f"step {step:4d} train mse {loss.item():.4f} test rmse {rmse(model, u[te], i[te], r[te]):.4f}")
    print(f"train rmse {rmse(model, u[tr], i[tr], r[tr]):.4f} test rmse {rmse(model, u[te], i[te], r[te]):.4f}")


if __name__ == "__main__":
    main()
