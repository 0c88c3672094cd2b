"""BYOL on digits: an online network predicts the projections of a slowly moving target."""
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression


def mlp(inputs, hidden, outputs):
    return nn.Sequential(nn.Linear(inputs, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, outputs))


class Online(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(512, 64))
        self.projector = mlp(64, 128, 32)

    def forward(self, x):
        return self.projector(self.encoder(x))


def augment(x):
    dx, dy = torch.randint(-1, 2, (2,)).tolist()
    x = torch.roll(x, (dx, dy), (2, 3))
    x = x * (torch.rand(len(x), 1, 8, 8) > 0.15)
    return x * (0.8 + 0.4 * torch.rand(len(x), 1, 1, 1)) + 0.05 * torch.randn_like(x)


def regression(p, z):
    return 2 - 2 * F.cosine_similarity(p, z.detach()).mean()


def probe(encoder, x, y):
    encoder.eval()
    with torch.no_grad():
        h = encoder(x).numpy()
    encoder.train()
    clf = LogisticRegression(max_iter=500).fit(h[:1200], y[:1200])
    return clf.score(h[1200:], y[1200:])


def main(steps=300, tau=0.98):
    torch.manual_seed(0)
    d = load_digits()
    x, y = torch.tensor(d.images, dtype=torch.float32)[:, None] / 16, d.target
    online, predictor = Online(), mlp(32, 64, 32)
    target = copy.deepcopy(online)
    for p in target.parameters():
        p.requires_grad_(False)
    opt = torch.optim.Adam([*online.parameters(), *predictor.parameters()], lr=2e-3, weight_decay=1e-6)
    for step in range(steps):
        pick = torch.randint(0, 1200, (128,))
        a, b = augment(x[pick]), augment(x[pick])
        with torch.no_grad():
            za, zb = target(a), target(b)
        loss = regression(predictor(online(a)), zb) + regression(predictor(online(b)), za)
        opt.zero_grad()
        loss.backward()
        opt.step()
        with torch.no_grad():
            for t, o in zip(target.parameters(), online.parameters()):
                t.lerp_(o, 1 - tau)
        if step % 50 == 0:
            print(f"{step:4d} loss {loss.item():.4f} spread {F.normalize(za).std(0).mean():.4f}")
    print(f"linear probe {probe(online.encoder, x, y):.3f}")


if __name__ == "__main__":
    main()
