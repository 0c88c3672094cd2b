"""A Hamiltonian network: the time derivatives of a pendulum are gradients of a learned energy."""
import torch
import torch.nn as nn


def pendulum(z):
    q, p = z.unbind(-1)
    return torch.stack([p, -torch.sin(q)], -1)


def energy(z):
    return 0.5 * z[..., 1] ** 2 - torch.cos(z[..., 0])


class HNN(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 1))

    def forward(self, z):
        with torch.enable_grad():
            if not z.requires_grad:
                z = z.requires_grad_()
            (grad,) = torch.autograd.grad(self.net(z).sum(), z, create_graph=True)
        return torch.stack([grad[..., 1], -grad[..., 0]], -1)


def rollout(field, z, steps, dt=0.05):
    path = [z]
    for _ in range(steps):
        k1 = field(z)
        k2 = field(z + dt / 2 * k1)
        k3 = field(z + dt / 2 * k2)
        k4 = field(z + dt * k3)
        z = (z + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)).detach()
        path.append(z)
    return torch.stack(path)


def main(steps=800):
    torch.manual_seed(0)
    model = HNN()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)
    for step in range(steps):
        z = (torch.rand(128, 2) - 0.5) * torch.tensor([5.0, 4.0])
        target = pendulum(z) + 0.02 * torch.randn_like(z)
        loss = (model(z) - target).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        schedule.step()
        if step % 100 == 0:
            print(f"{step:4d} loss {loss.item():.5f}")
    path = rollout(model, torch.tensor([[1.2, 0.0], [0.5, 1.0]]), 200)
    true = rollout(pendulum, path[0], 200)
    print(f"energy drift {(energy(path) - energy(path[0])).abs().max():.4f} path error {(path - true).abs().max():.3f}")


if __name__ == "__main__":
    main()
