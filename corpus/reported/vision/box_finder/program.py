import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import Dataset, DataLoader

torch.manual_seed(0)
SIZE = 32
ANCHOR = torch.tensor([10.0, 10.0])


class ToyScans(Dataset):
    """One bright box per picture; annotations come as x1, y1, x2, y2 in whole pixels."""

    def __init__(self, n, seed, jitter=0.0):
        g = torch.Generator().manual_seed(seed)
        self.items = []
        for _ in range(n):
            x1, y1 = (int(v) for v in torch.randint(0, 20, (2,), generator=g))
            w, h = (int(v) for v in torch.randint(4, 13, (2,), generator=g))
            img = 0.3 * torch.randn(1, SIZE, SIZE, generator=g)
            img[:, y1:y1 + h, x1:x1 + w] += 2.0
            x2, y2 = x1 + w, y1 + h
            if torch.rand(1, generator=g) < jitter:
                x1, x2 = x2, x1
            self.items.append((img, torch.tensor([x1, y1, x2, y2], dtype=torch.float32)))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def encode(boxes):
    wh = boxes[:, 2:] - boxes[:, :2]
    ctr = boxes[:, :2] + 0.5 * wh
    t_xy = (ctr - SIZE / 2) / ANCHOR
    t_wh = torch.log(wh / ANCHOR)
    return torch.cat([t_xy, t_wh], 1)


def decode(t):
    ctr = t[:, :2] * ANCHOR + SIZE / 2
    wh = t[:, 2:].clamp(max=2.0).exp() * ANCHOR
    return torch.cat([ctr - wh / 2, ctr + wh / 2], 1)


def iou(a, b):
    lt, rb = torch.maximum(a[:, :2], b[:, :2]), torch.minimum(a[:, 2:], b[:, 2:])
    inter = (rb - lt).clamp(min=0).prod(1)
    return inter / ((a[:, 2:] - a[:, :2]).prod(1) + (b[:, 2:] - b[:, :2]).prod(1) - inter)


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        layers, c = [], 1
        for o in (16, 24, 32):
            layers += [nn.Conv2d(c, o, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
            c = o
        self.backbone = nn.Sequential(*layers)
        self.box = nn.Sequential(nn.Flatten(), nn.Linear(32 * 16, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, x):
        return self.box(self.backbone(x))


train_set = ToyScans(800, seed=1, jitter=0.004)
val_set = ToyScans(200, seed=2)
loader = DataLoader(train_set, batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(3))
model = Regressor()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for epoch in range(6):
    for it, (images, boxes) in enumerate(loader):
        loss_box_reg = F.smooth_l1_loss(model(images), encode(boxes))
        optimizer.zero_grad()
        loss_box_reg.backward()
        optimizer.step()
        if it % 25 == 0:
            print(f"Epoch: [{epoch}] [{it:2d}/{len(loader)}] loss_box_reg: {loss_box_reg.item():.4f}")

model.eval()
with torch.no_grad():
    im, bx = (torch.stack(v) for v in zip(*val_set.items))
    print("FINAL", 1 - iou(decode(model(im)), bx).mean().item())
