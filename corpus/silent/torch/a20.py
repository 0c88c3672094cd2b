# transfer: features learned on digits 0-4, a new head for 5-9, backbone and its batch norms kept fixed
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from sklearn.datasets import load_digits

torch.manual_seed(20)
d = load_digits()
img = torch.tensor(d.images, dtype=torch.float32)[:, None] / 16
lab = torch.tensor(d.target)
src, dst = lab < 5, lab >= 5


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1, self.b1 = nn.Conv2d(1, 24, 3, padding=1, bias=False), nn.BatchNorm2d(24)
        self.c2, self.b2 = nn.Conv2d(24, 48, 3, padding=1, stride=2, bias=False), nn.BatchNorm2d(48)

    def forward(self, x):
        x = torch.relu(self.b1(self.c1(x)))
        x = torch.relu(self.b2(self.c2(x)))
        return x.flatten(1)


def fit(model, params, x, y, epochs, lr, tag, frozen=None):
    opt = torch.optim.Adam(params, lr=lr)
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
    for ep in range(epochs):
        model.train()
        if frozen is not None:
            frozen.eval()
        s = 0.0
        for a, b in loader:
            loss = nn.functional.cross_entropy(model(a), b)
            opt.zero_grad()
            loss.backward()
            opt.step()
            s += loss.item()
        print(f"{tag} epoch {ep} loss {s / len(loader):.4f}")


backbone = Backbone()
first = nn.Sequential(backbone, nn.Linear(48 * 16, 5))
fit(first, first.parameters(), img[src], lab[src], 3, 2e-3, "source")

for p in backbone.parameters():
    p.requires_grad_(False)
second = nn.Sequential(backbone, nn.Dropout(0.5), nn.Linear(48 * 16, 5))
x2, y2 = img[dst], lab[dst] - 5
fit(second, second[2].parameters(), x2[:600], y2[:600], 6, 1e-3, "target", frozen=backbone)
second.eval()
with torch.no_grad():
    print("held-out accuracy", (second(x2[600:]).argmax(1) == y2[600:]).float().mean().item())
