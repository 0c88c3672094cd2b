"""Small residual MLP trained with a Muon-style optimizer written from the paper."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits


def newton_schulz(G, steps=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    X = G / G.norm()
    transposed = X.size(0) > X.size(1)
    if transposed:
        X = X.T
    for _ in range(steps):
        A = X @ X.T
        X = a * X + (b * A + c * A @ A) @ X
    return X.T if transposed else X


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                st = self.state[p]
                if "m" not in st:
                    st["m"] = torch.zeros_like(p)
                m = st["m"].mul_(group["momentum"]).add_(p.grad)
                update = newton_schulz(p.grad.add(m, alpha=group["momentum"]))
                scale = max(1, p.size(0) / p.size(1)) ** 0.5
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * scale)


class ResBlock(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.fc = nn.Linear(d, 2 * d)
        self.proj = nn.Linear(2 * d, d)
        nn.init.zeros_(self.proj.weight)      # identity at the start
        nn.init.zeros_(self.proj.bias)

    def forward(self, x):
        return x + self.proj(F.gelu(self.fc(self.norm(x))))


class Classifier(nn.Module):
    def __init__(self, d=48, depth=2):
        super().__init__()
        self.stem = nn.Linear(64, d)
        self.blocks = nn.Sequential(*[ResBlock(d) for _ in range(depth)])
        self.head = nn.Linear(d, 10)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)))


def main():
    torch.manual_seed(0)
    ds = load_digits()
    x = torch.tensor(ds.data, dtype=torch.float32) / 16
    y = torch.tensor(ds.target)
    net = Classifier()
    hidden = [p for b in net.blocks for n, p in b.named_parameters() if p.ndim == 2]
    ids = {id(p) for p in hidden}
    rest = [p for p in net.parameters() if id(p) not in ids]
    opts = [Muon(hidden, lr=0.02), torch.optim.AdamW(rest, lr=2e-3)]
    for it in range(40):
        idx = torch.randint(0, 1500, (128,))
        loss = F.cross_entropy(net(x[idx]), y[idx])
        for o in opts:
            o.zero_grad()
        loss.backward()
        for o in opts:
            o.step()
        if it % 5 == 0:
            with torch.no_grad():
                acc = (net(x[1500:]).argmax(1) == y[1500:]).float().mean().item()
            print(f"it {it:3d} loss {loss.item():.4f} test acc {acc:.3f}")


if __name__ == "__main__":
    main()
