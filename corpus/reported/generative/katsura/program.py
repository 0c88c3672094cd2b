# Energy-based model of a 2-D density, persistent contrastive divergence with short-run Langevin.
import torch
from torch import nn

torch.manual_seed(9)
gen = torch.Generator().manual_seed(42)


def spirals(n):
    r = torch.rand(n, generator=gen).sqrt()
    arm = torch.randint(0, 2, (n,), generator=gen) * torch.pi
    ang = 4.5 * r + arm
    pts = torch.stack([2.2 * r * ang.cos(), 2.2 * r * ang.sin()], 1)
    return pts + 0.08 * torch.randn(n, 2, generator=gen)


class Energy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 1))

    def forward(self, x):
        return self.net(x).squeeze(1) + 0.05 * x.pow(2).sum(1)


def langevin(energy, x, steps=20, step_size=0.02):
    for p in energy.parameters():
        p.requires_grad_(False)
    for _ in range(steps):
        x = x.detach().requires_grad_(True)
        grad = torch.autograd.grad(energy(x).sum(), x)[0]
        x = x - step_size * grad.clamp(-10, 10) + (2 * step_size) ** 0.5 * torch.randn_like(x)
    for p in energy.parameters():
        p.requires_grad_(True)
    return x.detach().clamp(-5, 5)


def energy_distance(a, b):
    return (2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean()).item()


data, held_out = spirals(5000), spirals(1500)
energy = Energy()
opt = torch.optim.Adam(energy.parameters(), lr=2e-3, betas=(0.5, 0.99))
buffer = torch.rand(2048, 2) * 6 - 3
print("before", energy_distance(buffer[:1500], held_out))

for it in range(260):
    pos = data[torch.randint(0, len(data), (256,))]
    pick = torch.randint(0, len(buffer), (256,))
    start = buffer[pick]
    fresh = torch.rand(256) < 0.05
    start[fresh] = torch.rand(int(fresh.sum()), 2) * 6 - 3
    neg = langevin(energy, start)
    buffer[pick] = neg
    e_pos, e_neg = energy(pos), energy(neg)
    cd = e_pos.mean() - e_neg.mean()
    loss = cd + 0.01 * (e_pos ** 2 + e_neg ** 2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if it % 26 == 0:
        print(f"it {it:4d} loss {loss.item():+.4f} cd {cd.item():+.4f} E(data) {e_pos.mean().item():+.3f}")

samples = langevin(energy, torch.rand(1500, 2) * 6 - 3, steps=200)
print("FINAL", energy_distance(samples, held_out))
