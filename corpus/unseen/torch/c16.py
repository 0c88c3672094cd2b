"""sets of points -> how many clusters were they drawn from.  Max pooling over the set (padding = -inf),
   learning rate found by a range test that is driven until the loss is no longer finite."""
import copy
import math
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

np.random.seed(6)
torch.manual_seed(6)
MAXLEN = 30


def sample_sets(n):
    pts = np.zeros((n, MAXLEN, 2), dtype=np.float32)
    length = np.random.randint(12, MAXLEN + 1, n)
    k = np.random.randint(1, 4, n)
    for i in range(n):
        ang = np.random.uniform(0, 2 * np.pi) + 2 * np.pi * np.arange(k[i]) / k[i]
        centre = np.stack([np.cos(ang), np.sin(ang)], 1) * 2
        who = np.random.randint(0, k[i], length[i])
        pts[i, :length[i]] = centre[who] + 0.35 * np.random.randn(length[i], 2)
    mask = np.arange(MAXLEN)[None] < length[:, None]
    return torch.tensor(pts), torch.tensor(mask), torch.tensor(k - 1)


class SetNet(nn.Module):
    def __init__(self, d=48):
        super().__init__()
        self.phi = nn.Sequential(nn.Linear(2, d), nn.ReLU(), nn.Linear(d, d))
        self.rho = nn.Sequential(nn.Linear(d, d), nn.ReLU(), nn.Linear(d, 3))

    def forward(self, pts, mask):
        h = self.phi(pts).masked_fill(~mask[..., None], float("-inf"))
        return self.rho(h.max(dim=1).values)


def batches(data, bs, forever=False):
    while True:
        for b in torch.randperm(len(data[0])).split(bs):
            yield tuple(t[b] for t in data)
        if not forever:
            return


def step(net, opt, batch):
    pts, mask, y = batch
    loss = F.cross_entropy(net(pts, mask), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    return loss.item()


def range_test(net, data, lr=1e-4, factor=1.9, max_steps=60):
    probe = copy.deepcopy(net)
    opt = torch.optim.SGD(probe.parameters(), lr=lr, momentum=0.9)
    tried = []
    for _, batch in zip(range(max_steps), batches(data, 64, forever=True)):
        loss = step(probe, opt, batch)
        tried.append((opt.param_groups[0]["lr"], loss))
        print("   probe lr %.2e loss %s" % tried[-1])
        if not math.isfinite(loss):
            break
        opt.param_groups[0]["lr"] *= factor
    lrs, losses = zip(*[t for t in tried if math.isfinite(t[1])])
    return lrs[int(np.argmin(losses))] / 10


train, test = sample_sets(800), sample_sets(300)
net = SetNet()
lr = range_test(net, train)
print(f"chosen lr {lr:.2e}, weights untouched:", all(torch.isfinite(p).all().item() for p in net.parameters()))
opt = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
lowest = math.inf
for epoch in range(10):
    losses = [step(net, opt, b) for b in batches(train, 64)]
    with torch.no_grad():
        out = net(test[0], test[1])
    acc = (out.argmax(1) == test[2]).float().mean().item()
    val = F.cross_entropy(out, test[2]).item()
    lowest = min(lowest, val)
    print(f"epoch {epoch} train {np.mean(losses):.4f} val {val:.4f} lowest {lowest:.4f} acc {acc:.3f}")
