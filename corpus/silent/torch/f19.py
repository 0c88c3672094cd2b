import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

CFG = {"latent": 8, "hidden": 128, "lr": 3e-3, "batch": 128, "steps": 400, "beta": 0.5}


class VAE(nn.Module):
    def __init__(self, latent, hidden):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.mu = nn.Linear(hidden, latent)
        self.logvar = nn.Linear(hidden, latent)
        self.dec = nn.Sequential(
            nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 64)
        )

    def forward(self, x):
        h = self.enc(x)
        mu, logvar = self.mu(h), self.logvar(h).clamp(-8, 8)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        return self.dec(z), mu, logvar


def elbo_terms(logits, x, mu, logvar):
    rec = F.binary_cross_entropy_with_logits(logits, x, reduction="none").sum(1).mean()
    kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1).mean()
    return rec, kl


def make_optimizer(model):
    return torch.optim.RMSprop(model.parameters(), lr=CFG["lr"])


def train_step(model, x):
    optimizer = make_optimizer(model)
    optimizer.zero_grad()
    logits, mu, logvar = model(x)
    rec, kl = elbo_terms(logits, x, mu, logvar)
    loss = rec + CFG["beta"] * kl
    loss.backward()
    optimizer.step()
    return rec.item(), kl.item()


def main():
    torch.manual_seed(0)
    data = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    model = VAE(CFG["latent"], CFG["hidden"])
    for step in range(CFG["steps"]):
        x = data[torch.randint(0, len(data), (CFG["batch"],))]
        rec, kl = train_step(model, x)
        if step % 40 == 0:
            print(f"{step:4d} rec {rec:.3f} kl {kl:.3f}")
    with torch.no_grad():
        logits, mu, logvar = model(data)
        rec, kl = elbo_terms(logits, data, mu, logvar)
    print(f"full data: rec {rec.item():.3f} kl {kl.item():.3f} mu std {mu.std(0).mean().item():.3f}")


if __name__ == "__main__":
    main()
