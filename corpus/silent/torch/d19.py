"""Wasserstein critic with gradient penalty on a two-moons-like cloud."""
import torch
from torch import nn, autograd
from sklearn.datasets import make_moons


def net(i, h, o, act):
    return nn.Sequential(nn.Linear(i, h), act, nn.Linear(h, h), act, nn.Linear(h, o))


def gradient_penalty(critic, real, fake):
    t = torch.rand(len(real), 1)
    mix = (t * real + (1 - t) * fake).requires_grad_(True)
    out = critic(mix).sum()
    (g,) = autograd.grad(out, mix, create_graph=True)
    return ((g.norm(2, dim=1) - 1) ** 2).mean()


def coverage(gen, data):
    with torch.no_grad():
        s = gen(torch.randn(1000, 4))
        d = torch.cdist(s, data[:1000])
    return d.min(1).values.mean().item(), d.min(0).values.mean().item()


def main(steps=130, n_critic=2, batch=128, lam=1.0):
    torch.manual_seed(0)
    pts, _ = make_moons(4000, noise=0.05, random_state=0)
    data = torch.tensor(pts, dtype=torch.float32)
    data = (data - data.mean(0)) / data.std(0)
    gen = net(4, 96, 2, nn.ReLU())
    critic = net(2, 96, 1, nn.LeakyReLU(0.2))
    og = torch.optim.Adam(gen.parameters(), lr=1e-3, betas=(0.0, 0.9))
    oc = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.0, 0.9))
    print("before", coverage(gen, data))
    for step in range(steps):
        for _ in range(n_critic):
            real = data[torch.randint(0, len(data), (batch,))]
            fake = gen(torch.randn(batch, 4)).detach()
            wd = critic(real).mean() - critic(fake).mean()
            loss_c = -wd + lam * gradient_penalty(critic, real, fake)
            oc.zero_grad()
            loss_c.backward()
            oc.step()
        loss_g = -critic(gen(torch.randn(batch, 4))).mean()
        og.zero_grad()
        loss_g.backward()
        og.step()
        if step % 25 == 0 or step == steps - 1:
            print(f"step {step:3d} critic {loss_c.item():+.3f} gen {loss_g.item():+.3f}")
    p, r = coverage(gen, data)
    print(f"FINAL sample->data {p:.3f} data->sample {r:.3f}")


if __name__ == "__main__":
    main()
