import numpy as np
import torch
from torch import nn

torch.manual_seed(0)
rng = np.random.default_rng(0)


def load_table(n):
    """Synthetic customer table: age, balance, visits, region (one-hot)."""
    age = rng.normal(45, 14, n).clip(18, 95)
    balance = rng.lognormal(4.0 + 0.02 * age, 2.6)
    visits = rng.poisson(2 + balance / 400)
    region = np.eye(4)[rng.integers(0, 4, n)]
    cont = np.stack([age, balance, visits], 1)
    return cont.astype("float32"), region.astype("float32")


cont, region = load_table(6000)
lo, hi = np.quantile(cont[:5000], 0.05, axis=0), np.quantile(cont[:5000], 0.6, axis=0)
cont = (cont - lo) / (hi - lo)
table = torch.tensor(np.concatenate([cont, region], 1))
train, val = table[:5000], table[5000:]


class TabularVAE(nn.Module):
    def __init__(self, n_features, n_embed=16, n_hidden=128):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(n_features, n_hidden), nn.LeakyReLU(), nn.Linear(n_hidden, n_hidden), nn.LeakyReLU()
        )
        self.mu_head = nn.Linear(n_hidden, n_embed)
        self.logvar_head = nn.Linear(n_hidden, n_embed)
        self.decoder = nn.Sequential(
            nn.Linear(n_embed, n_hidden), nn.LeakyReLU(), nn.Linear(n_hidden, n_hidden), nn.LeakyReLU(),
            nn.Linear(n_hidden, n_features),
        )

    def encode(self, x):
        h = self.encoder(x)
        mu = self.mu_head(h)
        logvar = torch.clamp(self.logvar_head(h), -30.0, 20.0)
        return mu, logvar

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        return mu + std * torch.randn_like(std)

    def forward(self, x):
        mu, logvar = self.encode(x)
        return self.decoder(self.reparameterize(mu, logvar)), mu, logvar


def loss_function(recon, x, mu, logvar, factor=1.0):
    cont_loss = nn.functional.smooth_l1_loss(recon[:, :3], x[:, :3], reduction="none").sum(1)
    cat_loss = nn.functional.cross_entropy(recon[:, 3:], x[:, 3:], reduction="none")
    kld = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1)
    return (factor * (cont_loss + cat_loss) + 0.1 * kld).mean()


model = TabularVAE(train.shape[1])
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=0.0)
n_iter, batch_size = 8, 100
step = 0
for epoch in range(n_iter):
    perm = torch.randperm(len(train))
    for i in range(0, len(train), batch_size):
        x = train[perm[i:i + batch_size]]
        recon, mu, logvar = model(x)
        loss = loss_function(recon, x, mu, logvar)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        step += 1
        if step % 40 == 1:
            print(f"[{epoch}/{n_iter}] step {step} loss {loss.item():.4g}")

with torch.no_grad():
    mu, _ = model.encode(val)
    recon = model.decoder(mu)
    final = ((recon[:, :3] - val[:, :3]).abs() / (1 + val[:, :3].abs())).mean()
print("FINAL", final.item())
