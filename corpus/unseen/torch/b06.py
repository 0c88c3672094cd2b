import math
import torch
import torch.nn as nn

torch.manual_seed(5)


class ActNorm(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.loc = nn.Parameter(torch.zeros(d))
        self.log_s = nn.Parameter(torch.zeros(d))

    def forward(self, x):
        return (x + self.loc) * self.log_s.exp(), self.log_s.sum()


class InvertibleLinear(nn.Module):
    def __init__(self, d):
        super().__init__()
        w = torch.linalg.qr(torch.randn(d, d))[0]
        self.weight = nn.Parameter(w)

    def forward(self, x):
        return x @ self.weight.t(), torch.logdet(self.weight)


class Coupling(nn.Module):
    def __init__(self, d, h=32):
        super().__init__()
        self.half = d // 2
        self.net = nn.Sequential(nn.Linear(self.half, h), nn.ReLU(), nn.Linear(h, 2 * (d - self.half)))
        nn.init.zeros_(self.net[-1].weight)
        nn.init.zeros_(self.net[-1].bias)

    def forward(self, x):
        a, b = x[:, :self.half], x[:, self.half:]
        s, t = self.net(a).chunk(2, dim=1)
        s = torch.tanh(s)
        return torch.cat([a, b * s.exp() + t], 1), s.sum(1)


class Glow(nn.Module):
    def __init__(self, d, k):
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(k):
            self.layers += [ActNorm(d), InvertibleLinear(d), Coupling(d)]

    def log_prob(self, x):
        ld = x.new_zeros(len(x))
        for layer in self.layers:
            x, inc = layer(x)
            ld = ld + inc
        base = -0.5 * (x ** 2).sum(1) - 0.5 * x.shape[1] * math.log(2 * math.pi)
        return base + ld


def sample(n):
    z = torch.randn(n, 6)
    z[:, 1] = z[:, 0] ** 2 - 1 + 0.2 * z[:, 1]
    z[:, 4] = torch.sin(2 * z[:, 3]) + 0.2 * z[:, 4]
    return z


flow = Glow(6, 4)
optim = torch.optim.Adam(flow.parameters(), lr=1e-3)
for i in range(40):
    nll = -flow.log_prob(sample(256)).mean()
    optim.zero_grad()
    nll.backward()
    torch.nn.utils.clip_grad_norm_(flow.parameters(), 5.0)
    optim.step()
    if i % 5 == 0:
        print(i, "nll", nll.item())
