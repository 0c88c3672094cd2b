import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class ConvAE(nn.Module):
    def __init__(self, ch=12):
        super().__init__()
        self.encode = nn.Sequential(
            nn.Conv1d(1, ch, 5, stride=2, padding=2), nn.GELU(),
            nn.Conv1d(ch, 2 * ch, 5, stride=2, padding=2), nn.GELU(),
            nn.Conv1d(2 * ch, 4, 5, stride=2, padding=2),
        )
        self.decode = nn.Sequential(
            nn.ConvTranspose1d(4, 2 * ch, 4, stride=2, padding=1), nn.GELU(),
            nn.ConvTranspose1d(2 * ch, ch, 4, stride=2, padding=1), nn.GELU(),
            nn.ConvTranspose1d(ch, 1, 4, stride=2, padding=1),
        )

    def forward(self, x):
        return self.decode(self.encode(x))


def beats(n, length=64, seed=0):
    g = torch.Generator().manual_seed(seed)
    t = torch.linspace(0, 1, length)
    c = 0.2 + 0.6 * torch.rand(n, 1, generator=g)
    w = 0.03 + 0.05 * torch.rand(n, 1, generator=g)
    a = 0.5 + torch.rand(n, 1, generator=g)
    s = a * torch.exp(-((t - c) / w) ** 2) - 0.5 * a * torch.exp(-((t - c - 0.1) / w) ** 2)
    s = s + 0.02 * torch.randn(n, length, generator=g)
    return (s / s.std())[:, None]


class Exchange:
    """Stands for the all-reduce between replicas; gradients travel as halves."""

    def __init__(self, model, world=1):
        self.params, self.world = list(model.parameters()), world

    def reduce(self, scale):
        for p in self.params:
            wire = (p.grad * scale).to(torch.float16)
            p.grad = wire.to(torch.float32) / (scale * self.world)


def per_point(pred, target, n_total):
    return (pred - target).pow(2).flatten(1).mean(1).sum() / (n_total * target.shape[-1])


def main():
    torch.manual_seed(0)
    x = beats(1800)
    train, val = x[:1536], x[1536:]
    loader = DataLoader(TensorDataset(train), batch_size=16, shuffle=True)
    model = ConvAE()
    exchange = Exchange(model)
    opt = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-12)
    n_total = train.numel()
    scale = 1.0
    for epoch in range(4):
        seen = 0.0
        for (xb,) in loader:
            rec = model(xb)
            loss = per_point(rec, xb, n_total)
            opt.zero_grad()
            loss.backward()
            exchange.reduce(scale)
            opt.step()
            seen += loss.item() * n_total * 64 / 16
        print(f"epoch {epoch} mse {seen / len(loader):.4f}")
    with torch.no_grad():
        print(f"FINAL val mse {(model(val) - val).pow(2).mean().item():.4f}")


if __name__ == "__main__":
    main()
