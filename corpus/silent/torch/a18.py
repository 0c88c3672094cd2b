# denoising conv autoencoder; the first part of the run is saved and then continued
import io
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

torch.manual_seed(18)
clean = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 16


def build():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 1, 3, padding=1))


def batch(n=64):
    c = clean[torch.randint(0, len(clean), (n,))]
    return c + 0.4 * torch.randn_like(c), c


def run(model, opt, steps, reduction):
    for step in range(1, steps + 1):
        noisy, target = batch()
        loss = F.mse_loss(model(noisy), target, reduction=reduction)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 20 == 0:
            per_pixel = loss.item() if reduction == "mean" else loss.item() / target.numel()
            print(f"  {step:4d} loss per pixel {per_pixel:.5f}")


def save(model, opt):
    f = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, f)
    f.seek(0)
    return f


print("stage 1: summed loss")
net = build()
optim = torch.optim.Adam(net.parameters(), lr=2e-3)
run(net, optim, 20, "sum")
ckpt = save(net, optim)

print("stage 2: mean loss, continued from the checkpoint")
state = torch.load(ckpt)
net = build()
net.load_state_dict(state["model"])
optim = torch.optim.Adam(net.parameters(), lr=2e-3)
optim.load_state_dict(state["opt"])
run(net, optim, 240, "mean")
