"""Denoising autoencoder on digits."""
import torch
from sklearn.datasets import load_digits

CFG = dict(
    latent=16,
    hidden=96,
    noise=0.15,
    batch=96,
    steps=280,
    optim=dict(lr=2e-3, betas=(0.9, 0.999), eps=0.1),
)


def load():
    x = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    g = torch.Generator().manual_seed(0)
    x = x[torch.randperm(len(x), generator=g)]
    return x[:1500], x[1500:]


def make_model(cfg):
    h, z = cfg["hidden"], cfg["latent"]
    enc = torch.nn.Sequential(torch.nn.Linear(64, h), torch.nn.ELU(), torch.nn.Linear(h, z))
    dec = torch.nn.Sequential(torch.nn.Linear(z, h), torch.nn.ELU(), torch.nn.Linear(h, 64), torch.nn.Sigmoid())
    return torch.nn.ModuleDict({"enc": enc, "dec": dec})


def reconstruct(m, x):
    return m["dec"](m["enc"](x))


def train(cfg):
    torch.manual_seed(17)
    tr, te = load()
    m = make_model(cfg)
    opt = torch.optim.Adam(m.parameters(), **cfg["optim"])
    for t in range(cfg["steps"]):
        clean = tr[torch.randint(len(tr), (cfg["batch"],))]
        noisy = clean + cfg["noise"] * torch.randn_like(clean)
        loss = torch.nn.functional.mse_loss(reconstruct(m, noisy), clean)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if t % 40 == 0:
            print("step", t, "mse", f"{loss.item():.5f}")
    with torch.no_grad():
        final = torch.nn.functional.mse_loss(reconstruct(m, te), te).item()
    return final


print("final metric: test mse %.5f" % train(CFG))
