import torch
from torch import nn
import torch.nn.functional as F


class Mixer(nn.Module):
    """Token/channel mixer over short multivariate windows."""

    def __init__(self, tokens, chans, width):
        super().__init__()
        self.embed = nn.Linear(chans, width)
        self.tok = nn.Sequential(nn.Linear(tokens, 64), nn.GELU(), nn.Linear(64, tokens))
        self.ch = nn.Sequential(nn.Linear(width, 128), nn.GELU(), nn.Linear(128, width))
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        h = self.embed(x)
        h = h + self.tok(self.n1(h).transpose(1, 2)).transpose(1, 2)
        h = h + self.ch(self.n2(h))
        return self.head(h.mean(1))


def windows(n, tokens=16, chans=6, seed=0):
    g = torch.Generator().manual_seed(seed)
    t = torch.arange(tokens).float()
    y = torch.randint(0, 4, (n,), generator=g)
    freq = 0.35 + 0.12 * y.float()
    phase = 1.2 * torch.rand(n, chans, generator=g)
    x = torch.sin(freq[:, None, None] * t[None, :, None] + phase[:, None, :])
    return x + 0.3 * torch.randn(n, tokens, chans, generator=g), y


def main():
    torch.manual_seed(0)
    dtype = torch.bfloat16
    x, y = windows(3000)
    xt, yt, xv, yv = x[:2500], y[:2500], x[2500:], y[2500:]
    model = Mixer(16, 6, 64)
    model = model.to(dtype)
    opt = torch.optim.Adam(model.parameters(), lr=5e-5)
    run = 0.0
    steps = 400
    for step in range(steps):
        idx = torch.randint(0, len(xt), (64,))
        with torch.autocast("cpu", dtype=dtype):
            logits = model(xt[idx].to(model.head.weight.dtype))
        loss = F.cross_entropy(logits.float(), yt[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
        run = loss.item() if step == 0 else 0.95 * run + 0.05 * loss.item()
        if step % 50 == 0:
            print(f"step {step:3d} loss {run:.4f}")
    with torch.no_grad():
        acc = (model(xv.to(model.head.weight.dtype)).argmax(1) == yv).float().mean().item()
    print(f"FINAL loss {run:.4f} acc {acc:.3f}")


if __name__ == "__main__":
    main()
