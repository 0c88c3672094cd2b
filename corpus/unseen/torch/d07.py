import math
import torch
import torch.nn as nn

torch.manual_seed(2)
FS = 2000


def biquad_lowpass(fc, q=3.0):
    w = 2 * math.pi * fc / FS
    al = math.sin(w) / (2 * q)
    a0 = 1 + al
    b = [(1 - math.cos(w)) / 2 / a0, (1 - math.cos(w)) / a0, (1 - math.cos(w)) / 2 / a0]
    a = [-2 * math.cos(w) / a0, (1 - al) / a0]
    return torch.tensor(b), torch.tensor(a)


def filt(x, b, a):
    """direct form II transposed, x: (batch, time)"""
    z1 = x.new_zeros(x.size(0))
    z2 = x.new_zeros(x.size(0))
    out = []
    for n in range(x.size(1)):
        xn = x[:, n]
        yn = b[0] * xn + z1
        z1 = b[1] * xn - a[0] * yn + z2
        z2 = b[2] * xn - a[1] * yn
        out.append(yn)
    return torch.stack(out, dim=1)


class LearnedIIR(nn.Module):
    def __init__(self):
        super().__init__()
        self.b = nn.Parameter(torch.tensor([0.5, 0.0, 0.0]))
        self.a = nn.Parameter(torch.tensor([-0.5, 0.2]))

    def poles(self):
        a1, a2 = self.a.detach().tolist()
        d = complex(a1 * a1 - 4 * a2) ** 0.5
        return max(abs((-a1 + d) / 2), abs((-a1 - d) / 2))

    def forward(self, x):
        return filt(x, self.b, self.a)


def make_batch(n=16, T=400):
    t = torch.arange(T) / FS
    f = torch.empty(n, 1).uniform_(20, 400)
    x = torch.sin(2 * math.pi * f * t + 6.28 * torch.rand(n, 1)) + 0.3 * torch.randn(n, T)
    return x


b_true, a_true = biquad_lowpass(110.0)
net = LearnedIIR()
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 50)

for step in range(30):
    x = make_batch()
    with torch.no_grad():
        target = filt(x, b_true, a_true)
    y = net(x)
    loss = (y - target).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    sched.step()
    if step % 2 == 0:
        print(f"step {step:2d}  mse {loss.item():.5f}  |pole| {net.poles():.3f}  a {[round(v, 3) for v in net.a.tolist()]}")
print("true a:", [round(v, 3) for v in a_true.tolist()])
