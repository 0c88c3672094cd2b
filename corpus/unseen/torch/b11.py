"""Count autoencoder with a zero-inflated negative binomial likelihood (scRNA-seq style)."""
import torch
from torch import nn
import torch.nn.functional as F

torch.manual_seed(2024)


def fake_cells(n=600, genes=120, k=5):
    prog = torch.distributions.Gamma(0.4, 0.4).sample((k, genes))
    use = torch.distributions.Dirichlet(torch.full((k,), 0.5)).sample((n,))
    depth = torch.distributions.LogNormal(2.0, 0.9).sample((n, 1))
    rate = use @ prog * depth
    theta = 2.0
    lam = torch.distributions.Gamma(theta, theta / (rate + 1e-4)).sample()
    counts = torch.poisson(lam)
    counts[torch.rand_like(counts) < 0.2] = 0
    return counts


def zinb_nll(x, mu, theta, pi, eps=1e-8):
    nb = (torch.lgamma(x + theta) - torch.lgamma(theta) - torch.lgamma(x + 1)
          + theta * (torch.log(theta + eps) - torch.log(theta + mu + eps))
          + x * (torch.log(mu + eps) - torch.log(theta + mu + eps)))
    zero = torch.log(pi + (1 - pi) * torch.exp(nb) + eps)
    nonzero = torch.log(1 - pi + eps) + nb
    return -torch.where(x < 0.5, zero, nonzero).sum(1).mean()


class ZINBAutoencoder(nn.Module):
    def __init__(self, genes, hidden=64, latent=8):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(genes, hidden), nn.ReLU(), nn.Linear(hidden, latent))
        self.dec = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU())
        self.mean = nn.Linear(hidden, genes)
        self.disp = nn.Linear(hidden, genes)
        self.drop = nn.Linear(hidden, genes)

    def forward(self, x):
        h = self.dec(self.enc(x))
        mu = torch.exp(self.mean(h))
        theta = F.softplus(self.disp(h)) + 1e-4
        pi = torch.sigmoid(self.drop(h))
        return mu, theta, pi


X = fake_cells()
print("cells x genes", tuple(X.shape), "max count", int(X.max()), "zeros", round((X == 0).float().mean().item(), 3))
ae = ZINBAutoencoder(X.shape[1])
opt = torch.optim.Adam(ae.parameters(), lr=5e-3)
step = 0
for epoch in range(8):
    for idx in torch.randperm(len(X)).split(50):
        xb = X[idx]
        loss = zinb_nll(xb, *ae(xb))
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 8 == 0:
            print(f"{epoch}/{step}: nll {loss.item():.3f}")
        step += 1
