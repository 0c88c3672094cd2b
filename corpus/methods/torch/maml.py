"""MAML on sine waves: the gradient goes through three unrolled steps of the inner loop."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call


def task():
    return 0.5 + 4 * torch.rand(()), math.pi * torch.rand(())


def draw(params, n):
    amplitude, phase = params
    x = 10 * torch.rand(n, 1) - 5
    return x, amplitude * torch.sin(x + phase)


def adapt(net, weights, x, y, steps=3, lr=0.02, create_graph=True):
    for _ in range(steps):
        loss = F.mse_loss(functional_call(net, weights, (x,)), y)
        grads = torch.autograd.grad(loss, list(weights.values()), create_graph=create_graph)
        weights = {name: w - lr * g for (name, w), g in zip(weights.items(), grads)}
    return weights


def evaluate(net, tasks=50):
    before, after = 0.0, 0.0
    weights = {name: p.detach().requires_grad_() for name, p in net.named_parameters()}
    for _ in range(tasks):
        one = task()
        x, y = draw(one, 10)
        xq, yq = draw(one, 100)
        fast = adapt(net, weights, x, y, steps=5, create_graph=False)
        with torch.no_grad():
            before += F.mse_loss(functional_call(net, weights, (xq,)), yq).item() / tasks
            after += F.mse_loss(functional_call(net, fast, (xq,)), yq).item() / tasks
    return before, after


def main(iterations=400, tasks=8):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1))
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    for i in range(iterations):
        loss = 0.0
        for _ in range(tasks):
            one = task()
            x, y = draw(one, 10)
            xq, yq = draw(one, 10)
            fast = adapt(net, dict(net.named_parameters()), x, y)
            loss = loss + F.mse_loss(functional_call(net, fast, (xq,)), yq) / tasks
        opt.zero_grad()
        loss.backward()
        opt.step()
        if i % 50 == 0:
            print(f"{i:4d} loss after adaptation {loss.item():.3f}")
    before, after = evaluate(net)
    print(f"error before adaptation {before:.3f}, after {after:.3f}")


if __name__ == "__main__":
    main()
