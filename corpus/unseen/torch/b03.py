import math
import torch
from torch import nn

torch.manual_seed(11)


class ToyDetector(nn.Module):
    """Regresses one (cx, cy, w, h) per image, grid of 1."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(),
            nn.Flatten(),
        )
        self.xy = nn.Linear(16 * 8 * 8, 2)
        self.wh = nn.Linear(16 * 8 * 8, 2)

    def forward(self, img):
        f = self.backbone(img)
        return torch.cat([self.xy(f).sigmoid(), self.wh(f).relu()], dim=1)


def make_batch(n, size=32):
    imgs = torch.rand(n, 1, size, size) * 0.1
    boxes = torch.empty(n, 4)
    for i in range(n):
        w, h = torch.randint(6, 16, (2,)).tolist()
        x = int(torch.randint(0, size - w, (1,)))
        y = int(torch.randint(0, size - h, (1,)))
        imgs[i, 0, y:y + h, x:x + w] += 1.0
        boxes[i] = torch.tensor([x + w / 2, y + h / 2, w, h]) / size
    return imgs, boxes


def ciou_loss(pred, target):
    p1, p2 = pred[:, :2] - pred[:, 2:] / 2, pred[:, :2] + pred[:, 2:] / 2
    t1, t2 = target[:, :2] - target[:, 2:] / 2, target[:, :2] + target[:, 2:] / 2

    inter = (torch.min(p2, t2) - torch.max(p1, t1)).clamp(min=0).prod(dim=1)
    union = pred[:, 2:].prod(dim=1) + target[:, 2:].prod(dim=1) - inter
    iou = inter / union

    c_wh = torch.max(p2, t2) - torch.min(p1, t1)
    c2 = (c_wh ** 2).sum(dim=1)
    rho2 = ((pred[:, :2] - target[:, :2]) ** 2).sum(dim=1)

    ar_t = torch.atan(target[:, 2] / target[:, 3])
    ar_p = torch.atan(pred[:, 2] / pred[:, 3])
    v = (4 / math.pi ** 2) * (ar_t - ar_p) ** 2
    with torch.no_grad():
        alpha = v / (1 - iou + v)
    return (1 - iou + rho2 / c2 + alpha * v).mean()


det = ToyDetector()
optimizer = torch.optim.AdamW(det.parameters(), lr=2e-3)

for it in range(60):
    imgs, boxes = make_batch(32)
    loss = ciou_loss(det(imgs), boxes)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if it < 10 or it % 10 == 0:
        print(f"iter {it:3d}  ciou loss {loss.item():.4f}")
