"""Small probabilistic demand forecaster (DeepAR-like) on generated shop data."""
import numpy as np
import torch
import torch.nn as nn
from torch.distributions import Normal

CTX, HOR = 28, 7
torch.manual_seed(7)
rng = np.random.default_rng(7)


def make_shop(n_items=40, days=180):
    t = np.arange(days)
    sales = np.zeros((n_items, days), dtype=np.float32)
    for i in range(n_items):
        level = rng.uniform(3, 60)
        week = 1 + 0.4 * np.sin(2 * np.pi * (t + rng.integers(7)) / 7)
        s = rng.poisson(level * week).astype(np.float32)
        if i % 8 == 3:
            launch = int(rng.integers(25, 55))
            s[:launch] = 0
        sales[i] = s
    return sales


class WindowSampler:
    def __init__(self, sales, batch_size):
        self.sales, self.bs = sales, batch_size

    def __call__(self):
        rows = rng.integers(0, len(self.sales), self.bs)
        starts = rng.integers(0, self.sales.shape[1] - CTX - HOR, self.bs)
        w = np.stack([self.sales[r, s:s + CTX + HOR] for r, s in zip(rows, starts)])
        w = torch.from_numpy(w)
        dow = (torch.from_numpy(starts)[:, None] + torch.arange(CTX + HOR)) % 7
        return w[:, :CTX], w[:, CTX:], dow


class Forecaster(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.day = nn.Embedding(7, 4)
        self.rnn = nn.GRU(1 + 4, hidden, batch_first=True)
        self.loc = nn.Linear(hidden, 1)
        self.spread = nn.Sequential(nn.Linear(hidden, 1), nn.Softplus())

    def forward(self, past, future, dow):
        scale = past.abs().mean(dim=1, keepdim=True)
        full = torch.cat([past, future], dim=1) / scale
        inp = torch.cat([full[:, :-1, None], self.day(dow[:, 1:])], dim=-1)
        h, _ = self.rnn(inp)
        h = h[:, -HOR:]
        mu = self.loc(h).squeeze(-1) * scale
        sigma = (self.spread(h).squeeze(-1) + 1e-3) * scale
        return Normal(mu, sigma)


def evaluate(model, sales):
    model.eval()
    w = torch.from_numpy(sales[:, -(CTX + HOR):])
    dow = (torch.arange(CTX + HOR) + sales.shape[1] - CTX - HOR) % 7
    with torch.no_grad():
        d = model(w[:, :CTX], w[:, CTX:], dow.expand(len(w), -1))
        mae = (d.mean - w[:, CTX:]).abs().mean()
    model.train()
    return mae.item()


def main():
    sales = make_shop()
    sampler = WindowSampler(sales[:, :-HOR], batch_size=8)
    model = Forecaster()
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    for it in range(120):
        past, future, dow = sampler()
        dist = model(past, future, dow)
        loss = -dist.log_prob(future).mean()
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        opt.step()
        if it % 5 == 0:
            print(f"it {it:3d}  nll {loss.item():.3f}  test mae {evaluate(model, sales):.3f}")


if __name__ == "__main__":
    main()
