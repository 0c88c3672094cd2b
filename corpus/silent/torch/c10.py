"""Deep-sets regression: predict a nonlinear statistic of a set of points of varying size."""
import numpy as np
import torch
import torch.nn as nn

rng = np.random.default_rng(9)
torch.manual_seed(9)


def make_sets(n):
    sets, targets = [], []
    for _ in range(n):
        k = int(rng.integers(4, 10))
        pts = rng.normal(size=(k, 3)).astype(np.float32)
        sets.append(pts)
        targets.append(np.mean(np.sin(2 * pts[:, 0]) * pts[:, 1] + np.abs(pts[:, 2]) * pts[:, 0]))
    t = np.array(targets, dtype=np.float32)
    return sets, t


class DeepSet(nn.Module):
    def __init__(self, d_in=3, d=32):
        super().__init__()
        self.phi = nn.Sequential(nn.Linear(d_in, 64), nn.ReLU(), nn.Linear(64, d), nn.ReLU())
        self.rho = nn.Sequential(nn.Linear(d, 64), nn.ReLU(), nn.Linear(64, 1))

    def pool(self, sets):
        rows = []
        for s in sets:
            h = self.phi(torch.from_numpy(s))
            rows.append(h.detach().numpy().mean(axis=0))
        return torch.from_numpy(np.stack(rows))

    def forward(self, sets):
        return self.rho(self.pool(sets)).squeeze(-1)


train_s, train_t = make_sets(1500)
test_s, test_t = make_sets(400)
mu, sd = train_t.mean(), train_t.std()
train_t, test_t = (train_t - mu) / sd, torch.from_numpy((test_t - mu) / sd)

net = DeepSet()
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
mse = nn.MSELoss()


def test_mse():
    with torch.no_grad():
        return mse(net(test_s), test_t).item()


for step in range(300):
    ids = rng.integers(0, len(train_s), 64)
    pred = net([train_s[i] for i in ids])
    loss = mse(pred, torch.from_numpy(train_t[ids]))
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 30 == 0:
        print(step, "train", round(loss.item(), 4), "test", round(test_mse(), 4))
print("final metric: test mse %.4f" % test_mse())
