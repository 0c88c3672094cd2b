"""A VQ-VAE on digits: a codebook that follows the encoder by an average, and a straight-through gradient."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits


class Codebook(nn.Module):
    def __init__(self, codes=64, dim=16, decay=0.95):
        super().__init__()
        self.decay = decay
        self.register_buffer("embed", torch.randn(codes, dim))
        self.register_buffer("count", torch.ones(codes))
        self.register_buffer("total", self.embed.clone())

    def forward(self, z):
        flat = z.reshape(-1, z.shape[-1])
        index = torch.cdist(flat, self.embed).argmin(1)
        quantised = self.embed[index].view_as(z)
        if self.training:
            with torch.no_grad():
                hot = F.one_hot(index, len(self.embed)).to(flat.dtype)
                self.count.mul_(self.decay).add_(hot.sum(0), alpha=1 - self.decay)
                self.total.mul_(self.decay).add_(hot.T @ flat, alpha=1 - self.decay)
                n = self.count.sum()
                smooth = (self.count + 1e-5) / (n + len(self.count) * 1e-5) * n
                self.embed.copy_(self.total / smooth[:, None])
                dead = self.count < 0.05
                if dead.any():
                    fresh = flat[torch.randint(0, len(flat), (int(dead.sum()),))]
                    self.embed[dead], self.total[dead], self.count[dead] = fresh, fresh, 1.0
        commitment = F.mse_loss(z, quantised.detach())
        return z + (quantised - z).detach(), commitment, index


class VQVAE(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 4, 2, 1), nn.ReLU(), nn.Conv2d(32, dim, 1))
        self.codebook = Codebook(dim=dim)
        self.decoder = nn.Sequential(
            nn.Conv2d(dim, 32, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(32, 32, 4, 2, 1), nn.ReLU(), nn.Conv2d(32, 1, 3, padding=1))

    def forward(self, x):
        z = self.encoder(x).permute(0, 2, 3, 1)
        q, commitment, index = self.codebook(z)
        return self.decoder(q.permute(0, 3, 1, 2)), commitment, index


def main(steps=300):
    torch.manual_seed(0)
    images = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 16
    train, test = images[:1500], images[1500:]
    model = VQVAE()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(steps):
        x = train[torch.randint(0, len(train), (64,))]
        out, commitment, index = model(x)
        loss = F.mse_loss(out, x) + 0.25 * commitment
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 50 == 0:
            print(f"{step:4d} mse {F.mse_loss(out, x).item():.4f} commitment {commitment.item():.4f} codes {len(index.unique())}")
    model.eval()
    with torch.no_grad():
        print(f"test mse {F.mse_loss(model(test)[0], test).item():.4f} variance {test.var():.4f}")


if __name__ == "__main__":
    main()
