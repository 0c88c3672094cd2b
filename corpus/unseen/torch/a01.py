"""Variational auto-encoder on the sklearn digits."""
import argparse

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset


class VAE(nn.Module):
    def __init__(self, n_in=64, hidden=128, latent=8):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(n_in, hidden), nn.ReLU(),
                                 nn.Linear(hidden, hidden), nn.ReLU())
        self.fc_mu = nn.Linear(hidden, latent)
        self.fc_logvar = nn.Linear(hidden, latent)
        self.dec = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(),
                                 nn.Linear(hidden, n_in))

    def encode(self, x):
        h = self.enc(x)
        return self.fc_mu(h), self.fc_logvar(h)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        return mu + torch.randn_like(std) * std

    def forward(self, x):
        mu, logvar = self.encode(x)
        z = self.reparameterize(mu, logvar)
        return self.dec(z), mu, logvar


def elbo_loss(recon, x, mu, logvar, beta):
    rec = F.mse_loss(recon, x, reduction="sum") / x.size(0)
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp()) / x.size(0)
    return rec + beta * kld, rec, kld


def load(args):
    images = load_digits().images.astype(np.float32)
    images = np.round(images / 16.0 * 1023.0)  # 10-bit detector counts
    x = torch.from_numpy(images.reshape(len(images), -1))
    n_val = len(x) // 10
    perm = torch.randperm(len(x))
    return x[perm[n_val:]], x[perm[:n_val]]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--beta", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    x_train, x_val = load(args)
    loader = DataLoader(TensorDataset(x_train), batch_size=args.batch_size, shuffle=True)
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        model.train()
        total = 0.0
        for (xb,) in loader:
            optimizer.zero_grad()
            recon, mu, logvar = model(xb)
            loss, rec, kld = elbo_loss(recon, xb, mu, logvar, args.beta)
            loss.backward()
            optimizer.step()
            total += loss.item()
        model.eval()
        with torch.no_grad():
            recon, mu, logvar = model(x_val)
            val, _, _ = elbo_loss(recon, x_val, mu, logvar, args.beta)
        print(f"epoch {epoch}: train {total / len(loader):.3f}  val {val.item():.3f}")


if __name__ == "__main__":
    main()
