"""Energies of small argon-like clusters with a continuous-filter network.
Clusters of different size are padded to the largest one in the batch."""
import numpy as np
import torch
import torch.nn as nn

torch.manual_seed(0)
rng = np.random.default_rng(0)


def make_cluster(n):
    grid = np.array([[i, j, k] for i in range(2) for j in range(2) for k in range(2)], float)
    pos = grid[rng.permutation(8)[:n]] * 1.15 + rng.normal(0, 0.05, (n, 3))
    d = np.linalg.norm(pos[:, None] - pos[None], axis=-1)[np.triu_indices(n, 1)]
    sr6 = d ** -6
    return pos - pos.mean(0), float(np.sum(4 * (sr6 ** 2 - sr6)))


def collate(samples):
    n_max = max(len(p) for p, _ in samples)
    pos = torch.zeros(len(samples), n_max, 3)
    atom_mask = torch.zeros(len(samples), n_max)
    energy = torch.zeros(len(samples))
    for b, (p, e) in enumerate(samples):
        pos[b, :len(p)] = torch.tensor(p, dtype=torch.float32)
        atom_mask[b, :len(p)] = 1
        energy[b] = e
    return pos, atom_mask, energy


def neighbours(n):
    """index of all other atoms, shape n x (n-1)"""
    return torch.tensor([[j for j in range(n) if j != i] for i in range(n)])


class Filter(nn.Module):
    def __init__(self, n_rbf=12, width=32):
        super().__init__()
        self.register_buffer("centers", torch.linspace(0.8, 3.0, n_rbf))
        self.net = nn.Sequential(nn.Linear(n_rbf + 1, width), nn.Softplus(), nn.Linear(width, width))

    def forward(self, r):
        rbf = torch.exp(-8.0 * (r[..., None] - self.centers) ** 2)
        return self.net(torch.cat([rbf, 1.0 / r[..., None]], dim=-1))


class ClusterNet(nn.Module):
    def __init__(self, width=32, rounds=2):
        super().__init__()
        self.start = nn.Parameter(torch.randn(width) * 0.1)
        self.filters = nn.ModuleList(Filter(width=width) for _ in range(rounds))
        self.updates = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.Softplus(), nn.Linear(width, width)) for _ in range(rounds))
        self.readout = nn.Sequential(nn.Linear(width, 16), nn.Softplus(), nn.Linear(16, 1))

    def forward(self, pos, atom_mask):
        b, n, _ = pos.shape
        nbh = neighbours(n)
        pair_mask = atom_mask[:, :, None] * atom_mask[:, nbh]
        diff = pos[:, nbh] - pos[:, :, None]
        r = diff.pow(2).sum(-1).sqrt()
        x = self.start.expand(b, n, -1)
        for filt, upd in zip(self.filters, self.updates):
            msg = filt(r) * x[:, nbh] * pair_mask[..., None]
            x = x + upd(msg.sum(2))
        return (self.readout(x).squeeze(-1) * atom_mask).sum(1)


data = sorted((make_cluster(int(rng.choice([5, 6, 7, 8]))) for _ in range(400)), key=lambda s: len(s[0]) + rng.normal(0, 0.5))
loader = [data[i:i + 16] for i in range(0, len(data), 16)]
scale = np.std([e for _, e in data])
net = ClusterNet()
opt = torch.optim.Adam(net.parameters(), lr=2e-3)

step = 0
for epoch in range(2):
    for chunk in loader:
        pos, mask, energy = collate(chunk)
        pred = net(pos, mask)
        loss = ((pred - energy / scale) ** 2 / mask.sum(1)).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 3 == 0:
            print(f"step {step:3d} atoms {pos.shape[1]} loss {loss.item():.5f}")
        step += 1
