# Heteroscedastic regression with two networks and an ELBO-style objective, trained with minibatch SGD.
import math

import torch
from torch import nn


class MeanField(nn.Module):
    """Linear layer with factorised Gaussian weights."""

    def __init__(self, n_in, n_out, prior_std=1.0):
        super().__init__()
        self.w_mu = nn.Parameter(torch.randn(n_out, n_in) / math.sqrt(n_in))
        self.w_rho = nn.Parameter(torch.full((n_out, n_in), -4.0))
        self.b = nn.Parameter(torch.zeros(n_out))
        self.prior_std = prior_std

    def forward(self, x):
        std = nn.functional.softplus(self.w_rho)
        w = self.w_mu + std * torch.randn_like(std)
        return x @ w.T + self.b

    def kl(self):
        std = nn.functional.softplus(self.w_rho)
        ratio = std / self.prior_std
        return (0.5 * (ratio ** 2 + (self.w_mu / self.prior_std) ** 2 - 1) - ratio.log()).sum()


class BNN(nn.Module):
    def __init__(self, n_in):
        super().__init__()
        self.l1, self.l2 = MeanField(n_in, 24), MeanField(24, 1)

    def forward(self, x):
        return self.l2(torch.relu(self.l1(x))).squeeze(-1)

    def kl(self):
        return self.l1.kl() + self.l2.kl()


def log_likelihood(y, mean, noise_std):
    return -0.5 * ((y - mean) / noise_std) ** 2 - math.log(noise_std) - 0.5 * math.log(2 * math.pi)


def objective(model, x, y, n_total, noise_std=0.2, samples=2):
    ll = torch.stack([log_likelihood(y, model(x), noise_std).mean() for _ in range(samples)]).mean()
    elbo = ll - model.kl() / n_total
    return elbo


def main():
    torch.manual_seed(3)
    n = 500
    x = torch.randn(n, 3)
    y = torch.sin(2 * x[:, 0]) + 0.5 * x[:, 1] * x[:, 2] + 0.1 * torch.randn(n)
    model = BNN(3)
    opt = torch.optim.SGD(model.parameters(), lr=2e-3, momentum=0.9)
    sched = torch.optim.lr_scheduler.MultiStepLR(opt, milestones=[20, 30], gamma=0.3)
    for epoch in range(40):
        order = torch.randperm(n)
        total = 0.0
        for k in range(0, n, 50):
            idx = order[k:k + 50]
            opt.zero_grad()
            loss = objective(model, x[idx], y[idx], n)
            loss.backward()
            opt.step()
            total += loss.item()
        sched.step()
        if epoch % 5 == 0:
            with torch.no_grad():
                rmse = (model(x) - y).pow(2).mean().sqrt().item()
            print(f"epoch {epoch:2d} objective {total / 10:.4g} rmse {rmse:.4g}")


if __name__ == "__main__":
    main()
