import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--hidden", type=int, default=64)
    p.add_argument("--length", type=int, default=20)
    p.add_argument("--steps", type=int, default=400)
    p.add_argument("--lr", type=float, default=5e-3)
    p.add_argument("--beta2", type=float, default=0.99)
    p.add_argument("--epsilon", type=float, default=1.0)
    p.add_argument("--batch", type=int, default=64)
    return p.parse_args()


class Forecaster(nn.Module):
    """Predicts the next three values of a noisy sum of waves."""

    def __init__(self, hidden, horizon=3):
        super().__init__()
        self.gru = nn.GRU(1, hidden, batch_first=True)
        self.norm = nn.LayerNorm(hidden)
        self.out = nn.Linear(hidden, horizon)

    def forward(self, x):
        _, h = self.gru(x)
        return self.out(self.norm(h[-1]))


def waves(batch, length, gen, horizon=3):
    t = torch.arange(length + horizon).float()
    f = 0.2 + 0.5 * torch.rand(batch, 1, generator=gen)
    ph = 6.283 * torch.rand(batch, 1, generator=gen)
    amp = 0.5 + torch.rand(batch, 1, generator=gen)
    s = amp * torch.sin(f * t + ph)
    s = s + 0.02 * torch.randn(s.shape, generator=gen)
    return s[:, :length, None], s[:, length:]


def optimizer_for(model, args):
    decay, rest = [], []
    for name, p in model.named_parameters():
        (decay if p.ndim > 1 else rest).append(p)
    return torch.optim.AdamW(
        [{"params": decay, "weight_decay": 1e-3}, {"params": rest, "weight_decay": 0.0}],
        lr=args.lr, betas=(0.9, args.beta2), eps=args.epsilon)


def main():
    args = parse()
    torch.manual_seed(0)
    gen = torch.Generator().manual_seed(0)
    model = Forecaster(args.hidden)
    opt = optimizer_for(model, args)
    avg = 0.0
    for step in range(args.steps):
        x, y = waves(args.batch, args.length, gen)
        loss = F.mse_loss(model(x), y)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        avg = loss.item() if step == 0 else 0.95 * avg + 0.05 * loss.item()
        if step % 40 == 0:
            print(f"step {step:3d} mse {avg:.4f}")
    x, y = waves(500, args.length, gen)
    with torch.no_grad():
        test = F.mse_loss(model(x), y).item()
    print(f"FINAL train {avg:.4f} test {test:.4f} var {y.var().item():.4f}")


if __name__ == "__main__":
    main()
