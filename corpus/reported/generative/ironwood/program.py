import torch
import torch.nn as nn

torch.manual_seed(14)
CLIP, N_CRITIC, BATCH = 0.05, 4, 256


class Sampler:
    """Five-component mixture on a tilted ellipse."""

    def __init__(self, seed):
        self.g = torch.Generator().manual_seed(seed)
        ang = torch.arange(5) * 2 * torch.pi / 5
        self.centres = torch.stack([2.0 * ang.cos(), ang.sin() + 0.5 * ang.cos()], 1) + torch.tensor([1.0, -0.5])

    def __call__(self, n):
        k = torch.randint(0, 5, (n,), generator=self.g)
        return self.centres[k] + 0.15 * torch.randn(n, 2, generator=self.g)


netG = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
netD = nn.Sequential(nn.Linear(2, 128), nn.LeakyReLU(0.2), nn.Linear(128, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))
optG = torch.optim.RMSprop(netG.parameters(), lr=2e-3)
optD = torch.optim.RMSprop(netD.parameters(), lr=5e-3)
real = Sampler(0)


def energy_distance(a, b):
    return (2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean()).item()


test = Sampler(1)(1500)
with torch.no_grad():
    print("before", energy_distance(netG(torch.randn(1500, 6)), test))

for it in range(80):
    for p in netD.parameters():
        p.requires_grad_(True)
    for _ in range(N_CRITIC):
        with torch.no_grad():
            fake = netG(torch.randn(BATCH, 6))
        lossD = netD(fake).mean() - netD(real(BATCH)).mean()
        optD.zero_grad()
        lossD.backward()
        optD.step()
        with torch.no_grad():
            for p in netD.parameters():
                p.clamp_(-CLIP, CLIP)
    for p in netD.parameters():
        p.requires_grad_(False)
    lossG = -netD(netG(torch.randn(BATCH, 6))).mean()
    optG.zero_grad()
    lossG.backward()
    optG.step()
    if it % 10 == 0:
        at_bound = sum((p.abs() >= CLIP - 1e-7).sum().item() for p in netD.parameters())
        total = sum(p.numel() for p in netD.parameters())
        print(f"[{it}/80] Loss_D: {lossD.item():.6f} Loss_G: {lossG.item():.6f} clipped {at_bound}/{total}")

with torch.no_grad():
    print("FINAL", energy_distance(netG(torch.randn(1500, 6)), test))
