"""EEG window classifier: one attention block, fp16 autocast."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class TemporalAttention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, dim)
        self.v = nn.Linear(dim, dim)
        self.scale = 1.0 / math.sqrt(dim)

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        scores = torch.bmm(q, k.transpose(1, 2))
        attn = F.softmax(scores * self.scale, dim=-1)
        return torch.bmm(attn, v)


class EEGNet(nn.Module):
    def __init__(self, channels=8, dim=32, classes=2):
        super().__init__()
        self.proj = nn.Linear(channels, dim)
        self.att = TemporalAttention(dim)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Sequential(nn.Linear(dim, 32), nn.ReLU(), nn.Linear(32, classes))

    def forward(self, x):
        h = self.proj(x)
        h = self.norm(h + self.att(h))
        return self.head(h.mean(dim=1))


def recordings(n=640, length=24, channels=8, seed=0):
    """Amplitudes in microvolts, 10 Hz against 20 Hz rhythm; a few windows contain eye blinks."""
    g = torch.Generator().manual_seed(seed)
    label = torch.randint(0, 2, (n,), generator=g)
    t = torch.arange(length) / 64.0
    freq = torch.where(label == 1, 20.0, 10.0)
    phase = 6.28 * torch.rand(n, 1, generator=g)
    gain = 20 * (0.5 + torch.rand(n, channels, generator=g))
    wave = torch.sin(6.28 * freq.unsqueeze(1) * t + phase)
    x = wave.unsqueeze(2) * gain.unsqueeze(1) + 8 * torch.randn(n, length, channels, generator=g)
    bump = 1500 * torch.exp(-((torch.arange(length) - 12) / 3.0) ** 2)
    x[230::131] += bump.unsqueeze(1)
    return x, label


def main():
    torch.manual_seed(0)
    x, y = recordings()
    loader = DataLoader(TensorDataset(x[:512], y[:512]), batch_size=32)
    net = EEGNet()
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=4 * len(loader))
    step = 0
    for epoch in range(4):
        for xb, yb in loader:
            with torch.autocast(device_type="cpu", dtype=torch.float16):
                logits = net(xb)
                loss = F.cross_entropy(logits, yb)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            sched.step()
            if step % 8 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f} lr {sched.get_last_lr()[0]:.1e}")
            step += 1
    with torch.no_grad():
        print("test acc", (net(x[512:]).argmax(1) == y[512:]).float().mean().item())


if __name__ == "__main__":
    main()
