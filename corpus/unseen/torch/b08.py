import torch
import torch.nn as nn
from torch.nn.utils.parametrizations import weight_norm

torch.manual_seed(42)


def conv(cin, cout, k=3, d=1):
    return weight_norm(nn.Conv1d(cin, cout, k, padding=d * (k - 1) // 2, dilation=d))


class ResUnit(nn.Module):
    def __init__(self, ch, dilation):
        super().__init__()
        self.c1 = conv(ch, ch, 3, dilation)
        c2 = nn.Conv1d(ch, ch, 1)
        nn.init.zeros_(c2.weight)   # start as identity
        nn.init.zeros_(c2.bias)
        self.c2 = weight_norm(c2)
        self.act = nn.ELU()

    def forward(self, x):
        return x + self.c2(self.act(self.c1(self.act(x))))


class Denoiser(nn.Module):
    def __init__(self, ch=24):
        super().__init__()
        self.stem = conv(1, ch, 7)
        self.body = nn.Sequential(*[ResUnit(ch, 2 ** i) for i in range(4)])
        self.head = conv(ch, 1, 7)

    def forward(self, x):
        return self.head(self.body(self.stem(x)))


def batch(n=16, T=128):
    t = torch.linspace(0, 1, T)
    f = torch.randint(2, 9, (n, 1)).float()
    ph = torch.rand(n, 1) * 6.283
    clean = torch.sin(6.283 * f * t + ph).unsqueeze(1)
    return clean + 0.3 * torch.randn_like(clean), clean


model = Denoiser()
opt = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.8, 0.99))
sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.99)
for step in range(40):
    noisy, clean = batch()
    loss = (model(noisy) - clean).abs().mean()
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
    sched.step()
    if step % 5 == 0:
        print(f"step={step} l1={loss.item():.4f} lr={sched.get_last_lr()[0]:.2e}")
