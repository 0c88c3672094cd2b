import torch
import torch.nn as nn
from sklearn.datasets import load_breast_cancer
from torch.func import functional_call, grad_and_value, vmap

torch.manual_seed(12)

cancer = load_breast_cancer()
X = torch.tensor(cancer.data, dtype=torch.float32)
X = (X - X.mean(0)) / X.std(0)
y = torch.tensor(cancer.target, dtype=torch.float32) * 2 - 1
perm = torch.randperm(len(X))
tr, te = perm[:450], perm[450:]

net = nn.Sequential(nn.Linear(30, 16), nn.Tanh(), nn.Linear(16, 1))
params = {k: v.detach().clone() for k, v in net.named_parameters()}


def hinge(p, x, t):
    out = functional_call(net, p, (x.unsqueeze(0),)).squeeze()
    return torch.relu(1.0 - t * out)


per_example = vmap(grad_and_value(hinge), in_dims=(None, 0, 0))


def private_mean(grads, clip, sigma, gen):
    """every example gives a gradient of length `clip`, then gaussian noise is added"""
    n = next(iter(grads.values())).size(0)
    sq = sum(g.reshape(n, -1).pow(2).sum(1) for g in grads.values())
    factor = clip / sq.sqrt()
    out = {}
    for k, g in grads.items():
        s = torch.einsum("n,n...->...", factor, g)
        out[k] = (s + sigma * clip * torch.randn(s.shape, generator=gen)) / n
    return out


class Momentum:
    def __init__(self, params, lr, mu=0.9):
        self.lr, self.mu = lr, mu
        self.m = {k: torch.zeros_like(v) for k, v in params.items()}

    def apply(self, params, grads):
        new = {}
        for k, p in params.items():
            self.m[k] = self.mu * self.m[k] + grads[k]
            new[k] = p - self.lr * self.m[k]
        return new


@torch.no_grad()
def accuracy(p):
    out = functional_call(net, p, (X[te],)).squeeze(1)
    return (torch.sign(out) == y[te]).float().mean().item()


gen = torch.Generator().manual_seed(99)
opt = Momentum(params, lr=0.05)
budget = 0.0
for step in range(50):
    i = tr[torch.randint(0, len(tr), (40,), generator=gen)]
    grads, losses = per_example(params, X[i], y[i])
    g = private_mean(grads, clip=1.0, sigma=0.4, gen=gen)
    params = opt.apply(params, g)
    budget += 40 / len(tr)
    if step % 4 == 0:
        length = sum(v.pow(2).sum() for v in params.values()).sqrt().item()
        print(f"step {step:2d} hinge {losses.mean().item():.4f} epochs spent {budget:.2f} |w| {length:.3f} acc {accuracy(params):.3f}")
