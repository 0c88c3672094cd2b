"""Online training from a flaky sensor stream. Windows with drop-outs give a NaN loss and are skipped."""
import logging
from collections import Counter

import numpy as np
import torch
import torch.nn as nn

logging.basicConfig(level=logging.INFO, format="%(message)s")
log = logging.getLogger("stream")


def stream(n, seed=0):
    rng = np.random.default_rng(seed)
    phase = 0.0
    for k in range(n):
        phase += rng.uniform(0.2, 1.0)
        t = phase + np.arange(40) * 0.15
        sig = np.sin(t) + 0.5 * np.sin(2.1 * t) + 0.05 * rng.normal(size=40)
        if rng.random() < 0.06:
            start = rng.integers(0, 36)
            sig[start:start + 4] = np.nan
        elif rng.random() < 0.02:
            sig[rng.integers(0, 40)] = np.inf
        yield torch.tensor(sig, dtype=torch.float32)


class Predictor(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.rnn = nn.GRU(1, hidden, batch_first=True)
        self.out = nn.Linear(hidden, 1)

    def forward(self, seq):
        h, _ = self.rnn(seq.view(1, -1, 1))
        return self.out(h).flatten()


class OnlineTrainer:
    def __init__(self, lr=5e-3, accumulate=4):
        torch.manual_seed(1)
        self.net = Predictor()
        self.ema = {k: v.clone() for k, v in self.net.state_dict().items()}
        self.opt = torch.optim.Adam(self.net.parameters(), lr=lr)
        self.accumulate, self.pending = accumulate, 0
        self.count = Counter()
        self.history = []

    def feed(self, window):
        loss = nn.functional.mse_loss(self.net(window[:-1]), window[1:])
        if not torch.isfinite(loss):
            self.count["skipped"] += 1
            return
        (loss / self.accumulate).backward()
        self.history.append(loss.item())
        self.count["used"] += 1
        self.pending += 1
        if self.pending == self.accumulate:
            self.apply()

    def apply(self):
        norm = nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        if torch.isfinite(norm):
            self.opt.step()
            for k, v in self.net.state_dict().items():
                self.ema[k].lerp_(v, 0.05)
        self.opt.zero_grad()
        self.pending = 0


if __name__ == "__main__":
    tr = OnlineTrainer()
    for i, w in enumerate(stream(500)):
        tr.feed(w)
        if i % 100 == 99:
            log.info("window %d  loss(last 40) %.4f  %s", i, np.mean(tr.history[-40:]), dict(tr.count))
    first, last = np.mean(tr.history[:40]), np.mean(tr.history[-40:])
    log.info("%.4f -> %.4f", first, last)
    assert tr.count["skipped"] > 0 and last < first
    assert all(v.isfinite().all() for v in tr.ema.values())
