"""Exact GP regression; the kernel matrix is singular (repeated inputs), so jitter grows until it factorises."""
import math

import torch
from torch import nn


def robust_cholesky(K, start=1e-10, tries=10):
    jitter = 0.0
    for k in range(tries):
        try:
            return torch.linalg.cholesky(K + jitter * torch.eye(len(K))), jitter
        except torch.linalg.LinAlgError:
            jitter = start * 10 ** k
    raise RuntimeError("kernel matrix cannot be factorised")


class GP(nn.Module):
    def __init__(self, x, y):
        super().__init__()
        self.x, self.y = x, y
        self.raw_ls = nn.Parameter(torch.tensor(0.5))
        self.raw_var = nn.Parameter(torch.tensor(0.0))
        self.raw_noise = nn.Parameter(torch.tensor(-19.0))
        self.used = []

    def kernel(self, a, b):
        d2 = (a.unsqueeze(1) - b.unsqueeze(0)).pow(2).sum(-1)
        return self.raw_var.exp() * torch.exp(-0.5 * d2 / self.raw_ls.exp() ** 2)

    def neg_mll(self):
        K = self.kernel(self.x, self.x) + self.raw_noise.exp().clamp(max=float("inf")) * torch.eye(len(self.x))
        L, jitter = robust_cholesky(K)
        self.used.append(jitter)
        alpha = torch.cholesky_solve(self.y.unsqueeze(1), L).squeeze(1)
        return 0.5 * self.y @ alpha + L.diagonal().log().sum() + 0.5 * len(self.x) * math.log(2 * math.pi)

    @torch.no_grad()
    def predict(self, xs):
        K = self.kernel(self.x, self.x) + self.raw_noise.exp() * torch.eye(len(self.x))
        L, _ = robust_cholesky(K)
        return self.kernel(xs, self.x) @ torch.cholesky_solve(self.y.unsqueeze(1), L).squeeze(1)


torch.manual_seed(0)
x = torch.linspace(-3, 3, 30).repeat(2).unsqueeze(1)
y = torch.sin(2 * x).squeeze(1) + 0.05 * torch.randn(60)
gp = GP(x, y)
opt = torch.optim.Adam(gp.parameters(), lr=0.1)
trace = []
for it in range(120):
    opt.zero_grad()
    loss = gp.neg_mll()
    loss.backward()
    nn.utils.clip_grad_norm_(gp.parameters(), 10.0)
    opt.step()
    trace.append(loss.item())
    if it % 20 == 0:
        print(f"{it:3d} nmll {loss.item():12.3f} jitter {gp.used[-1]:.1e}")

xs = torch.linspace(-2.5, 2.5, 11).unsqueeze(1)
rmse = (gp.predict(xs) - torch.sin(2 * xs).squeeze(1)).pow(2).mean().sqrt()
print("final", trace[-1], "rmse", rmse.item(), "jitters", sorted(set(gp.used)))
assert trace[-1] < trace[0] and all(torch.isfinite(p) for p in gp.parameters())
