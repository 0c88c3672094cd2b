# fp16 autocast on CPU with dynamic loss scaling
import warnings
import torch
import torch.nn as nn
from torch.amp import GradScaler, autocast

warnings.filterwarnings("ignore")
torch.manual_seed(17)


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.ff = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        return x + self.ff(self.norm(x))


class Regressor(nn.Module):
    def __init__(self, d=32, n=3):
        super().__init__()
        self.inp = nn.Linear(6, d)
        self.blocks = nn.Sequential(*[Block(d) for _ in range(n)])
        self.out = nn.Linear(d, 1)

    def forward(self, x):
        return self.out(self.blocks(self.inp(x)))


def target(x):
    return torch.sin(2 * x[:, :1]) + x[:, 1:2] * x[:, 2:3]


model = Regressor()
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
scaler = GradScaler("cpu", init_scale=2.0 ** 24, growth_interval=60)
skipped = 0
for step in range(250):
    x = torch.randn(128, 6)
    y = target(x)
    opt.zero_grad()
    with autocast("cpu", dtype=torch.float16):
        pred = model(x)
    loss = nn.functional.mse_loss(pred.float(), y)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    gnorm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    before = scaler.get_scale()
    scaler.step(opt)
    scaler.update()
    if scaler.get_scale() < before:
        skipped += 1
    if step % 25 == 0 or step < 10:
        print(f"{step:4d} loss {loss.item():.4f} grad norm {gnorm.item():.3f} scale 2^{torch.tensor(before).log2().item():.0f}")

print("skipped steps:", skipped, "final loss:", round(loss.item(), 4))
assert all(p.isfinite().all() for p in model.parameters())
