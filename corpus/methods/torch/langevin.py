"""Bayesian logistic regression, sampled with the Metropolis-adjusted Langevin algorithm."""
import torch
import torch.nn.functional as F


def data(n=300, d=5):
    x = torch.randn(n, d)
    w = torch.tensor([1.5, -1.0, 0.5, 0.0, 0.8])
    y = torch.bernoulli(torch.sigmoid(x @ w))
    return x, y, w


def log_posterior(w, x, y):
    """Of each chain."""
    logits = w @ x.T
    fit = -F.binary_cross_entropy_with_logits(logits, y.expand_as(logits), reduction="none").sum(-1)
    return fit - 0.5 * w.square().sum(-1) / 4.0


def value_and_grad(w, x, y):
    w = w.detach().requires_grad_()
    value = log_posterior(w, x, y)
    (grad,) = torch.autograd.grad(value.sum(), w)
    return value.detach(), grad


def log_proposal(to, at, grad, step):
    return -(to - at - step * grad).square().sum(-1) / (4 * step)


def main(draws=1500, chains=8, warmup=500):
    torch.manual_seed(0)
    x, y, true = data()
    w = torch.randn(chains, x.shape[1])
    step = torch.tensor(1e-3)
    value, grad = value_and_grad(w, x, y)
    kept, accepted = [], 0.0
    for i in range(draws):
        proposal = w + step * grad + (2 * step).sqrt() * torch.randn_like(w)
        new_value, new_grad = value_and_grad(proposal, x, y)
        ratio = new_value - value + log_proposal(w, proposal, new_grad, step) - log_proposal(proposal, w, grad, step)
        accept = torch.rand(chains).log() < ratio
        w = torch.where(accept[:, None], proposal, w)
        value = torch.where(accept, new_value, value)
        grad = torch.where(accept[:, None], new_grad, grad)
        rate = accept.float().mean()
        if i < warmup:
            step = step * torch.exp(0.05 * (rate - 0.57))
        else:
            kept.append(w)
            accepted += rate.item()
        if i % 250 == 0:
            print(f"{i:4d} log posterior {value.mean():.2f} step {step:.2e}")
    samples = torch.stack(kept)
    within = samples.var(0).mean(0)
    between = samples.mean(0).var(0)
    rhat = ((within + between) / within).sqrt()
    print(f"accepted {accepted / (draws - warmup):.2f} r-hat {rhat.max():.3f}")
    print("mean", [f"{v:.2f}" for v in samples.mean((0, 1)).tolist()], "true", true.tolist())


if __name__ == "__main__":
    main()
