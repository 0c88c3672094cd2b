"""LoRA: a classifier is pretrained on digits, and adapters with B = 0 adapt it to shifted images."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits


class LoRALinear(nn.Module):
    def __init__(self, base, rank=4, alpha=8):
        super().__init__()
        self.base = base
        for p in base.parameters():
            p.requires_grad_(False)
        self.a = nn.Parameter(torch.empty(rank, base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))
        self.scale = alpha / rank

    def forward(self, x):
        return self.base(x) + self.scale * (x @ self.a.T @ self.b.T)


def adapt(model):
    for i, layer in enumerate(model):
        if isinstance(layer, nn.Linear):
            model[i] = LoRALinear(layer)
    return model


def fit(model, x, y, steps, lr):
    params = [p for p in model.parameters() if p.requires_grad]
    opt = torch.optim.AdamW(params, lr=lr, weight_decay=0.0)
    for step in range(steps):
        pick = torch.randint(0, len(x), (64,))
        loss = F.cross_entropy(model(x[pick]), y[pick])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 50 == 0:
            print(f"{step:4d} loss {loss.item():.4f} trained {sum(p.numel() for p in params)}")


def accuracy(model, x, y):
    with torch.no_grad():
        return (model(x).argmax(1) == y).float().mean().item()


def main():
    torch.manual_seed(0)
    d = load_digits()
    x, y = torch.tensor(d.data, dtype=torch.float32) / 16, torch.tensor(d.target)
    order = torch.randperm(len(x))
    x, y = x[order], y[order]
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    fit(model, x[:1400], y[:1400], 300, 2e-3)
    other = x.roll(1, dims=1) + 0.1
    print(f"base {accuracy(model, x[1400:], y[1400:]):.3f}, shifted {accuracy(model, other[1400:], y[1400:]):.3f}")
    adapt(model)
    fit(model, other[:1400], y[:1400], 300, 5e-3)
    print(f"shifted, adapted {accuracy(model, other[1400:], y[1400:]):.3f}")


if __name__ == "__main__":
    main()
