import math
import torch
from torch.func import jacrev, vmap

torch.manual_seed(31)
torch.set_default_dtype(torch.float64)

# sum of two decays measured with gaps: y(t) = c0 exp(-k0 t) + c1 exp(-k1 t)
t = torch.linspace(0, 4, 60)
true = torch.tensor([1.4, 0.5, 0.7, 3.0])


def model(theta, t):
    c0, k0, c1, k1 = theta
    return c0 * torch.exp(-k0 * t) + c1 * torch.exp(-k1 * t)


y = model(true, t) + 0.01 * torch.randn(60)
y[torch.rand(60) < 0.2] = float("nan")
seen = ~y.isnan()
print("missing samples:", int((~seen).sum()), " mean of the rest:", round(y.nanmean().item(), 4))


def residual(theta):
    return model(theta, t[seen]) - y[seen]


def cost(theta):
    return 0.5 * residual(theta).pow(2).sum()


class LevenbergMarquardt:
    """a trial step is taken only if its cost is lower; otherwise more damping"""

    def __init__(self, lam=1e-12, up=30.0, down=0.2, max_try=14):
        self.lam, self.up, self.down, self.max_try = lam, up, down, max_try
        self.rejected, self.singular, self.overflow = 0, 0, 0

    def step(self, theta):
        r, J = residual(theta), jacrev(residual)(theta)
        H, g, here = J.T @ J, J.T @ r, cost(theta)
        for _ in range(self.max_try):
            A = H + self.lam * torch.diag(H.diagonal().clamp_min(1e-12))
            L, info = torch.linalg.cholesky_ex(A)
            if info.item() > 0:
                self.singular += 1
                new = math.inf
            else:
                trial = theta - torch.cholesky_solve(g[:, None], L).squeeze(1)
                new = cost(trial).item()
                self.overflow += not math.isfinite(new)
            if new < here:
                self.lam = max(self.lam * self.down, 1e-14)
                return trial, new
            self.rejected += 1
            self.lam *= self.up
        return theta, here.item()


starts = torch.tensor([[1.0, 1.0, 1.0, 1.0], [0.1, 0.01, 5.0, 6.0], [2.0, -0.2, -1.0, 0.1], [0.5, 0.4, 0.5, 2.0]])
best, best_theta = math.inf, None
for n, theta in enumerate(starts):
    lm = LevenbergMarquardt()
    trace = [cost(theta).item()]
    for _ in range(40):
        theta, c = lm.step(theta)
        trace.append(c)
        if trace[-2] - c < 1e-12 * c and len(trace) > 5:
            break
    if c < best:
        best, best_theta = c, theta
    print(f"start {n}: {trace[0]:.3e} -> {c:.6f} in {len(trace) - 1} steps, rejected {lm.rejected} "
          f"(singular {lm.singular}, overflow {lm.overflow})")

J = jacrev(residual)(best_theta)
sigma2 = 2 * best / (seen.sum() - 4)
err = torch.linalg.inv(J.T @ J).diagonal().mul(sigma2).sqrt()
order = best_theta[[1, 3]].argsort()
print("rates", [round(v, 3) for v in best_theta[[1, 3]][order].tolist()], "+-", [round(v, 3) for v in err[[1, 3]][order].tolist()])
curve = vmap(lambda s: model(best_theta, s))(t)
print("rms where seen", (curve - y)[seen].pow(2).mean().sqrt().item())
assert best < 0.02
