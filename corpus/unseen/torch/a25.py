# Poisson regression (log link) by steepest descent with a backtracking line search.
# exp() of a bold trial step may overflow; such trials are simply rejected.
import math

import numpy as np
import torch

rng = np.random.default_rng(12)
X = rng.normal(size=(300, 6)) * np.array([1, 1, 3, 5, 0.5, 8])
beta_true = np.array([0.4, -0.3, 0.1, 0.05, 0.8, -0.03])
y = rng.poisson(np.exp(np.clip(X @ beta_true + 1.0, None, 6)))

X = torch.tensor(np.column_stack([np.ones(len(X)), X]), dtype=torch.float32)
y = torch.tensor(y, dtype=torch.float32)
beta = torch.zeros(7, requires_grad=True)


def objective(b):
    eta = X @ b
    return (eta.exp() - y * eta).mean() + 1e-4 * b.pow(2).sum()


def backtrack(b, direction, f0, slope, step, shrink=0.5, c1=1e-4, max_halvings=40):
    best_trial, rejected = math.inf, 0
    for _ in range(max_halvings):
        with torch.no_grad():
            trial = objective(b + step * direction).item()
        best_trial = min(best_trial, trial)
        if math.isfinite(trial) and trial <= f0 + c1 * step * slope:
            return step, trial, rejected
        rejected += not math.isfinite(trial)
        step *= shrink
    return 0.0, f0, rejected


step, total_rejected, trace = 64.0, 0, []
for it in range(80):
    beta.grad = None
    f = objective(beta)
    f.backward()
    g = beta.grad
    d = -g
    slope = float(g @ d)
    step, f_new, rej = backtrack(beta.detach(), d, f.item(), slope, step * 16)
    total_rejected += rej
    trace.append(f.item())
    if it % 10 == 0:
        print(f"it {it:3d} f {f.item():.5f} |g| {g.norm().item():.3e} step {step:.2e} overflow trials so far {total_rejected}")
    if step == 0.0 or g.norm() < 1e-5:
        break
    with torch.no_grad():
        beta += step * d

print("f:", trace[0], "->", trace[-1])
print("beta", [round(b, 3) for b in beta.tolist()])
assert total_rejected > 0
assert trace[-1] < trace[0] and torch.isfinite(beta).all()
