# fit a driven pendulum's parameters to noisy data; explicit simulation, trust region with rollback
import torch

torch.manual_seed(21)
torch.set_default_dtype(torch.float64)
DT, STEPS = 0.06, 110


def simulate(p, th0=1.2):
    """p = log(g/l), log damping, log drive amplitude, log cubic stiffness"""
    w2, c, amp, cub = p.exp()
    th, om = torch.tensor(th0), torch.tensor(0.0)
    out = []
    for k in range(STEPS):
        acc = -w2 * torch.sin(th) - c * om - cub * om ** 3 + amp * torch.cos(torch.tensor(1.7 * k * DT))
        om = om + DT * acc
        th = th + DT * om
        out.append(th)
    return torch.stack(out)


class TrustRegionLM:
    """Levenberg-Marquardt with gain ratio, trial points may be anything"""

    def __init__(self, params, residual_fn, radius=1e-3):
        self.p, self.fn, self.lam = params.clone(), residual_fn, radius
        self.rejected = self.overflowed = 0

    def cost(self, p):
        r = self.fn(p)
        return 0.5 * (r @ r)

    def jac(self):
        return torch.autograd.functional.jacobian(self.fn, self.p, vectorize=True, strategy="forward-mode")

    def step(self):
        with torch.no_grad():
            r = self.fn(self.p)
        J = self.jac()
        g, H, f0 = J.T @ r, J.T @ J, 0.5 * (r @ r)
        for attempt in range(12):
            d = torch.linalg.solve(H + self.lam * torch.diag(H.diagonal() + 1e-9), -g)
            trial = self.p + d
            with torch.no_grad():
                f1 = self.cost(trial)
            if not torch.isfinite(f1):
                self.overflowed += 1
                f1 = torch.tensor(float("inf"))
            predicted = -(g @ d) - 0.5 * d @ H @ d
            gain = (f0 - f1) / predicted
            if gain > 1e-3:
                self.p = trial
                self.lam = max(self.lam / 4.0, 1e-8)
                return f1.item(), gain.item(), attempt
            self.rejected += 1
            self.lam *= 6.0
        return f0.item(), float("nan"), attempt


truth = torch.tensor([4.0, 0.3, 0.8, 0.05]).log()
with torch.no_grad():
    clean = simulate(truth)
data = clean + 0.03 * torch.randn(STEPS)


def residual(p):
    return (simulate(p) - data) / 0.03


starts = [torch.tensor([1.0, 1.0, 0.2, 0.01]).log(), torch.tensor([9.0, 0.05, 2.0, 1e-3]).log()]
results = []
for s, p0 in enumerate(starts):
    lm = TrustRegionLM(p0, residual)
    best = float("inf")
    for it in range(20):
        cost, gain, tries = lm.step()
        if gain != gain:
            print(f"  start {s} it {it}: no acceptable step, stopping at {cost:.3f}")
            break
        improved, best = best - cost, min(best, cost)
        if it % 3 == 0:
            print(f"  start {s} it {it:2d} cost {cost:12.3f} gain {gain:6.3f} tries {tries} improvement {improved:.3g}")
        if improved < 1e-7 * cost:
            break
    results.append((best, lm.p))
    print(f"start {s}: cost {best:.3f}, rejected {lm.rejected}, of these overflowed {lm.overflowed}")

best, p = min(results, key=lambda r: r[0])
print("estimate", [round(v, 3) for v in p.exp().tolist()], "truth", [round(v, 3) for v in truth.exp().tolist()])
print("reduced chi2", round(2 * best / (STEPS - 4), 3))
