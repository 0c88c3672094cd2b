"""Matrix factorisation for ratings (synthetic users and films)."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def ratings(n_users=300, n_items=200, rank=6, n_obs=20000, seed=0):
    g = torch.Generator().manual_seed(seed)
    u = torch.randn(n_users, rank, generator=g)
    v = torch.randn(n_items, rank, generator=g)
    bias = 0.5 * torch.randn(n_items, generator=g)
    i = torch.randint(0, n_users, (n_obs,), generator=g)
    j = torch.randint(0, n_items, (n_obs,), generator=g)
    r = (u[i] * v[j]).sum(1) / rank ** 0.5 + bias[j] + 3.0
    r = r + 0.1 * torch.randn(n_obs, generator=g)
    return i, j, r


class Factorizer(nn.Module):
    def __init__(self, n_users, n_items, k, mean_rating):
        super().__init__()
        self.user = nn.Embedding(n_users, k)
        self.item = nn.Embedding(n_items, k)
        self.user_bias = nn.Embedding(n_users, 1)
        self.item_bias = nn.Embedding(n_items, 1)
        self.register_buffer("mean", torch.tensor(mean_rating))
        self.reset_parameters(k)

    def reset_parameters(self, k):
        for emb in (self.user, self.item):
            nn.init.constant_(emb.weight, 0.5 / k ** 0.5)
        for emb in (self.user_bias, self.item_bias):
            nn.init.zeros_(emb.weight)

    def forward(self, i, j):
        dot = (self.user(i) * self.item(j)).sum(1)
        return self.mean + dot + self.user_bias(i)[:, 0] + self.item_bias(j)[:, 0]


def rmse(model, i, j, r):
    with torch.no_grad():
        return (model(i, j) - r).pow(2).mean().sqrt().item()


def main(epochs=10, k=12, lr=2e-2):
    torch.manual_seed(0)
    i, j, r = ratings()
    cut = 18000
    loader = DataLoader(TensorDataset(i[:cut], j[:cut], r[:cut]), batch_size=512, shuffle=True)
    model = Factorizer(300, 200, k, r[:cut].mean().item())
    opt = torch.optim.Adam(model.parameters(), lr=lr)
    mse = nn.MSELoss()
    for epoch in range(epochs):
        for bi, bj, br in loader:
            opt.zero_grad()
            loss = mse(model(bi, bj), br)
            loss.backward()
            opt.step()
        print(f"epoch {epoch} last batch mse {loss.item():.4f} "
              f"held-out rmse {rmse(model, i[cut:], j[cut:], r[cut:]):.4f}")
    print(f"FINAL train_rmse {rmse(model, i[:cut], j[:cut], r[:cut]):.4f} "
          f"held-out {rmse(model, i[cut:], j[cut:], r[cut:]):.4f} (std {r.std().item():.3f})")


main()
