# learn per-vertex curvature of a bumpy UV sphere with a small cotan-Laplacian diffusion network
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(1)
np.random.seed(1)


def uv_sphere(rows=14, cols=20, bumps=0.12, freq=3):
    """vertex grid (rows+1) x cols, two triangles per quad"""
    theta = np.linspace(0, np.pi, rows + 1)
    phi = np.linspace(0, 2 * np.pi, cols, endpoint=False)
    T, P = np.meshgrid(theta, phi, indexing="ij")
    r = 1 + bumps * np.sin(freq * P) * np.sin(T) ** 2
    pos = np.stack([r * np.sin(T) * np.cos(P), r * np.sin(T) * np.sin(P), r * np.cos(T)], -1).reshape(-1, 3)
    faces = []
    for i in range(rows):
        for j in range(cols):
            a, b = i * cols + j, i * cols + (j + 1) % cols
            c, d = a + cols, b + cols
            faces += [[a, c, b], [b, c, d]]
    target = np.sin(freq * P) * np.sin(T) ** 2
    return (torch.tensor(pos, dtype=torch.float32), torch.tensor(faces),
            torch.tensor(target.reshape(-1), dtype=torch.float32))


def cot_laplacian(pos, faces):
    n = pos.shape[0]
    L = torch.zeros(n, n)
    for k in range(3):
        i, j, o = faces[:, k], faces[:, (k + 1) % 3], faces[:, (k + 2) % 3]
        u, w = pos[i] - pos[o], pos[j] - pos[o]
        cot = (u * w).sum(1) / torch.linalg.cross(u, w).norm(dim=1)
        L.index_put_((i, j), 0.5 * cot, accumulate=True)
        L.index_put_((j, i), 0.5 * cot, accumulate=True)
    return torch.diag(L.sum(1)) - L


class DiffusionLayer(nn.Module):
    """implicit heat step with a learned time per channel, then a pointwise MLP"""

    def __init__(self, width, L):
        super().__init__()
        self.register_buffer("L", L)
        self.log_t = nn.Parameter(torch.linspace(-5, -2, width))
        self.mix = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, x):
        out = x
        for _ in range(4):
            out = out - 0.05 * self.log_t.exp() * (self.L @ out)
        return x + self.mix(torch.cat([x, out], dim=-1))


class MeshNet(nn.Module):
    def __init__(self, L, width=24, depth=2):
        super().__init__()
        self.inp = nn.Linear(3, width)
        self.layers = nn.ModuleList(DiffusionLayer(width, L) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, pos):
        h = self.inp(pos)
        for layer in self.layers:
            h = layer(h)
        return self.head(h).squeeze(-1)


pos, faces, target = uv_sphere()
net = MeshNet(cot_laplacian(pos, faces))
opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
known = torch.rand(len(pos)) < 0.5
print(f"{len(pos)} vertices, {len(faces)} faces, {int(known.sum())} labelled")

for epoch in range(60):
    pred = net(pos)
    loss = F.mse_loss(pred[known], target[known])
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
    if epoch % 10 == 0:
        with torch.no_grad():
            err = (net(pos)[~known] - target[~known]).abs().mean()
        print(f"epoch {epoch} train {loss.item():.5f} heldout mae {err.item():.4f}")
