import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributions import Beta, Kumaraswamy

torch.manual_seed(7)
device = "cpu"


class SparseVAE(nn.Module):
    """latent switches in (0,1): Kumaraswamy posterior, U-shaped Beta prior"""

    def __init__(self, n_in=64, n_hid=128, n_lat=12, prior=(0.4, 0.4)):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(n_in, n_hid), nn.Tanh())
        self.to_a = nn.Linear(n_hid, n_lat)
        self.to_b = nn.Linear(n_hid, n_lat)
        self.dec = nn.Sequential(nn.Linear(n_lat, n_hid), nn.Tanh(), nn.Linear(n_hid, n_in))
        self.prior = Beta(torch.tensor(prior[0]), torch.tensor(prior[1]))

    def posterior(self, x):
        h = self.enc(x)
        a = F.softplus(self.to_a(h)) + 0.05
        b = F.softplus(self.to_b(h)) + 0.05
        return Kumaraswamy(a, b)

    def forward(self, x):
        q = self.posterior(x)
        v = q.rsample()
        rec = self.dec(v)
        kl = (q.log_prob(v) - self.prior.log_prob(v)).sum(1)
        return rec, kl, v


def load():
    X = torch.tensor(load_digits().data / 16.0, dtype=torch.float32)
    X = X[torch.randperm(len(X))]
    return X[:1500], X[1500:]


def elbo(model, x, w=1.0):
    rec, kl, v = model(x)
    nll = F.binary_cross_entropy_with_logits(rec, x, reduction="none").sum(1)
    return (nll + w * kl).mean(), nll.mean(), kl.mean(), v


def main():
    Xtr, Xte = load()
    model = SparseVAE().to(device)
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    step, bs = 0, 100
    for epoch in range(3):
        for xb in Xtr[torch.randperm(len(Xtr))].split(bs):
            w = min(1.0, step / 30)
            loss, nll, kl, v = elbo(model, xb, w)
            opt.zero_grad()
            loss.backward()
            opt.step()
            if step % 3 == 0:
                edge = ((v < 0.05) | (v > 0.95)).float().mean().item()
                print(f"{step:3d} loss {loss.item():8.3f} nll {nll.item():7.3f} kl {kl.item():7.3f} on/off {edge:.2f}")
            step += 1
        with torch.no_grad():
            te = F.binary_cross_entropy_with_logits(model(Xte)[0], Xte, reduction="none").sum(1).mean()
        print(f"== epoch {epoch} test nll {te.item():.3f}")


if __name__ == "__main__":
    main()
