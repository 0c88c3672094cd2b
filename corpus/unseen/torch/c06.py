import io
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

# toy segmentation: find the bright discs in noisy 24x24 pictures
np.random.seed(21)
torch.manual_seed(21)
NCLS = 3


def draw(n, size=24):
    yy, xx = np.mgrid[:size, :size]
    imgs, masks = [], []
    for _ in range(n):
        m = np.zeros((size, size), dtype=np.int64)
        for cls in (1, 2):
            cy, cx = np.random.uniform(4, size - 4, 2)
            rad = np.random.uniform(2.5, 5)
            m[(yy - cy) ** 2 + (xx - cx) ** 2 < rad ** 2] = cls
        img = np.choose(m, [0.0, 0.9, -0.8]) + 0.35 * np.random.randn(size, size)
        imgs.append(img.astype(np.float32)[None])
        masks.append(m)
    return torch.tensor(np.stack(imgs)), torch.tensor(np.stack(masks))


class MiniSeg(nn.Module):
    def __init__(self, c=12):
        super().__init__()
        self.enc1 = nn.Sequential(nn.Conv2d(1, c, 3, padding=1), nn.BatchNorm2d(c), nn.ReLU())
        self.enc2 = nn.Sequential(nn.Conv2d(c, 2 * c, 3, stride=2, padding=1), nn.BatchNorm2d(2 * c), nn.ReLU())
        self.dec = nn.Conv2d(3 * c, NCLS, 1)

    def forward(self, x):
        a = self.enc1(x)
        b = F.interpolate(self.enc2(a), scale_factor=2, mode="bilinear", align_corners=False)
        return self.dec(torch.cat([a, b], 1))


class PolyPolicy:
    """lr = base * (1 - iter / max_iter) ** power, head gets 10x"""

    def __init__(self, base, max_iter, power=0.9):
        self.base, self.max_iter, self.power = base, max_iter, power

    def apply(self, optimizer, it):
        lr = float(self.base * np.power(1 - it / self.max_iter, self.power))
        optimizer.param_groups[0]["lr"] = lr
        optimizer.param_groups[1]["lr"] = 10 * lr

    def state_dict(self):
        return {"base": self.base, "max_iter": self.max_iter, "power": self.power}

    def load_state_dict(self, d):
        self.__dict__.update(d)


def build(max_iter):
    net = MiniSeg()
    back = list(net.enc1.parameters()) + list(net.enc2.parameters())
    opt = torch.optim.SGD([{"params": back}, {"params": net.dec.parameters()}], lr=0.02, momentum=0.9)
    return net, opt, PolyPolicy(0.02, max_iter)


def miou(net, x, m):
    net.eval()
    with torch.no_grad():
        p = net(x).argmax(1)
    net.train()
    return float(np.mean([((p == c) & (m == c)).sum().item() / max(1, ((p == c) | (m == c)).sum().item()) for c in range(NCLS)]))


def run(net, opt, policy, start, stop, tag):
    for it in range(start, stop):
        policy.apply(opt, it)
        idx = torch.randint(0, len(x_tr), (10,))
        loss = F.cross_entropy(net(x_tr[idx]), m_tr[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if it % 4 == 3:
            print(f"{tag} it {it + 1:3d} loss {loss.item():.4f} mIoU {miou(net, x_va, m_va):.3f}")


x_tr, m_tr = draw(120)
x_va, m_va = draw(30)

net, opt, policy = build(max_iter=24)
run(net, opt, policy, 0, 24, "stage1")
buf = io.BytesIO()
torch.save({"it": 24, "net": net.state_dict(), "opt": opt.state_dict(), "policy": policy.state_dict()}, buf)

# validation is still improving, continue for another 24
buf.seek(0)
ck = torch.load(buf)
net, opt, policy = build(max_iter=48)
net.load_state_dict(ck["net"])
opt.load_state_dict(ck["opt"])
policy.load_state_dict(ck["policy"])
run(net, opt, policy, ck["it"], 48, "stage2")
