# Learn the potential and the damping of a mechanical system from trajectories, gradients by the adjoint method.
import torch
import torch.nn as nn

torch.manual_seed(4)
torch.set_default_dtype(torch.float64)


def rk4_step(f, t, y, h):
    k1 = f(t, y)
    k2 = f(t + h / 2, y + h / 2 * k1)
    k3 = f(t + h / 2, y + h / 2 * k2)
    k4 = f(t + h, y + h * k3)
    return y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)


class OdeintAdjoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, func, ts, y0, *params):
        ys = [y0]
        with torch.no_grad():
            for t, s in zip(ts[:-1], ts[1:]):
                ys.append(rk4_step(func, t, ys[-1], s - t))
        ys = torch.stack(ys)
        ctx.func = func
        ctx.save_for_backward(ts, ys, *params)
        return ys

    @staticmethod
    def backward(ctx, gys):
        ts, ys, *params = ctx.saved_tensors
        lam = torch.zeros_like(ys[0])
        gp = [torch.zeros_like(p) for p in params]
        for i in reversed(range(len(ts) - 1)):
            lam = lam + gys[i + 1]
            with torch.enable_grad():
                y = ys[i].detach().requires_grad_(True)
                out = rk4_step(ctx.func, ts[i], y, ts[i + 1] - ts[i])
                g = torch.autograd.grad(out, [y] + list(params), lam, allow_unused=True)
            lam = g[0]
            for acc, new in zip(gp, g[1:]):
                if new is not None:
                    acc.add_(new)
        return (None, None, lam + gys[0], *gp)


def odeint_adjoint(func, y0, ts):
    return OdeintAdjoint.apply(func, ts, y0, *tuple(func.parameters()))


def make_potential(width=32):
    net = nn.Sequential(nn.Linear(1, width), nn.Softplus(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))
    return net


class Dynamics(nn.Module):
    def __init__(self, potential):
        super().__init__()
        self.nets = {"V": potential}
        self.damping = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, t, y):
        q, p = y[:, :1], y[:, 1:]
        with torch.enable_grad():
            qq = q if q.requires_grad else q.detach().requires_grad_(True)
            v = self.nets["V"](qq).sum()
            dv = torch.autograd.grad(v, qq, create_graph=True)[0]
        return torch.cat([p, -dv - self.damping(y) * p], dim=1)


def truth(t, y):
    q, p = y[:, :1], y[:, 1:]
    return torch.cat([p, -(q ** 3 - q) - 0.15 * p], dim=1)


def trajectories(n, ts):
    ys = [torch.rand(n, 2) * 3 - 1.5]
    for t, s in zip(ts[:-1], ts[1:]):
        ys.append(rk4_step(truth, t, ys[-1], s - t))
    return torch.stack(ys)


ts = torch.linspace(0, 2.0, 13)
train, val = trajectories(128, ts), trajectories(64, ts)
V = make_potential()
func = Dynamics(V)
opt = torch.optim.Adam(list(func.damping.parameters()) + list(V.parameters()), lr=1e-2)

for it in range(150):
    batch = train[:, torch.randperm(128)[:48]]
    pred = odeint_adjoint(func, batch[0], ts)
    loss = (pred - batch).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if it % 15 == 0:
        print(f"iter {it:3d} | loss {loss.item():.5f}")

pred = odeint_adjoint(func, val[0], ts)
print("FINAL", (pred - val).pow(2).mean().item())
