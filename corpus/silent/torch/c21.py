"""ConvNet on digits: bfloat16 autocast, gradient accumulation over 4 micro-batches, spectral norm on the head."""
import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm


def build(width):
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.GroupNorm(4, width), nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.GroupNorm(4, 2 * width), nn.ReLU(),
        nn.Conv2d(2 * width, 2 * width, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(),
        spectral_norm(nn.Linear(8 * width, 64)), nn.ReLU(),
        nn.Linear(64, 10),
    )


def main(a):
    torch.manual_seed(a.seed)
    d = load_digits()
    x = torch.tensor(d.images, dtype=torch.float32)[:, None] / 16
    y = torch.tensor(d.target)
    p = torch.randperm(len(x))
    x, y = x[p], y[p]
    xtr, ytr, xte, yte = x[:1400], y[:1400], x[1400:], y[1400:]

    model = build(a.width)
    opt = torch.optim.AdamW(model.parameters(), lr=a.lr, weight_decay=1e-2)
    ce = nn.CrossEntropyLoss(label_smoothing=0.1)

    for step in range(a.steps):
        opt.zero_grad()
        shown = 0.0
        for _ in range(a.accum):
            i = torch.randint(0, len(xtr), (a.micro,))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = ce(model(xtr[i]), ytr[i]) / a.accum
            loss.backward()
            shown += loss.item()
        opt.step()
        if step % 10 == 0:
            print(f"step {step:3d}  loss {shown:.4f}")

    model.eval()
    with torch.no_grad():
        acc = (model(xte).argmax(1) == yte).float().mean().item()
    print(f"final metric: loss {shown:.4f} acc {acc:.4f}")


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--steps", type=int, default=90)
    ap.add_argument("--accum", type=int, default=4)
    ap.add_argument("--micro", type=int, default=16)
    ap.add_argument("--width", type=int, default=16)
    ap.add_argument("--seed", type=int, default=1)
    main(ap.parse_args())
