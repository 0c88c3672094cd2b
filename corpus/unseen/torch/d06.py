import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

torch.manual_seed(5)


@torch.no_grad()
def orthogonalize(G, steps=5, eps=1e-7):
    a, b, c = 3.4445, -4.7750, 2.0315
    X = G / (G.norm() + eps)
    tall = X.size(0) > X.size(1)
    if tall:
        X = X.T
    for _ in range(steps):
        A = X @ X.T
        X = a * X + (b * A + c * A @ A) @ X
    return X.T if tall else X


class RowMuon(torch.optim.Optimizer):
    """Muon with a second moment per output row; the size of the update is kept"""

    def __init__(self, params, lr=0.02, momentum=0.95, beta2=0.95, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, momentum=momentum, beta2=beta2, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is None:
                    continue
                st = self.state[p]
                if not st:
                    st["buf"] = torch.zeros_like(p)
                    st["v"] = torch.zeros(p.size(0), 1)
                buf = st["buf"]
                buf.lerp_(p.grad, 1 - g["momentum"])
                u = orthogonalize(p.grad.lerp(buf, g["momentum"]))
                st["v"].lerp_(u.square().mean(1, keepdim=True), 1 - g["beta2"])
                scaled = u / (st["v"].sqrt() + 1e-10)
                scaled = scaled * (u.norm() / scaled.norm())
                p.mul_(1 - g["lr"] * g["weight_decay"])
                p.add_(scaled, alpha=-g["lr"] * max(1, p.size(0) / p.size(1)) ** 0.5)


class Block(nn.Module):
    def __init__(self, d, mult=2):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.up = nn.Linear(d, mult * d, bias=False)
        self.down = nn.Linear(mult * d, d, bias=False)
        nn.init.zeros_(self.down.weight)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, d=48, depth=3):
        super().__init__()
        self.stem = nn.Linear(64, d)
        self.blocks = nn.ModuleList(Block(d) for _ in range(depth))
        self.head = nn.Linear(d, 10)

    def forward(self, x):
        x = self.stem(x)
        for blk in self.blocks:
            x = blk(x)
        return self.head(x)


digits = load_digits()
X = torch.tensor(digits.data / 16.0, dtype=torch.float32)
y = torch.tensor(digits.target)
Xtr, ytr, Xte, yte = X[:1400], y[:1400], X[1400:], y[1400:]

net = Net()
hidden = [p for p in net.blocks.parameters() if p.ndim == 2]
others = [p for n, p in net.named_parameters() if not (n.startswith("blocks") and p.ndim == 2)]
optims = [RowMuon(hidden, lr=0.02, weight_decay=0.01), torch.optim.AdamW(others, lr=3e-3)]
print("muon matrices:", len(hidden), " adamw tensors:", len(others))

for step in range(24):
    i = torch.randint(0, len(Xtr), (96,))
    loss = F.cross_entropy(net(Xtr[i]), ytr[i], label_smoothing=0.05)
    for o in optims:
        o.zero_grad()
    loss.backward()
    for o in optims:
        o.step()
    if step % 4 == 0:
        with torch.no_grad():
            acc = (net(Xte).argmax(1) == yte).float().mean()
        print(f"step {step:2d} loss {loss.item():.4f} test acc {acc.item():.3f}")
