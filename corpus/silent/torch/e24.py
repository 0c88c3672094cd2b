import argparse
import torch
import torch.nn as nn


def deflection(n, gen):
    """Deflection (m) and slope (rad) of a clamped beam; load, stiffness, position vary."""
    pos = torch.rand(n, generator=gen)
    load = 0.5 + torch.rand(n, generator=gen)
    stiff = 0.7 + 0.6 * torch.rand(n, generator=gen)
    shape = torch.sin(3.1416 * pos) ** 2 + 0.3 * torch.sin(9.42 * pos) * load
    slope = torch.cos(6.2832 * pos) * load
    y = 0.02 * torch.stack([shape * load / stiff, slope / stiff], dim=1)
    x = torch.stack([2 * pos - 1, 2 * load - 2, 3 * (stiff - 1)], dim=1)
    return x, y


class Surrogate(nn.Module):
    def __init__(self, hidden=64, depth=4):
        super().__init__()
        sizes = [3] + [hidden] * depth
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes[:-1], sizes[1:]))
        self.width = hidden
        self.out = nn.Linear(hidden, 2)

    def forward(self, x):
        for layer in self.hidden:
            x = torch.relu(layer(x))
        return self.out(x) / self.width


class HalfTrainer:
    def __init__(self, model, lr):
        self.half = model.half()
        self.master = [p.detach().float().requires_grad_(True) for p in model.parameters()]
        self.opt = torch.optim.Adam(self.master, lr=lr)

    def step(self, x, y):
        pred = self.half(x.half()).float()
        loss = (pred - y).pow(2).mean()
        self.half.zero_grad()
        loss.backward()
        for m, p in zip(self.master, self.half.parameters()):
            m.grad = p.grad.float()
        self.opt.step()
        with torch.no_grad():
            for m, p in zip(self.master, self.half.parameters()):
                p.copy_(m)
        return loss.item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=300)
    ap.add_argument("--batch", type=int, default=2048)
    ap.add_argument("--lr", type=float, default=3e-3)
    args = ap.parse_args()
    torch.manual_seed(0)
    gen = torch.Generator().manual_seed(0)
    trainer = HalfTrainer(Surrogate(), args.lr)
    xv, yv = deflection(1000, gen)
    for step in range(args.steps):
        loss = trainer.step(*deflection(args.batch, gen))
        if step % 50 == 0 or step == args.steps - 1:
            with torch.no_grad():
                err = trainer.half(xv.half()).float() - yv
            print(f"step {step:3d} loss {loss:.3e} "
                  f"relative error {(err.pow(2).mean() / yv.var()).item():.4f}")


if __name__ == "__main__":
    main()
