"""Spherical embedding of digits: class directions with a von Mises-Fisher likelihood.
The normaliser needs the modified Bessel function, which torch lacks -> scipy + custom backward."""
import math

import numpy as np
import scipy.special
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

torch.manual_seed(0)
np.random.seed(0)
DIM = 128


class IveFn(torch.autograd.Function):
    """exponentially scaled I_v(z)"""

    @staticmethod
    def forward(ctx, v, z):
        ctx.v = v
        ctx.save_for_backward(z)
        out = scipy.special.ive(v, z.detach().double().numpy())
        return torch.as_tensor(out).to(z.dtype)

    @staticmethod
    def backward(ctx, g):
        z, = ctx.saved_tensors
        return None, g * (ive(ctx.v - 1, z) - ive(ctx.v, z) * (ctx.v + z) / z)


def ive(v, z):
    return IveFn.apply(v, z)


def vmf_log_norm(kappa, dim=DIM):
    m = dim / 2
    log_i = torch.log(ive(m - 1, kappa)) + kappa
    return (m - 1) * torch.log(kappa) - m * math.log(2 * math.pi) - log_i


class SphereNet(nn.Module):
    def __init__(self, n_in=64, n_cls=10, dim=DIM):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(n_in, 128), nn.ELU(), nn.Linear(128, dim))
        self.spread = nn.Sequential(nn.Linear(n_in, 32), nn.Tanh(), nn.Linear(32, 1))
        nn.init.constant_(self.spread[-1].bias, 14.0)
        self.mu = nn.Parameter(torch.randn(n_cls, dim))

    def forward(self, x):
        z = F.normalize(self.body(x), dim=-1)
        kappa = F.softplus(self.spread(x)).squeeze(-1) + 1e-3
        return z, kappa


def nll(net, x, y):
    z, kappa = net(x)
    cos = z @ F.normalize(net.mu, dim=-1).t()
    logp = vmf_log_norm(kappa) + kappa * cos.gather(1, y[:, None]).squeeze(1)
    ce = F.cross_entropy(kappa[:, None] * cos, y)
    return -logp.mean() / DIM + ce, cos, kappa


if __name__ == "__main__":
    X, Y = load_digits(return_X_y=True)
    xtr, xte, ytr, yte = train_test_split(X / 16.0, Y, test_size=0.25, random_state=1)
    xtr, xte = (torch.tensor(a, dtype=torch.float32) for a in (xtr, xte))
    ytr, yte = torch.tensor(ytr), torch.tensor(yte)
    net = SphereNet()
    opt = torch.optim.Adam([
        {"params": net.body.parameters()},
        {"params": [net.mu]},
        {"params": net.spread.parameters(), "lr": 2e-2},
    ], lr=2e-3)
    for it in range(60):
        idx = torch.randint(0, len(xtr), (128,))
        loss, cos, kappa = nll(net, xtr[idx], ytr[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if it % 5 == 0:
            with torch.no_grad():
                _, c, k = nll(net, xte, yte)
            acc = (c.argmax(1) == yte).float().mean().item()
            print(f"{it:3d} loss {loss.item():8.4f} kappa {kappa.mean().item():7.2f} test acc {acc:.3f}")
