"""Adapt a digits classifier to rotated digits with low-rank adapters."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits


class LoRALinear(nn.Module):
    def __init__(self, base: nn.Linear, rank=4, alpha=8.0):
        super().__init__()
        self.base = base
        for p in self.base.parameters():
            p.requires_grad_(False)
        self.A = nn.Parameter(torch.empty(rank, base.in_features))
        self.B = nn.Parameter(torch.zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))
        self.scale = alpha / rank

    def forward(self, x):
        return self.base(x) + self.scale * (x @ self.A.t() @ self.B.t())


def make_net():
    return nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(),
        nn.Linear(128, 128), nn.ReLU(),
        nn.Linear(128, 10),
    )


def loop(net, x, y, params, lr, steps, tag, gen):
    opt = torch.optim.AdamW(params, lr=lr, weight_decay=0.0)
    for step in range(steps):
        idx = torch.randint(0, len(x), (64,), generator=gen)
        loss = F.cross_entropy(net(x[idx]), y[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 40 == 0 or step == steps - 1:
            print(f"[{tag}] step {step:4d} loss {loss.item():.4f}")


def accuracy(net, x, y):
    with torch.no_grad():
        return (net(x).argmax(1) == y).float().mean().item()


def main():
    torch.manual_seed(0)
    gen = torch.Generator().manual_seed(1)
    d = load_digits()
    x = torch.tensor(d.images, dtype=torch.float32) / 16.0
    y = torch.tensor(d.target)
    perm = torch.randperm(len(x), generator=gen)
    x, y = x[perm], y[perm]
    upright = x.flatten(1)
    turned = torch.rot90(x, 1, dims=(1, 2)).flatten(1)
    ntr = 1400

    net = make_net()
    loop(net, upright[:ntr], y[:ntr], net.parameters(), 2e-3, 160, "pretrain", gen)
    print("upright acc", accuracy(net, upright[ntr:], y[ntr:]))
    print("turned acc before", accuracy(net, turned[ntr:], y[ntr:]))

    for i, m in enumerate(net):
        if isinstance(m, nn.Linear):
            net[i] = LoRALinear(m)
    trainable = [p for p in net.parameters() if p.requires_grad]
    print("trainable", sum(p.numel() for p in trainable))
    loop(net, turned[:ntr], y[:ntr], trainable, 5e-3, 240, "adapt", gen)
    print("turned acc after", accuracy(net, turned[ntr:], y[ntr:]))


if __name__ == "__main__":
    main()
