import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

torch.manual_seed(41)


class Encoder(nn.Module):
    def __init__(self, d_out=16):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                                  nn.Conv2d(16, 24, 3, padding=1), nn.ReLU(), nn.Flatten())
        self.proj = nn.Sequential(nn.Linear(24 * 16, 48), nn.ReLU(), nn.Linear(48, d_out))

    def forward(self, x):
        h = self.conv(x)
        return h, F.normalize(self.proj(h), dim=1)


def augment(x):
    dx, dy = torch.randint(-1, 2, (2,)).tolist()
    x = torch.roll(x, (dx, dy), dims=(2, 3))
    return (x + 0.1 * torch.randn_like(x)) * (torch.rand_like(x) > 0.1)


def nt_xent(z1, z2, tau=0.2):
    z = torch.cat([z1, z2])
    n = len(z1)
    sim = z @ z.t() / tau
    sim.fill_diagonal_(float("-inf"))
    target = torch.cat([torch.arange(n, 2 * n), torch.arange(n)])
    return F.cross_entropy(sim, target)


def spread(z):
    """distance to the nearest other point, averaged"""
    with torch.no_grad():
        d = torch.cdist(z, z)
        d.fill_diagonal_(float("inf"))
        return d.min(1).values.mean().item()


def per_class_recall(pred, y, n_cls=10):
    rec = torch.full((n_cls,), float("nan"))
    for c in range(n_cls):
        if (y == c).any():
            rec[c] = (pred[y == c] == c).float().mean()
    return rec


def nn_eval(model, bank, yb, query, yq):
    with torch.no_grad():
        hb, hq = F.normalize(model(bank)[0]), F.normalize(model(query)[0])
        return per_class_recall(yb[(hq @ hb.t()).argmax(1)], yq)


d = load_digits()
X = torch.tensor(d.images / 16.0, dtype=torch.float32).unsqueeze(1)
y = torch.tensor(d.target)
order = torch.randperm(len(X))
tr, te = order[:1300], order[1300:]
te = te[y[te] != 9]

net = Encoder()
opt = torch.optim.Adam(net.parameters(), lr=2e-3, betas=(0.8, 0.99))
low, history = float("inf"), []
for step in range(50):
    i = tr[torch.randint(0, len(tr), (64,))]
    (_, z1), (_, z2) = net(augment(X[i])), net(augment(X[i]))
    loss = nt_xent(z1, z2)
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    opt.step()
    history.append(loss.item())
    low = min(low, loss.item())
    if step % 10 == 0:
        rec = nn_eval(net, X[tr], y[tr], X[te], y[te])
        print(f"step {step:2d} loss {loss.item():.4f} lowest {low:.4f} spread {spread(z1):.3f} recall {rec.nanmean().item():.3f}")
print("recall by class:", [round(v, 2) for v in nn_eval(net, X[tr], y[tr], X[te], y[te]).tolist()])
assert sum(history[-5:]) < sum(history[:5])
