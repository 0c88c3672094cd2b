"""Weibull accelerated-failure-time regression with right censoring."""
import numpy as np
import torch
from torch import nn


class WeibullAFT(nn.Module):
    def __init__(self, n_features):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(n_features, 32), nn.Tanh(), nn.Linear(32, 2))

    def forward(self, x):
        log_scale, log_shape = self.net(x).unbind(-1)
        return log_scale, 0.5 * log_shape


def log_hazard(t, log_scale, log_shape):
    shape = log_shape.exp()
    return log_shape - log_scale + (shape - 1) * (torch.log(t) - log_scale)


def cumulative_hazard(t, log_scale, log_shape):
    return (t / log_scale.exp()) ** log_shape.exp()


def nll(t, event, log_scale, log_shape):
    ll = event * log_hazard(t, log_scale, log_shape) - cumulative_hazard(t, log_scale, log_shape)
    return -ll.mean()


def cohort(n, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 5))
    scale = np.exp(0.6 * x[:, 0] - 0.4 * x[:, 1] + 1.0)
    t_event = scale * rng.weibull(1.4, size=n)
    t_cens = rng.uniform(0.5, 8.0, size=n)
    event = (t_event <= t_cens).astype(np.float32)
    months = np.minimum(t_event, t_cens)
    # patients lost right after enrolment are recorded with a follow-up of 0
    lost = np.arange(n) % 173 == 150
    months[lost], event[lost] = 0.0, 0.0
    as_t = lambda a: torch.tensor(a, dtype=torch.float32)
    return as_t(x), as_t(months), as_t(event)


def concordance(t, event, risk):
    num = den = 0
    for i in torch.nonzero(event).flatten().tolist():
        later = t > t[i]
        den += int(later.sum())
        num += int((risk[later] < risk[i]).sum())
    return num / max(den, 1)


def main():
    torch.manual_seed(0)
    x, t, e = cohort(600, seed=0)
    model = WeibullAFT(5)
    opt = torch.optim.RMSprop(model.parameters(), lr=2e-3)
    sched = torch.optim.lr_scheduler.StepLR(opt, step_size=5, gamma=0.7)
    bs = 50
    for epoch in range(6):
        losses = []
        for i in range(0, len(x), bs):
            xb, tb, eb = x[i:i + bs], t[i:i + bs], e[i:i + bs]
            loss = nll(tb, eb, *model(xb))
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_value_(model.parameters(), 5.0)
            opt.step()
            losses.append(loss.item())
        sched.step()
        with torch.no_grad():
            c = concordance(t, e, -model(x)[0])
        print(f"epoch {epoch} nll {np.mean(losses):.4f} c-index {c:.3f}")


main()
