import torch
import torch.nn as nn

torch.manual_seed(0)


class SinkhornDistance(nn.Module):
    def __init__(self, eps=0.005, n_iter=30):
        super().__init__()
        self.eps = eps
        self.n_iter = n_iter

    @staticmethod
    def cost(x, y):
        return (x.unsqueeze(1) - y.unsqueeze(0)).pow(2).sum(-1)

    def forward(self, x, y):
        C = self.cost(x, y)
        a = torch.full((x.size(0),), 1.0 / x.size(0))
        b = torch.full((y.size(0),), 1.0 / y.size(0))
        K = torch.exp(-C / self.eps)
        u = torch.ones_like(a)
        for _ in range(self.n_iter):
            v = b / (K.t() @ u)
            u = a / (K @ v)
        plan = u.unsqueeze(1) * K * v.unsqueeze(0)
        return (plan * C).sum()


def spiral(n, turns):
    t = torch.linspace(0.1, 1.0, n)
    ang = 2 * torch.pi * turns * t
    return torch.stack([t * ang.cos(), t * ang.sin()], dim=1) * 0.25


class Flow(nn.Module):
    """moves a set of particles towards a target cloud"""

    def __init__(self, n):
        super().__init__()
        self.base = spiral(n, 0.2)
        self.shift = nn.Parameter(torch.zeros(2))
        self.warp = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
        nn.init.zeros_(self.warp[2].weight)
        nn.init.zeros_(self.warp[2].bias)

    def forward(self):
        return self.base + self.warp(self.base) + self.shift


n = 48
flow = Flow(n)
ot = SinkhornDistance()
opt = torch.optim.Adam(flow.parameters(), lr=0.01)
targets = [spiral(n, 0.25), spiral(n, 0.4), spiral(n, 0.5), spiral(n, 0.5) + torch.tensor([0.7, 0.4])]

for stage, target in enumerate(targets):
    for it in range(25):
        opt.zero_grad()
        d = ot(flow(), target)
        d.backward()
        opt.step()
    print(f"stage {stage}: OT cost {d.item():.6f}  shift {flow.shift.tolist()}")
