import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(123)


class Birdseye(nn.Module):
    """Occupancy, centre offset and size from a small grid image, with one learned weight per task."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.GELU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.GELU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 16, 64), nn.GELU())
        self.cls = nn.Linear(64, 2)
        self.centre = nn.Linear(64, 2)
        self.size = nn.Linear(64, 1)
        self.cls_weight = nn.Parameter(torch.tensor(0.0))
        self.centre_weight = nn.Parameter(torch.tensor(0.0))
        self.size_weight = nn.Parameter(torch.tensor(0.0))

    def forward(self, x):
        h = self.encoder(x)
        return self.cls(h), self.centre(h), self.size(h)


def make(n, gen):
    kind = torch.randint(0, 2, (n,), generator=gen)
    c = 4 + 8 * torch.rand(n, 2, generator=gen)
    r = 1.5 + 2.0 * torch.rand(n, 1, generator=gen)
    yy, xx = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    dy, dx = yy[None] - c[:, 0, None, None], xx[None] - c[:, 1, None, None]
    disc = torch.sigmoid(3 * (r[:, :, None] - (dx ** 2 + dy ** 2).sqrt()))
    ring = torch.sigmoid(3 * (0.8 - ((dx ** 2 + dy ** 2).sqrt() - r[:, :, None] + 0.6).abs()))
    img = torch.where(kind[:, None, None] == 0, disc, ring) + 0.05 * torch.randn(n, 16, 16, generator=gen)
    return img[:, None], kind, (c - 8) / 4, (r - 2.5)


def losses(model, batch):
    x, kind, centre, size = batch
    a, b, c = model(x)
    return F.cross_entropy(a, kind), F.l1_loss(b, centre), F.l1_loss(c, size)


gen = torch.Generator().manual_seed(5)
model = Birdseye()
optimizer = torch.optim.AdamW([
    {"params": [p for n, p in model.named_parameters() if not n.endswith("_weight")], "lr": 3e-3},
    {"params": [model.cls_weight, model.centre_weight, model.size_weight], "lr": 3e-2, "weight_decay": 0.0}])
sched = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[4e-3, 3e-2], total_steps=350)
for step in range(350):
    ce, ctr, siz = losses(model, make(64, gen))
    total = (torch.exp(-model.cls_weight) * ce + 0.5 * model.cls_weight
             + torch.exp(-model.centre_weight) * ctr + 0.5 * model.centre_weight
             + torch.exp(-model.size_weight) * siz + 0.5 * model.size_weight)
    optimizer.zero_grad()
    total.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    sched.step()
    if step % 50 == 0:
        print(f"{step:4d} total {total.item():+.3f} ce {ce.item():.3f} centre {ctr.item():.3f} size {siz.item():.3f} "
              f"w {model.cls_weight.item():+.2f} {model.centre_weight.item():+.2f} {model.size_weight.item():+.2f}")

model.eval()
with torch.no_grad():
    val = losses(model, make(1000, torch.Generator().manual_seed(77)))
print("val ce / centre / size", [round(v.item(), 4) for v in val])
print("FINAL", sum(v.item() for v in val))
