import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits


class LowRankLinear(nn.Module):
    def __init__(self, base, rank=4, alpha=8.0):
        super().__init__()
        self.base = base
        for p in self.base.parameters():
            p.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features ** 0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scale = alpha / rank

    def forward(self, x):
        return self.base(x) + self.scale * (x @ self.a.t()) @ self.b.t()


def build():
    return nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(),
        nn.Linear(128, 128), nn.ReLU(),
        nn.Linear(128, 10),
    )


def batches(x, y, size, steps, gen):
    for _ in range(steps):
        idx = torch.randint(0, len(x), (size,), generator=gen)
        yield x[idx], y[idx]


def accuracy(net, x, y):
    with torch.no_grad():
        return (net(x).argmax(1) == y).float().mean().item()


def main():
    torch.manual_seed(0)
    gen = torch.Generator().manual_seed(1)
    d = load_digits()
    x = torch.tensor(d.images / 16.0, dtype=torch.float32)
    y = torch.tensor(d.target)
    perm = torch.randperm(len(x), generator=gen)
    x, y = x[perm], y[perm]
    src, dst = x.reshape(-1, 64), x.transpose(1, 2).flip(2).reshape(-1, 64)

    net = build()
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    for xb, yb in batches(src[:1400], y[:1400], 64, 150, gen):
        opt.zero_grad()
        F.cross_entropy(net(xb), yb).backward()
        opt.step()
    print(f"source acc {accuracy(net, src[1400:], y[1400:]):.3f}  "
          f"rotated acc {accuracy(net, dst[1400:], y[1400:]):.3f}")

    for i in (0, 2, 4):
        net[i] = LowRankLinear(net[i])
    trainable = [p for p in net.parameters() if p.requires_grad]
    total = sum(p.numel() for p in net.parameters())
    print("trainable", sum(p.numel() for p in trainable), "of", total)

    opt = torch.optim.AdamW(trainable, lr=5e-3, weight_decay=0.0)
    for step, (xb, yb) in enumerate(batches(dst[:1400], y[:1400], 64, 240, gen)):
        loss = F.cross_entropy(net(xb), yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 40 == 0 or step == 239:
            print(f"step {step:4d} loss {loss.item():.4f}")
    print(f"rotated acc {accuracy(net, dst[1400:], y[1400:]):.3f}")


if __name__ == "__main__":
    main()
