"""VQ-VAE (straight-through estimator) on 8x8 digits."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits


class VectorQuantizer(nn.Module):
    def __init__(self, n_codes=32, dim=8, beta=0.25):
        super().__init__()
        self.codebook = nn.Embedding(n_codes, dim)
        self.beta = beta

    def init_from(self, z):
        flat = z.permute(0, 2, 3, 1).reshape(-1, z.shape[1])
        pick = torch.randperm(len(flat))[: self.codebook.num_embeddings]
        self.codebook.weight.data.copy_(flat[pick])

    def forward(self, z):
        zf = z.permute(0, 2, 3, 1)
        d = torch.cdist(zf.reshape(-1, zf.shape[-1]), self.codebook.weight)
        idx = d.argmin(1)
        q = self.codebook(idx).view_as(zf)
        loss = F.mse_loss(q, zf.detach()) + self.beta * F.mse_loss(zf, q.detach())
        q = zf + (q - zf).detach()
        return q.permute(0, 3, 1, 2), loss, idx


class VQVAE(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, dim, 4, stride=2, padding=1))
        self.vq = VectorQuantizer(dim=dim)
        self.dec = nn.Sequential(nn.ConvTranspose2d(dim, 32, 4, stride=2, padding=1), nn.ReLU(), nn.Conv2d(32, 1, 3, padding=1))

    def forward(self, x):
        q, loss, idx = self.vq(self.enc(x))
        return self.dec(q), loss, idx


def main():
    torch.manual_seed(23)
    x = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 16
    x = x[torch.randperm(len(x))]
    train, test = x[:1500], x[1500:]
    model = VQVAE()
    with torch.no_grad():
        model.vq.init_from(model.enc(train[:64]))
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(220):
        xb = train[torch.randint(0, len(train), (64,))]
        recon, vq_loss, idx = model(xb)
        rec_loss = F.mse_loss(recon, xb)
        loss = rec_loss + vq_loss
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        if step % 20 == 0:
            print(f"step {step:3d} recon {rec_loss.item():.4f} vq {vq_loss.item():.4f} codes used {idx.unique().numel()}")
    with torch.no_grad():
        print("final metric: test recon mse %.4f (pixel variance %.4f)" % (F.mse_loss(model(test)[0], test), test.var()))


if __name__ == "__main__":
    main()
