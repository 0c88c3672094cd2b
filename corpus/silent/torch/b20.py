import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.lr_scheduler import MultiStepLR

torch.manual_seed(30)
CLASSES = 4


def stripes(n, size=12):
    """Images with horizontal, vertical, diagonal or checkered stripes under noise."""
    y = torch.randint(0, CLASSES, (n,))
    r, c = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    shift = torch.randint(0, 4, (n, 1, 1))
    bank = torch.stack([r.expand(n, -1, -1) + shift, c + shift, r + c + shift, (r // 2) * 2 + (c // 2) * 2 + shift], 1)
    img = ((bank[torch.arange(n), y] // 2) % 2).float()
    return (img + 0.6 * torch.randn(n, size, size)).unsqueeze(1), y


class StripeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 12, 3, padding=1)
        self.conv2 = nn.Conv2d(12, 24, 3, padding=1)
        self.hidden = nn.Linear(24 * 9, 48)
        self.out = nn.Linear(48, CLASSES)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.hidden(x.flatten(1)))
        return self.out(x)


def main():
    model = StripeNet()
    opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    sched = MultiStepLR(opt, milestones=[80, 140], gamma=10)
    val_x, val_y = stripes(500)
    for it in range(1, 201):
        x, y = stripes(64)
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        sched.step()
        if it % 20 == 0:
            model.eval()
            with torch.no_grad():
                acc = (model(val_x).argmax(1) == val_y).float().mean().item()
            model.train()
            print(f"it {it:3d}  loss {loss.item():.4f}  val acc {acc:.3f}")


main()
