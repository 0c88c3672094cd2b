"""Evolution strategies: a policy for a cart and pole is trained by its returns alone, without a backward pass."""
import torch
import torch.nn as nn
from torch.func import functional_call, vmap
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def simulate(state, force, dt=0.02):
    x, v, angle, w = state.unbind(-1)
    sin, cos = torch.sin(angle), torch.cos(angle)
    push = (force + 0.05 * w**2 * sin) / 1.1
    turn = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
    accel = push - 0.05 * turn * cos / 1.1
    return torch.stack([x + dt * v, v + dt * accel, angle + dt * w, w + dt * turn], -1)


def episode(net, params, starts, length=150):
    state, alive, total = starts, torch.ones(len(starts)), torch.zeros(len(starts))
    for _ in range(length):
        force = 10 * torch.tanh(functional_call(net, params, (state,)))[:, 0]
        state = simulate(state, force)
        alive = alive * ((state[:, 0].abs() < 2.4) & (state[:, 2].abs() < 0.21)).float()
        state = state.clamp(-5, 5)
        total = total + alive
    return total.mean()


def unflatten(net, flat):
    params, at = {}, 0
    for name, p in net.named_parameters():
        params[name] = flat[at : at + p.numel()].view_as(p)
        at += p.numel()
    return params


def main(generations=40, pairs=24, sigma=0.1):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    opt = torch.optim.Adam(net.parameters(), lr=0.05)
    for generation in range(generations):
        with torch.no_grad():
            flat = parameters_to_vector(net.parameters())
            noise = torch.randn(pairs, flat.numel())
            starts = 0.1 * (torch.rand(8, 4) - 0.5)
            both = torch.cat([flat + sigma * noise, flat - sigma * noise])
            scores = vmap(lambda f: episode(net, unflatten(net, f), starts))(both)
            ranks = scores.argsort().argsort().float() / (len(scores) - 1) - 0.5
            gradient = (ranks[:pairs] - ranks[pairs:]) @ noise / (2 * pairs * sigma)
        at = 0
        for p in net.parameters():
            p.grad = -gradient[at : at + p.numel()].view_as(p)
            at += p.numel()
        opt.step()
        opt.zero_grad()
        if generation % 5 == 0:
            print(f"{generation:3d} mean return {scores.mean():.1f} best {scores.max():.1f}")
    with torch.no_grad():
        final = episode(net, dict(net.named_parameters()), 0.1 * (torch.rand(64, 4) - 0.5))
    print(f"final return {final:.1f} of 150")


if __name__ == "__main__":
    main()
