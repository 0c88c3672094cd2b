import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits


class LoRALinear(nn.Module):
    def __init__(self, base, rank=6, alpha=12):
        super().__init__()
        self.base = base
        for p in self.base.parameters():
            p.requires_grad_(False)
        self.down = nn.Parameter(torch.empty(rank, base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))
        self.scale = alpha / rank

    def forward(self, x):
        return self.base(x) + self.scale * (x @ self.down.t()) @ self.up.t()


def wrap(model):
    for name, child in model.named_children():
        if isinstance(child, nn.Linear):
            setattr(model, name, LoRALinear(child))
    return model


def accuracy(model, x, y):
    with torch.no_grad():
        return (model(x).argmax(1) == y).float().mean().item()


def fit(model, x, y, steps, lr, tag):
    params = [p for p in model.parameters() if p.requires_grad]
    print(tag, "trainable", sum(p.numel() for p in params), "of", sum(p.numel() for p in model.parameters()))
    opt = torch.optim.AdamW(params, lr=lr)
    for step in range(steps):
        i = torch.randint(0, len(x), (64,))
        loss = F.cross_entropy(model(x[i]), y[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 40 == 0:
            print(f"  {tag} {step:4d} loss {loss.item():.4f}")


def main():
    torch.manual_seed(0)
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32) / 16
    y = torch.tensor(digits.target)
    upright, flipped = x.flatten(1), x.flip(2).flatten(1)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    fit(model, upright[:1300], y[:1300], 150, 3e-3, "pretrain")
    print(f"upright {accuracy(model, upright[1300:], y[1300:]):.3f} flipped {accuracy(model, flipped[1300:], y[1300:]):.3f}")
    wrap(model)
    fit(model, flipped[:1300], y[:1300], 240, 4e-3, "adapt")
    print(f"flipped after adaptation {accuracy(model, flipped[1300:], y[1300:]):.3f}")


if __name__ == "__main__":
    main()
