"""Fit predator-prey rates to a field survey by gradient descent with backtracking."""
import torch

torch.manual_seed(2)
DT, STEPS = 0.05, 160


def simulate(log_rates):
    a, b, c, d = log_rates.exp()
    hare, lynx = torch.tensor(1.5), torch.tensor(1.0)
    rows = []
    for _ in range(STEPS):
        dh = a * hare - b * hare * lynx
        dl = d * hare * lynx - c * lynx
        hare, lynx = hare + DT * dh, lynx + DT * dl
        rows.append(torch.stack([hare, lynx]))
    return torch.stack(rows)


truth = torch.tensor([1.1, 0.8, 1.0, 0.6]).log()
survey = simulate(truth) * (1 + 0.05 * torch.randn(STEPS, 2))
survey[torch.rand(STEPS, 2) < 0.35] = float("nan")     # weeks without a count
counted = ~torch.isnan(survey)


def objective(log_rates):
    gap = simulate(log_rates) - survey
    gap = torch.where(counted, gap, torch.zeros(()))
    return gap.pow(2).sum() / counted.sum()


log_rates = torch.tensor([0.6, 0.6, 0.6, 0.9]).log()
best = float("inf")
wild = 0
for it in range(40):
    log_rates.requires_grad_(True)
    loss = objective(log_rates)
    (grad,) = torch.autograd.grad(loss, log_rates)
    log_rates = log_rates.detach()

    stride = 16.0
    with torch.no_grad():
        while stride > 1e-7:
            trial = log_rates - stride * grad
            value = objective(trial)
            if not torch.isfinite(value):
                wild += 1
            if value < loss - 1e-4 * stride * grad.pow(2).sum():
                log_rates = trial
                break
            stride *= 0.5
    best = min(best, loss.item())
    if it % 5 == 0:
        print(f"{it:2d} loss {loss.item():.5f} stride {stride:.2e} rates", [round(v, 3) for v in log_rates.exp().tolist()])
print("best", round(best, 5), "overshooting trials:", wild)
