"""Image restoration network trained with 1 - MS-SSIM."""
import torch
import torch.nn as nn
import torch.nn.functional as F


def gaussian_window(size=7, sigma=1.5):
    c = torch.arange(size) - size // 2
    g = torch.exp(-c.float() ** 2 / (2 * sigma ** 2))
    g = g / g.sum()
    return (g[:, None] * g[None, :])[None, None]


class MSSSIM(nn.Module):
    def __init__(self, weights=(0.2, 0.3, 0.5), data_range=1.0):
        super().__init__()
        self.register_buffer("win", gaussian_window())
        self.register_buffer("weights", torch.tensor(weights))
        self.c1, self.c2 = (0.01 * data_range) ** 2, (0.03 * data_range) ** 2

    def components(self, x, y):
        blur = lambda z: F.conv2d(z, self.win)
        mx, my = blur(x), blur(y)
        vx = blur(x * x) - mx ** 2
        vy = blur(y * y) - my ** 2
        cov = blur(x * y) - mx * my
        cs = (2 * cov + self.c2) / (vx + vy + self.c2)
        lum = (2 * mx * my + self.c1) / (mx ** 2 + my ** 2 + self.c1)
        return (lum * cs).mean(dim=(1, 2, 3)), cs.mean(dim=(1, 2, 3))

    def forward(self, x, y):
        levels = len(self.weights)
        mcs = []
        for i in range(levels):
            ssim, cs = self.components(x, y)
            if i < levels - 1:
                mcs.append(cs)
                x, y = F.avg_pool2d(x, 2), F.avg_pool2d(y, 2)
        stack = torch.stack(mcs + [ssim], dim=0)
        return torch.prod(stack ** self.weights.unsqueeze(1), dim=0).mean()


class Restorer(nn.Module):
    def __init__(self, ch=16):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, ch, 3, padding=1), nn.LeakyReLU(0.1),
            nn.Conv2d(ch, ch, 3, padding=1), nn.LeakyReLU(0.1),
            nn.Conv2d(ch, 1, 3, padding=1))

    def forward(self, x):
        return torch.sigmoid(self.net(x))


def blobs(n, size=40):
    yy, xx = torch.meshgrid(torch.linspace(-1, 1, size), torch.linspace(-1, 1, size), indexing="ij")
    img = torch.zeros(n, 1, size, size)
    for _ in range(4):
        cx, cy = torch.rand(2, n, 1, 1) * 2 - 1
        s = 0.1 + 0.2 * torch.rand(n, 1, 1)
        img[:, 0] += torch.exp(-((xx - cx) ** 2 + (yy - cy) ** 2) / s ** 2)
    return img.clamp(0, 1)


def train(steps=40, seed=5):
    torch.manual_seed(seed)
    net, metric = Restorer(), MSSSIM()
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    for step in range(steps):
        clean = blobs(6)
        negative = torch.rand(6, 1, 1, 1) < 0.04          # a few scans come from film negatives
        film = torch.where(negative, 1 - clean, clean)
        noisy = (film + 0.1 * torch.randn_like(clean)).clamp(0, 1)
        score = metric(net(noisy), clean)
        loss = 1 - score
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 4 == 0:
            print(f"step {step:3d}  ms-ssim {score.item():.4f}")


if __name__ == "__main__":
    train()
