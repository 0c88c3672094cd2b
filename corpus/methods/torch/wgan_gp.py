"""A Wasserstein GAN with a gradient penalty, on eight Gaussians in a ring."""
import math

import torch
import torch.nn as nn


def ring(n):
    angle = torch.randint(0, 8, (n,)) * (2 * math.pi / 8)
    return torch.stack([angle.cos(), angle.sin()], 1) * 2 + 0.1 * torch.randn(n, 2)


def mlp(inputs, outputs, hidden=96):
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.LeakyReLU(0.2), nn.Linear(hidden, hidden), nn.LeakyReLU(0.2), nn.Linear(hidden, outputs))


def penalty(critic, real, fake):
    a = torch.rand(len(real), 1)
    mixed = (a * real + (1 - a) * fake).requires_grad_()
    (grad,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
    return (grad.norm(dim=1) - 1).square().mean()


def energy_distance(x, y):
    return (2 * torch.cdist(x, y).mean() - torch.cdist(x, x).mean() - torch.cdist(y, y).mean()).item()


def main(steps=500, critics=4, batch=128):
    torch.manual_seed(0)
    generator, critic = mlp(8, 2), mlp(2, 1)
    opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.0, 0.9))
    opt_c = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.0, 0.9))
    before = energy_distance(generator(torch.randn(1000, 8)).detach(), ring(1000))
    for step in range(steps):
        for _ in range(critics):
            real, fake = ring(batch), generator(torch.randn(batch, 8)).detach()
            loss_c = critic(fake).mean() - critic(real).mean() + 2.0 * penalty(critic, real, fake)
            opt_c.zero_grad()
            loss_c.backward()
            opt_c.step()
        loss_g = -critic(generator(torch.randn(batch, 8))).mean()
        opt_g.zero_grad()
        loss_g.backward()
        opt_g.step()
        if step % 50 == 0:
            print(f"{step:4d} critic {loss_c.item():+.4f} generator {loss_g.item():+.4f}")
    with torch.no_grad():
        made = generator(torch.randn(1000, 8))
    print(f"energy distance {before:.4f} at first, {energy_distance(made, ring(1000)):.4f} at the end")


if __name__ == "__main__":
    main()
