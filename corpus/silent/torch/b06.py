"""Denoising autoencoder on digits, trained in two stages with a checkpoint between them."""
import io

import torch
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(4)
X = torch.tensor(load_digits().data, dtype=torch.float32) / 16.0


class AutoEncoder(nn.Module):
    def __init__(self, code=16):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, code))
        self.dec = nn.Sequential(nn.Linear(code, 96), nn.GELU(), nn.Linear(96, 64))

    def forward(self, x):
        return self.dec(self.enc(x))


def batches(n_steps, size=128):
    for _ in range(n_steps):
        clean = X[torch.randint(0, len(X), (size,))]
        yield clean + 0.1 * torch.randn_like(clean), clean


def stage(model, opt, criterion, n_steps, label):
    for i, (noisy, clean) in enumerate(batches(n_steps), 1):
        opt.zero_grad()
        loss = criterion(model(noisy), clean)
        loss.backward()
        opt.step()
        if i % 20 == 0:
            with torch.no_grad():
                mse = ((model(X) - X) ** 2).mean().item()
            print(f"{label} step {i:3d}  mse {mse:.5f}")


def save(model, opt):
    buf = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, buf)
    buf.seek(0)
    return buf


def main():
    model = AutoEncoder()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    stage(model, opt, nn.MSELoss(reduction="sum"), 20, "warm")
    ckpt = torch.load(save(model, opt))

    model = AutoEncoder()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    model.load_state_dict(ckpt["model"])
    opt.load_state_dict(ckpt["opt"])
    stage(model, opt, nn.MSELoss(), 200, "main")


if __name__ == "__main__":
    main()
