import math
import torch
import torch.nn as nn

torch.manual_seed(51)
NEG_INF = float("-inf")


def log_target(x):
    """two half rings; nothing outside of the box and nothing in the gap"""
    r = x.norm(dim=1)
    lp = -0.5 * ((r - 2.0) / 0.25) ** 2
    lp = lp.masked_fill(x.abs().amax(1) > 3.0, NEG_INF)
    return lp.masked_fill(x[:, 0].abs() < 0.3, NEG_INF)


class Coupling(nn.Module):
    def __init__(self, flip, hid=32):
        super().__init__()
        self.flip = flip
        self.net = nn.Sequential(nn.Linear(1, hid), nn.Tanh(), nn.Linear(hid, 2))

    def forward(self, z):
        a, b = z.split(1, 1)
        if self.flip:
            a, b = b, a
        s, t = self.net(a).split(1, 1)
        s = 1.5 * torch.tanh(s)
        b = b * s.exp() + t
        return torch.cat([b, a] if self.flip else [a, b], 1), s.squeeze(1)

    def inverse(self, x):
        a, b = x.split(1, 1)
        if self.flip:
            a, b = b, a
        s, t = self.net(a).split(1, 1)
        s = 1.5 * torch.tanh(s)
        b = (b - t) * (-s).exp()
        return torch.cat([b, a] if self.flip else [a, b], 1), s.squeeze(1)


class Flow(nn.Module):
    def __init__(self, n=6):
        super().__init__()
        self.layers = nn.ModuleList(Coupling(i % 2 == 1) for i in range(n))
        self.base = torch.distributions.Normal(0.0, 1.5)

    @torch.no_grad()
    def sample(self, n):
        z = self.base.sample((n, 2))
        for l in self.layers:
            z, _ = l(z)
        return z

    def log_prob(self, x):
        ld = 0.0
        for l in reversed(self.layers):
            x, s = l.inverse(x)
            ld = ld - s
        return self.base.log_prob(x).sum(1) + ld


def mcmc_refresh(x, lp, n=4, size=0.3):
    acc = 0.0
    for _ in range(n):
        prop = x + size * torch.randn_like(x)
        lq = log_target(prop)
        ok = torch.rand(len(x)).log() < lq - lp
        x, lp = torch.where(ok[:, None], prop, x), torch.where(ok, lq, lp)
        acc += ok.float().mean().item() / n
    return x, lp, acc


flow = Flow()
opt = torch.optim.Adam(flow.parameters(), lr=5e-3)
skipped, curve = 0, []
for step in range(90):
    n = 1 if step % 10 == 3 else 256
    x = flow.sample(n)
    with torch.no_grad():
        lp, lq = log_target(x), flow.log_prob(x)
        logw = lp - lq
        log_z = torch.logsumexp(logw, 0) - math.log(n)
    if log_z == NEG_INF:
        skipped += 1
        continue
    w = torch.softmax(logw, 0)
    keep = torch.multinomial(w, 128, replacement=True)
    xs, _, acc = mcmc_refresh(x[keep], lp[keep])
    loss = -flow.log_prob(xs).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    curve.append(loss.item())
    if step % 15 == 0:
        ess = 1 / w.pow(2).sum().item() / n
        print(f"step {step:3d} nll {loss.item():.4f} logZ {log_z.item():.3f} ess {ess:.3f} outside {lp.isinf().float().mean().item():.2f} "
              f"worst logw {logw.min().item():.2f} mh acc {acc:.2f}")
print("batches without a single hit:", skipped)
assert sum(curve[-10:]) < sum(curve[:10])
