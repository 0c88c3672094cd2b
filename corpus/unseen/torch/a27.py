"""Mixture density network: joint angle (degrees) from a sensor reading, an inverse problem."""
import math

import torch
import torch.nn as nn


class MDN(nn.Module):
    def __init__(self, n_components=5, hidden=40):
        super().__init__()
        self.hidden = nn.Sequential(nn.Linear(1, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
        self.z_pi = nn.Linear(hidden, n_components)
        self.z_mu = nn.Linear(hidden, n_components)
        self.z_sigma = nn.Linear(hidden, n_components)

    def forward(self, x):
        h = self.hidden(x)
        pi = torch.softmax(self.z_pi(h), dim=-1)
        mu = self.z_mu(h)
        sigma = torch.exp(self.z_sigma(h))
        return pi, mu, sigma


def gaussian_pdf(y, mu, sigma):
    z = (y.expand_as(mu) - mu) / sigma
    return torch.exp(-0.5 * z ** 2) / (sigma * math.sqrt(2 * math.pi))


def mdn_loss(pi, mu, sigma, y):
    likelihood = (gaussian_pdf(y, mu, sigma) * pi).sum(dim=1)
    return -torch.log(likelihood).mean()


def dataset(n=1200, seed=0):
    g = torch.Generator().manual_seed(seed)
    y = torch.rand(n, 1, generator=g) * 60 - 30
    x = torch.sin(0.25 * y) * 7 + y * 0.2 + 0.1 * torch.randn(n, 1, generator=g)
    return x / 10, y


def sample(pi, mu, sigma):
    k = torch.multinomial(pi, 1)
    return (mu + sigma * torch.randn_like(mu)).gather(1, k)


if __name__ == "__main__":
    torch.manual_seed(1)
    x, y = dataset()
    net = MDN()
    opt = torch.optim.Adam(net.parameters(), lr=2e-2)
    for epoch in range(16):
        perm = torch.randperm(len(x))
        for idx in perm.split(100):
            loss = mdn_loss(*net(x[idx]), y[idx])
            opt.zero_grad()
            loss.backward()
            opt.step()
        if epoch % 2 == 0:
            print("epoch", epoch, "nll", round(loss.item(), 4))
    with torch.no_grad():
        out = net(torch.linspace(-1, 1, 5).unsqueeze(1))
        print(sample(*out).flatten().tolist())
