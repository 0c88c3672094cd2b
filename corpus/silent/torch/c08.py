"""BYOL-style self-supervised features on digits, judged by a linear probe."""
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

torch.manual_seed(7)


def augment(x):
    dx, dy = torch.randint(-1, 2, (2,)).tolist()
    x = torch.roll(x, (dx, dy), dims=(2, 3))
    x = x * (0.8 + 0.4 * torch.rand(len(x), 1, 1, 1))
    keep = (torch.rand_like(x) > 0.15).float()
    return x * keep + 0.1 * torch.randn_like(x)


def encoder():
    return nn.Sequential(
        nn.Conv2d(1, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(),
        nn.Conv2d(24, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Flatten(),
    )


class BYOL(nn.Module):
    def __init__(self, tau=0.97):
        super().__init__()
        self.tau = tau
        self.online = encoder()
        self.proj = nn.Sequential(nn.Linear(512, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 32))
        self.pred = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32))
        self.t_online = copy.deepcopy(self.online)
        self.t_proj = copy.deepcopy(self.proj)
        for p in list(self.t_online.parameters()) + list(self.t_proj.parameters()):
            p.requires_grad = False

    @torch.no_grad()
    def update_target(self):
        for s, t in ((self.online, self.t_online), (self.proj, self.t_proj)):
            for ps, pt in zip(s.parameters(), t.parameters()):
                pt.lerp_(ps, 1 - self.tau)

    def loss(self, v1, v2):
        def one(a, b):
            p = self.pred(self.proj(self.online(a)))
            with torch.no_grad():
                z = self.t_proj(self.t_online(b))
            return 2 - 2 * F.cosine_similarity(p, z, dim=-1).mean()
        return 0.5 * (one(v1, v2) + one(v2, v1))


digits = load_digits()
X = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8.0 - 1.0
y = digits.target
g = torch.randperm(len(X))
X, y = X[g], y[g.numpy()]
Xtr, Xte, ytr, yte = X[:1400], X[1400:], y[:1400], y[1400:]


@torch.no_grad()
def probe(enc):
    enc.eval()
    a, b = enc(Xtr).numpy(), enc(Xte).numpy()
    enc.train()
    few = slice(0, 100)
    return LogisticRegression(max_iter=300).fit(a[few], ytr[few]).score(b, yte)


model = BYOL()
opt = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=2e-3)
for step in range(150):
    xb = Xtr[torch.randint(0, len(Xtr), (128,))]
    loss = model.loss(augment(xb), augment(xb))
    opt.zero_grad()
    loss.backward()
    opt.step()
    model.update_target()
    if step % 15 == 0:
        print(f"step {step} byol loss {loss.item():.4f}")
print("final metric: byol loss %.4f, probe acc %.4f" % (loss.item(), probe(model.online)))
