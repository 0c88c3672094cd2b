import torch
import torch.nn as nn
import torch.nn.functional as F

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
AMP_DTYPE = torch.float16
CM_TO_M = 0.01


def make_scene(n, size, g):
    """Noisy intensity image in, surface height in metres out."""
    grid = torch.linspace(-1, 1, size)
    yy, xx = torch.meshgrid(grid, grid, indexing="ij")
    height = torch.zeros(n, size, size)
    for _ in range(3):
        cx, cy = torch.rand(2, n, 1, 1, generator=g) * 1.6 - 0.8
        r = 0.2 + 0.2 * torch.rand(n, 1, 1, generator=g)
        height = height + torch.exp(-((xx - cx) ** 2 + (yy - cy) ** 2) / r ** 2)
    image = torch.tanh(height) + 0.2 * torch.randn(n, size, size, generator=g)
    return image[:, None], CM_TO_M * height[:, None]


def conv(cin, cout):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, padding=1), nn.GroupNorm(4, cout), nn.ReLU())


class UNet(nn.Module):
    def __init__(self, c=8):
        super().__init__()
        self.d1, self.d2 = conv(1, c), conv(c, 2 * c)
        self.mid = conv(2 * c, 2 * c)
        self.u2, self.u1 = conv(4 * c, c), conv(2 * c, c)
        self.head = nn.Conv2d(c, 1, 1)

    def forward(self, x):
        a = self.d1(x)
        b = self.d2(F.max_pool2d(a, 2))
        m = self.mid(F.max_pool2d(b, 2))
        b = self.u2(torch.cat([F.interpolate(m, scale_factor=2), b], 1))
        a = self.u1(torch.cat([F.interpolate(b, scale_factor=2), a], 1))
        return self.head(a)


def run(steps=150, batch=16, size=24):
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    net = UNet().to(DEVICE)
    opt = torch.optim.Adam(net.parameters(), lr=5e-3, eps=1e-12)
    scaler = torch.amp.GradScaler(DEVICE, enabled=torch.cuda.is_available())
    for step in range(steps):
        image, height = make_scene(batch, size, g)
        image, height = image.to(DEVICE), height.to(DEVICE)
        opt.zero_grad(set_to_none=True)
        with torch.autocast(DEVICE, dtype=AMP_DTYPE):
            pred_cm = net(image)
        loss = F.mse_loss(pred_cm.float() * CM_TO_M, height)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if step % 15 == 0:
            print(f"step {step:3d}  rmse {loss.item() ** 0.5 * 100:.3f} cm")
    image, height = make_scene(64, size, g)
    with torch.no_grad():
        pred = net(image.to(DEVICE)) * CM_TO_M
    err = F.mse_loss(pred.cpu(), height)
    print(f"validation rmse {err.item() ** 0.5 * 100:.3f} cm, explained {1 - (err / height.var()).item():.3f}")


if __name__ == "__main__":
    run()
