"""Which symbol opened the sequence?  Plain recurrent net, 40 steps of noise after it."""
import argparse

import torch
from torch import nn


class Recaller(nn.Module):
    def __init__(self, symbols, hidden):
        super().__init__()
        self.rnn = nn.RNN(symbols, hidden, batch_first=True)
        self.readout = nn.Linear(hidden, symbols)
        self.reset_parameters()

    def reset_parameters(self):
        for name, p in self.named_parameters():
            if "bias" in name:
                nn.init.zeros_(p)
            elif "weight_hh" in name:
                nn.init.uniform_(p, -0.08, 0.08)
            else:
                nn.init.xavier_uniform_(p)

    def forward(self, x):
        states, _ = self.rnn(x)
        return self.readout(states[:, -1])


def batch(n, steps, symbols):
    first = torch.randint(0, symbols, (n,))
    x = torch.zeros(n, steps, symbols)
    x[torch.arange(n), 0, first] = 1.0
    x[:, 1:] = 0.05 * torch.randn(n, steps - 1, symbols)
    return x, first


def run(cfg):
    torch.manual_seed(cfg.seed)
    model = Recaller(cfg.symbols, cfg.hidden)
    optimizer = torch.optim.Adam(model.parameters(), lr=cfg.lr)
    criterion = nn.CrossEntropyLoss()
    for step in range(1, cfg.steps + 1):
        x, y = batch(64, cfg.length, cfg.symbols)
        optimizer.zero_grad(set_to_none=True)
        logits = model(x)
        loss = criterion(logits, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        if step % 25 == 0:
            acc = (logits.argmax(1) == y).float().mean().item()
            print(f"step {step:4d} | loss {loss.item():.4f} | acc {acc:.2f}")


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--symbols", type=int, default=6)
    ap.add_argument("--hidden", type=int, default=48)
    ap.add_argument("--length", type=int, default=40)
    ap.add_argument("--steps", type=int, default=200)
    ap.add_argument("--lr", type=float, default=1e-3)
    run(ap.parse_args())
