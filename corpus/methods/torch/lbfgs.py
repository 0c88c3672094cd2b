"""A small network for a differential equation, fitted with L-BFGS and a closure."""
import math

import torch
import torch.nn as nn


class Net(nn.Module):
    def __init__(self, hidden=24):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 1))

    def forward(self, t):
        # The initial values u(0) = 1 and u'(0) = 0 hold by construction.
        return 1 + t**2 * self.layers(t)


def residual(net, t):
    """u'' + 0.4 u' + 4 u = 0."""
    t = t.clone().requires_grad_()
    u = net(t)
    du = torch.autograd.grad(u.sum(), t, create_graph=True)[0]
    ddu = torch.autograd.grad(du.sum(), t, create_graph=True)[0]
    return ddu + 0.4 * du + 4 * u


def exact(t):
    w = math.sqrt(4 - 0.04)
    return torch.exp(-0.2 * t) * (torch.cos(w * t) + 0.2 / w * torch.sin(w * t))


def main(outer=25):
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    net = Net()
    t = torch.linspace(0, 3, 60)[:, None]
    opt = torch.optim.LBFGS(net.parameters(), lr=1.0, max_iter=20, history_size=20, line_search_fn="strong_wolfe")

    def closure():
        opt.zero_grad()
        loss = residual(net, t).square().mean()
        loss.backward()
        return loss

    for i in range(outer):
        loss = opt.step(closure)
        if i % 5 == 0:
            print(f"{i:3d} residual {loss.item():.3e}")
    with torch.no_grad():
        error = (net(t) - exact(t)).abs().max()
    print(f"largest error {error:.2e}")


if __name__ == "__main__":
    main()
