import math
import torch
import torch.nn as nn

SEED, B, N, CLASSES = 5, 16, 128, 4
torch.manual_seed(SEED)


def batch(b, g):
    """Toy 'table' clouds: top, legs, floor, ball."""
    labels = torch.randint(0, CLASSES, (b, N), generator=g)
    u = torch.rand(b, N, 3, generator=g)
    top = torch.stack([u[..., 0] * 2 - 1, u[..., 1] * 2 - 1, 1.0 + 0.1 * u[..., 2]], -1)
    corner = torch.randint(0, 4, (b, N), generator=g)
    cx = torch.where(corner % 2 == 0, -0.9, 0.9)
    cy = torch.where(corner < 2, -0.9, 0.9)
    legs = torch.stack([cx + 0.1 * u[..., 0], cy + 0.1 * u[..., 1], u[..., 2]], -1)
    floor = torch.stack([u[..., 0] * 4 - 2, u[..., 1] * 4 - 2, 0.05 * u[..., 2]], -1)
    th, z = u[..., 0] * 2 * math.pi, u[..., 1] * 2 - 1
    rr = torch.sqrt(1 - z ** 2)
    ball = 0.3 * torch.stack([rr * torch.cos(th), rr * torch.sin(th), z], -1) + torch.tensor([0.0, 0.0, 1.4])
    pts = torch.stack([top, legs, floor, ball], 2)
    pts = pts.gather(2, labels[..., None, None].expand(b, N, 1, 3)).squeeze(2)
    pts = pts + 0.03 * torch.randn(b, N, 3, generator=g)
    return pts.transpose(1, 2).contiguous(), labels


class PointSeg(nn.Module):
    def __init__(self, k):
        super().__init__()
        self.local = nn.Sequential(nn.Conv1d(3, 32, 1), nn.BatchNorm1d(32), nn.ReLU(), nn.Conv1d(32, 64, 1), nn.ReLU())
        self.head = nn.Sequential(nn.Conv1d(128, 64, 1), nn.BatchNorm1d(64), nn.ReLU(), nn.Conv1d(64, k, 1))

    def forward(self, x):
        f = self.local(x)
        glob = f.max(dim=2, keepdim=True).values.expand(-1, -1, x.size(2))
        return self.head(torch.cat([f, glob], 1))


def main():
    g = torch.Generator().manual_seed(SEED)
    net = PointSeg(CLASSES)
    optim = torch.optim.AdamW(net.parameters(), lr=2e-3)
    criterion = nn.CrossEntropyLoss()
    for step in range(300):
        pts, labels = batch(B, g)
        scores = net(pts)
        flat = scores.permute(0, 2, 1).reshape(-1, CLASSES)
        loss = criterion(flat, labels.view(-1))
        optim.zero_grad(set_to_none=True)
        loss.backward()
        optim.step()
        if step % 60 == 0:
            print(f"[{step:03d}] loss={loss.item():.4f}")
    net.eval()
    with torch.no_grad():
        pts, labels = batch(64, torch.Generator().manual_seed(1234))
        pred = net(pts).argmax(1)
        print("FINAL", (pred != labels).float().mean().item())


main()
