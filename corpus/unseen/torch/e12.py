"""Online forecasting of one-minute order flow with a Time2Vec encoder.
The replay stream is kept compactly in memory and consumed in order of time."""
import numpy as np
import torch
import torch.nn as nn


def make_stream(hours=30, seed=9):
    rng = np.random.default_rng(seed)
    sec = np.arange(0, hours * 3600, 60)
    day = 2 * np.pi * sec / 86400
    flow = 1.5 + np.sin(day) + 0.4 * np.sin(7 * day) + 0.15 * rng.standard_normal(len(sec))
    spread = 0.2 + 0.05 * np.abs(rng.standard_normal(len(sec))) + 0.1 * np.cos(day)
    return np.column_stack([sec, flow, spread])


class ReplayStream:
    """chunks of `size` windows, each `lag` minutes of history and the next value"""

    def __init__(self, table, lag=16, size=32):
        self.table = torch.tensor(table, dtype=torch.float16)
        self.lag, self.size = lag, size

    def __len__(self):
        return (len(self.table) - self.lag) // self.size

    def __iter__(self):
        for c in range(len(self)):
            start = c * self.size
            rows = torch.stack([self.table[s:s + self.lag + 1] for s in range(start, start + self.size)]).float()
            yield rows[:, :-1], rows[:, -1, 1]


class Time2Vec(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.freq = nn.Parameter(2 * np.pi / torch.logspace(3.5, 5.0, dim))
        self.phase = nn.Parameter(torch.zeros(dim))

    def forward(self, t):
        return torch.sin(t[..., None] * self.freq + self.phase)


class Forecaster(nn.Module):
    def __init__(self, dim=12, hidden=32):
        super().__init__()
        self.t2v = Time2Vec(dim)
        self.rnn = nn.LSTM(dim + 2, hidden, batch_first=True)
        self.head = nn.Sequential(nn.Linear(hidden + dim, hidden), nn.SiLU(), nn.Linear(hidden, 1))

    def forward(self, w):
        e = self.t2v(w[..., 0])
        y, _ = self.rnn(torch.cat([e, w[..., 1:]], -1))
        return self.head(torch.cat([y[:, -1], e[:, -1]], -1)).squeeze(-1)


class Meter:
    def __init__(self, decay=0.9):
        self.decay, self.value = decay, None

    def add(self, x):
        self.value = x if self.value is None else self.decay * self.value + (1 - self.decay) * x
        return self.value


def train():
    torch.manual_seed(0)
    stream = ReplayStream(make_stream())
    model = Forecaster()
    groups = [{"params": model.t2v.parameters(), "lr": 1e-7}, {"params": model.rnn.parameters()},
              {"params": model.head.parameters()}]
    opt = torch.optim.Adam(groups, lr=4e-3)
    meter = Meter()
    for chunk, (hist, nxt) in enumerate(stream):
        with torch.no_grad():
            ahead = (model(hist) - nxt).abs().mean().item()
        for _ in range(2):
            loss = nn.functional.huber_loss(model(hist), nxt)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
        if chunk % 4 == 0:
            print(f"chunk {chunk:2d} one-step mae {ahead:.4f} running {meter.add(ahead):.4f} fit {loss.item():.5f}")


if __name__ == "__main__":
    train()
