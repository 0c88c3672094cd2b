"""LoRA alone: a frozen head gets an adapter with B = 0 for a small shift of its targets."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Adapter(nn.Module):
    def __init__(self, base, rank=8):
        super().__init__()
        self.register_buffer("weight", base)
        self.a = nn.Parameter(torch.randn(rank, base.shape[1]) / base.shape[1] ** 0.5)
        self.b = nn.Parameter(torch.zeros(base.shape[0], rank))

    def forward(self, x):
        return x @ self.weight.T + x @ self.a.T @ self.b.T


def teacher(base, noise=0.05, rank=4):
    u = torch.randn(base.shape[0], rank) @ torch.randn(rank, base.shape[1])
    return base + noise * u / rank**0.5


def main(steps=60, width=64, classes=20):
    torch.manual_seed(0)
    base = torch.randn(classes, width) / width**0.5
    wanted = teacher(base, noise=0.07)
    layer = Adapter(base)
    opt = torch.optim.AdamW(layer.parameters(), lr=1e-2, weight_decay=0.0)
    test = torch.randn(2000, width)
    goal = (test @ wanted.T).softmax(-1)

    def agreement():
        with torch.no_grad():
            return (layer(test).argmax(-1) == goal.argmax(-1)).float().mean().item()

    print(f"agreement before {agreement():.3f}")
    for step in range(steps):
        x = torch.randn(256, width)
        target = (x @ wanted.T).softmax(-1)
        # The entropy of the targets is a floor that the loss cannot pass.
        loss = F.cross_entropy(layer(x), target)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 10 == 0:
            print(f"{step:3d} loss {loss.item():.4f} agreement {agreement():.3f}")
    print(f"agreement after {agreement():.3f}")


if __name__ == "__main__":
    main()
