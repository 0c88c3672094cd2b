import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

torch.manual_seed(23)


class PatchTransformer(nn.Module):
    """Small ViT: 2x2 patches of the 8x8 digits."""

    def __init__(self, dim=32, depth=2):
        super().__init__()
        self.patch = nn.Conv2d(1, dim, 2, stride=2)
        self.pos = nn.Parameter(torch.randn(1, 16, dim) * 0.02)
        layer = nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth)
        self.bottleneck = nn.Linear(dim, 12)
        self.head = nn.Linear(12, 10)

    @torch.no_grad()
    def embed(self, img):
        """One vector per image (also used for the nearest-neighbour search)."""
        tok = self.patch(img).flatten(2).transpose(1, 2) + self.pos
        return self.bottleneck(self.encoder(tok).mean(dim=1))

    def forward(self, img):
        return self.head(self.embed(img))


def neighbour_accuracy(model, xa, ya, xb, yb):
    dist = torch.cdist(model.embed(xb), model.embed(xa))
    return (ya[dist.argmin(dim=1)] == yb).float().mean().item()


d = load_digits()
xa, xb, ya, yb = train_test_split(d.images, d.target, test_size=0.2, random_state=1)
xa, xb = (torch.tensor(a, dtype=torch.float32)[:, None] / 16 for a in (xa, xb))
ya, yb = torch.tensor(ya), torch.tensor(yb)

model = PatchTransformer()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for epoch in range(8):
    total = 0.0
    batches = torch.randperm(len(xa)).split(48)
    for idx in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(xa[idx]), ya[idx])
        loss.backward()
        optimizer.step()
        total += loss.item()
    with torch.no_grad():
        acc = (model(xb).argmax(1) == yb).float().mean().item()
    print(f"epoch {epoch} loss {total / len(batches):.4f} acc {acc:.3f} nn-acc {neighbour_accuracy(model, xa, ya, xb, yb):.3f}")
