# Learning motion and sensor noise of a wheeled robot through a soft-resampling particle filter
import math
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(2)
BEACONS = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0], [10.0, 10.0]])


def drive(T=25, slip=0.08, glitch=False):
    xy, th = torch.tensor([5.0, 5.0]) + torch.randn(2), torch.rand(()) * 6.28
    poses, controls, ranges = [], [], []
    for t in range(T):
        u = torch.stack([0.5 + 0.2 * torch.randn(()), 0.25 * torch.randn(())])
        th = th + u[1] + slip * torch.randn(())
        xy = xy + (u[0] + slip * torch.randn(())) * torch.stack([th.cos(), th.sin()])
        z = (xy - BEACONS).norm(dim=1) + 0.15 * torch.randn(4)
        if glitch and t == T // 2:
            z[0] = z[0] + 9.0
        poses.append(xy.clone()); controls.append(u); ranges.append(z)
    return torch.stack(poses), torch.stack(controls), torch.stack(ranges)


class ParticleFilter(nn.Module):
    def __init__(self, n=64, alpha=0.5):
        super().__init__()
        self.n, self.alpha = n, alpha
        self.log_motion = nn.Parameter(torch.tensor([0.3, 0.3]).log())
        self.log_sensor = nn.Parameter(torch.tensor(0.8).log())
        self.correct = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))

    def init(self, xy0):
        pos = xy0 + 0.5 * torch.randn(self.n, 2)
        ang = torch.rand(self.n, 1) * 2 * math.pi
        return torch.cat([pos, ang], 1), torch.full((self.n,), 1.0 / self.n)

    def move(self, p, u):
        noise = torch.randn(self.n, 2) * self.log_motion.exp()
        ang = p[:, 2] + u[1] + noise[:, 1]
        step = u[0] + noise[:, 0]
        return torch.stack([p[:, 0] + step * ang.cos(), p[:, 1] + step * ang.sin(), ang], 1)

    def weigh(self, p, w, z):
        expected = torch.cdist(p[:, :2], BEACONS)
        z = z + 0.1 * self.correct(z / 10.0)
        lik = torch.exp(-0.5 * ((z - expected) / self.log_sensor.exp()) ** 2)
        w = w * lik.prod(dim=1)
        return w / w.sum()

    def resample(self, p, w):
        q = self.alpha * w + (1 - self.alpha) / self.n
        idx = torch.multinomial(q.detach(), self.n, replacement=True)
        w_new = w[idx] / q[idx]
        return p[idx], w_new / w_new.sum()

    def forward(self, xy0, controls, ranges):
        p, w = self.init(xy0)
        track = []
        for u, z in zip(controls, ranges):
            p = self.move(p, u)
            w = self.weigh(p, w, z)
            track.append((w[:, None] * p[:, :2]).sum(0))
            if 1.0 / (w.detach() ** 2).sum() < self.n / 2:
                p, w = self.resample(p, w)
        return torch.stack(track)


pf = ParticleFilter()
opt = torch.optim.Adam(pf.parameters(), lr=0.03)
for it in range(60):
    poses, controls, ranges = drive(glitch=(it % 7 == 6))
    est = pf(poses[0], controls, ranges)
    loss = F.smooth_l1_loss(est, poses)
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(pf.parameters(), 5.0)
    opt.step()
    if it % 4 == 0:
        s = pf.log_sensor.exp().item()
        m = pf.log_motion.exp().tolist()
        print(f"it {it:2d} loss {loss.item():.4f} sensor std {s:.3f} motion std {m[0]:.3f} {m[1]:.3f}")
