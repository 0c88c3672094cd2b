# wind direction regression: the net predicts a direction and a concentration
import math
import numpy as np
import torch

rng = np.random.default_rng(11)
N = 512
features = rng.normal(size=(N, 6)).astype("float32")
weights = rng.normal(size=(6,)).astype("float32")
true_dir = 0.6 * np.tanh(features @ weights)
observed = true_dir + 0.03 * rng.normal(size=N)

X = torch.from_numpy(features)
theta = torch.from_numpy(observed.astype("float32"))

torch.manual_seed(0)
trunk = torch.nn.Sequential(torch.nn.Linear(6, 48), torch.nn.Tanh(), torch.nn.Linear(48, 48), torch.nn.Tanh())
direction_head = torch.nn.Linear(48, 2)
kappa_head = torch.nn.Linear(48, 1)


def predict(x):
    h = trunk(x)
    cs = direction_head(h)
    mu = torch.atan2(cs[:, 1], cs[:, 0] + 2.0)
    kappa = torch.nn.functional.softplus(kappa_head(h)).squeeze(1) * 5.0
    return mu, kappa


def von_mises_nll(mu, kappa, target):
    log_norm = math.log(2 * math.pi) + torch.log(torch.i0(kappa))
    return log_norm - kappa * torch.cos(target - mu)


params = [*trunk.parameters(), *direction_head.parameters(), *kappa_head.parameters()]
opt = torch.optim.Adam(params, lr=5e-3)
for epoch in range(400):
    mu, kappa = predict(X)
    loss = von_mises_nll(mu, kappa, theta).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if epoch % 20 == 0:
        err = torch.rad2deg((mu - theta).abs().mean())
        print(f"epoch {epoch:3d} nll {loss.item():8.4f} kappa {kappa.mean().item():7.2f} err {err.item():.2f} deg")
