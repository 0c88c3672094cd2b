import numpy as np
import torch
import torch.nn as nn

torch.manual_seed(6)
rng = np.random.default_rng(6)


def terrain(p):
    x, y = p[:, 0], p[:, 1]
    return np.sin(3 * x) * np.cos(2 * y) + 0.5 * np.exp(-4 * ((x - 0.3) ** 2 + (y + 0.2) ** 2))


class Survey:
    """scattered height measurements"""

    def __init__(self, n=600, noise=0.03):
        p = rng.uniform(-1, 1, size=(n, 2))
        h = terrain(p) + noise * rng.standard_normal(n)
        self.p = torch.tensor(p, dtype=torch.float32)
        self.h = torch.tensor(h, dtype=torch.float32)

    def batches(self, bs):
        for i in torch.randperm(len(self.p)).split(bs):
            yield self.p[i], self.h[i]


def thin_plate(r2):
    U = 0.5 * r2 * torch.log(r2)
    return torch.where(r2 > 0, U, torch.zeros_like(r2))


class ThinPlateSurface(nn.Module):
    def __init__(self, centres):
        super().__init__()
        self.centres = nn.Parameter(centres.clone(), requires_grad=False)
        self.w = nn.Parameter(torch.zeros(len(centres)))
        self.plane = nn.Linear(2, 1)

    def basis(self, p):
        d = p[:, None, :] - self.centres[None, :, :]
        return thin_plate((d * d).sum(-1))

    def forward(self, p):
        return self.basis(p) @ self.w + self.plane(p).squeeze(1)


def polyharmonic_start(model, survey, ridge=1e-2):
    with torch.no_grad():
        B = torch.cat([model.basis(survey.p), survey.p, torch.ones(len(survey.p), 1)], 1)
        sol = torch.linalg.solve(B.T @ B + ridge * torch.eye(B.size(1)), B.T @ survey.h)
        k = len(model.w)
        model.w.copy_(sol[:k])
        model.plane.weight.copy_(sol[k:k + 2][None])
        model.plane.bias.copy_(sol[k + 2:])


def fit(model, survey, val, epochs, lr, tag, it=0):
    opt = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=lr)
    for ep in range(epochs):
        for p, h in survey.batches(75):
            loss = torch.nn.functional.smooth_l1_loss(model(p), h, beta=0.1)
            opt.zero_grad()
            loss.backward()
            opt.step()
            it += 1
        with torch.no_grad():
            rmse = (model(val.p) - val.h).pow(2).mean().sqrt().item()
        print(f"[{tag}] epoch {ep} after {it} steps: loss {loss.item():.5f} val rmse {rmse:.4f}")
    return it


survey, val = Survey(), Survey(200)
pick = torch.randperm(len(survey.p))[:25]
model = ThinPlateSurface(survey.p[pick])
polyharmonic_start(model, survey)
done = fit(model, survey, val, epochs=3, lr=2e-3, tag="heights")
model.centres.requires_grad_(True)
fit(model, survey, val, epochs=3, lr=5e-4, tag="heights + centres", it=done)
