# LoRA adaptation of a small MLP: train the base on upright digits,
# then adapt it to transposed digits with rank-4 updates only.
import math
import torch
from torch import nn
from torch.nn import functional as F
from sklearn.datasets import load_digits

torch.manual_seed(0)

data = load_digits()
imgs = torch.tensor(data.images, dtype=torch.float32) / 16.0
labels = torch.tensor(data.target)
order = torch.randperm(len(imgs))
imgs, labels = imgs[order], labels[order]
tr, te = slice(0, 1400), slice(1400, None)


class LoRALinear(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 4, alpha: float = 8.0):
        super().__init__()
        self.base = base
        for p in self.base.parameters():
            p.requires_grad_(False)
        self.A = nn.Parameter(torch.empty(rank, base.in_features))
        self.B = nn.Parameter(torch.zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))
        self.scale = alpha / rank

    def forward(self, x):
        return self.base(x) + self.scale * F.linear(F.linear(x, self.A), self.B)


def build():
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 10))


def fit(model, X, y, params, lr, steps, tag):
    opt = torch.optim.AdamW(params, lr=lr, weight_decay=0.01)
    for step in range(steps):
        idx = torch.randint(0, len(X), (64,))
        loss = F.cross_entropy(model(X[idx]), y[idx])
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        if step % 25 == 0 or step == steps - 1:
            print(f"[{tag}] step {step:3d} loss {loss.item():.4f}")


def acc(model, X, y):
    with torch.no_grad():
        return (model(X).argmax(-1) == y).float().mean().item()


base = build()
X0 = imgs.flatten(1)
fit(base, X0[tr], labels[tr], base.parameters(), 2e-3, 120, "base")
print("base acc upright   : %.3f" % acc(base, X0[te], labels[te]))

X1 = imgs.transpose(1, 2).flatten(1)
print("base acc transposed: %.3f" % acc(base, X1[te], labels[te]))
for i in (0, 2, 4):
    base[i] = LoRALinear(base[i], rank=4)
trainable = [p for p in base.parameters() if p.requires_grad]
print("trainable params:", sum(p.numel() for p in trainable), "of", sum(p.numel() for p in base.parameters()))
fit(base, X1[tr], labels[tr], trainable, 5e-3, 170, "lora")
print("final metric: acc transposed %.4f" % acc(base, X1[te], labels[te]))
