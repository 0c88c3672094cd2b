"""Deep residual transformer with zero-initialised gates and linear warm-up."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(17)
V, L, D, DEPTH = 10, 10, 48, 6


class GatedBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(D, 4, batch_first=True)
        self.ff = nn.Sequential(nn.Linear(D, 2 * D), nn.ReLU(), nn.Linear(2 * D, D))
        self.gate = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        a, _ = self.attn(x, x, x, need_weights=False)
        x = x + self.gate * a
        return x + self.gate * self.ff(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(V, D)
        self.pos = nn.Parameter(torch.randn(L, D))
        self.layers = nn.ModuleList(GatedBlock() for _ in range(DEPTH))
        self.head = nn.Linear(D, V)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x):
        h = self.tok(x) + self.pos
        for layer in self.layers:
            h = layer(h)
        return self.head(h)


def data(n):
    """Each output is the token's left neighbour (cyclic)."""
    x = torch.randint(0, V, (n, L))
    return x, x.roll(1, dims=1)


model = Model()
opt = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, s / 40))
for step in range(200):
    x, y = data(64)
    logits = model(x)
    loss = F.cross_entropy(logits.transpose(1, 2), y, label_smoothing=0.1)
    opt.zero_grad()
    loss.backward()
    opt.step()
    sched.step()
    if step % 20 == 0 or step == 199:
        acc = (logits.argmax(-1) == y).float().mean().item()
        print(f"step {step:3d} lr {sched.get_last_lr()[0]:.5f} loss {loss.item():.4f} acc {acc:.3f}")
