"""Self-supervised pre-training on a table (masked feature reconstruction, TabNet-style loss)."""
import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


def land_use_table(n=1000, seed=0):
    rng = np.random.default_rng(seed)
    numeric = rng.normal(size=(n, 5)) @ rng.normal(size=(5, 5))
    wilderness = np.eye(3)[rng.choice(3, n, p=[0.5, 0.3, 0.2])]
    soil = np.eye(4)[rng.choice(4, n, p=[0.5, 0.28, 0.2, 0.02])]
    return np.hstack([numeric, wilderness, soil]).astype(np.float32)


class RandomObfuscator(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x):
        mask = torch.bernoulli(self.p * torch.ones_like(x))
        return (1 - mask) * x, mask


class Autoencoder(nn.Module):
    def __init__(self, d, width=64, bottleneck=8):
        super().__init__()
        self.obf = RandomObfuscator(0.3)
        self.bn = nn.BatchNorm1d(d)
        self.enc = nn.Sequential(nn.Linear(d, width), nn.GELU(), nn.Linear(width, bottleneck))
        self.dec = nn.Sequential(nn.Linear(bottleneck, width), nn.GELU(), nn.Linear(width, d))

    def forward(self, x):
        masked, mask = self.obf(x)
        return self.dec(self.enc(self.bn(masked))), x, mask


def unsupervised_loss(y_pred, x, mask):
    errors = ((y_pred - x) * mask) ** 2
    batch_vars = torch.std(x, dim=0) ** 2
    features_loss = errors @ (1 / batch_vars)
    n_masked = mask.sum(dim=1) + 1e-9
    return (features_loss / n_masked).mean()


def pretrain(x, epochs=5, batch_size=64):
    loader = DataLoader(TensorDataset(x), batch_size=batch_size, shuffle=True, drop_last=True)
    model = Autoencoder(x.shape[1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(epochs):
        seen = []
        for (xb,) in loader:
            loss = unsupervised_loss(*model(xb))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 2.0)
            optimizer.step()
            seen.append(loss.item())
        print(f"epoch {epoch} | unsup loss {np.mean(seen):.4f} | first batches {[round(v, 3) for v in seen[:4]]}")
    return model


if __name__ == "__main__":
    torch.manual_seed(2)
    table = torch.from_numpy(land_use_table())
    encoder = pretrain(table).enc
    with torch.no_grad():
        z = encoder(table)
    print("embedding mean", z.mean().item(), "std", z.std().item())
