import torch
from torch import nn
import torch.nn.functional as F

torch.manual_seed(17)


class ChannelNorm(nn.Module):
    """Batch statistics in one pass over the data, as in our inference kernel."""

    def __init__(self, channels, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.gain = nn.Parameter(torch.ones(channels))
        self.shift = nn.Parameter(torch.zeros(channels))

    def forward(self, x):
        mean = x.mean(dim=0)
        mean_sq = (x * x).mean(dim=0)
        var = mean_sq - mean * mean
        inv_std = torch.rsqrt(var + self.eps)
        return (x - mean) * inv_std * self.gain + self.shift


class PumpNet(nn.Module):
    def __init__(self, channels=8):
        super().__init__()
        self.norm_in = ChannelNorm(channels)
        self.up = nn.Linear(channels, 64)
        self.norm_mid = ChannelNorm(64)
        self.down = nn.Linear(64, 1)

    def forward(self, x):
        h = self.norm_in(x)
        h = F.gelu(self.up(h))
        return self.down(self.norm_mid(h)).squeeze(1)


# sensor log: bearing voltages that idle around a few volts and move by a fraction of a volt
offsets = torch.tensor([5.1, 4.9, -5.3, 3.0, 6.2, -4.4, 2.2, 5.7])
spread = torch.tensor([0.10, 0.30, 0.12, 0.40, 0.15, 0.25, 0.20, 0.18])
z = torch.randn(2048, 8)
volts = offsets + spread * z
wear = torch.tanh(z[:, 1] - z[:, 3]) + 0.5 * z[:, 6] + 0.05 * torch.randn(2048)

net = PumpNet().bfloat16()
opt = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
for epoch in range(8):
    running = 0.0
    for rows in torch.randperm(2048).split(256):
        pred = net(volts[rows].bfloat16())
        loss = F.mse_loss(pred.float(), wear[rows])
        opt.zero_grad()
        loss.backward()
        opt.step()
        running += loss.item() / 8
    print("epoch", epoch, "mse", round(running, 4))
