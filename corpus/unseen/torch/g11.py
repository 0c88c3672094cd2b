"""Gated linear attention in its parallel (quadratic) form, trained with a length curriculum."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class DecayAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.hd = heads, dim // heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.gate = nn.Linear(dim, heads)
        nn.init.constant_(self.gate.bias, -1.0)
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, self.hd).permute(2, 0, 3, 1, 4)
        log_decay = -F.softplus(self.gate(x)).transpose(1, 2)          # (b, heads, t), always <= 0
        total = log_decay.cumsum(-1)
        between = total.unsqueeze(-1) - total.unsqueeze(-2)            # decay from step j up to step i
        causal = torch.ones(t, t, dtype=torch.bool).tril()
        decay = torch.where(causal, between.exp(), torch.zeros(()))
        scores = (q @ k.transpose(-1, -2)) * self.hd ** -0.5 * decay
        y = (scores @ v).transpose(1, 2).reshape(b, t, d)
        return self.out(y)


class Smoother(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.inp = nn.Linear(2, dim)
        self.attn = DecayAttention(dim, heads=2)
        self.norm = nn.LayerNorm(dim)
        self.ff = nn.Sequential(nn.Linear(dim, 64), nn.GELU(), nn.Linear(64, 1))

    def forward(self, x):
        h = self.inp(x)
        h = self.norm(h + self.attn(h))
        return self.ff(h).squeeze(-1)


def leaky_counter(batch, t):
    """Target: leaky sum of channel 0 where channel 1 is on."""
    x = torch.randn(batch, t, 2)
    x[..., 1] = (x[..., 1] > 0).float()
    state, ys = torch.zeros(batch), []
    for i in range(t):
        state = 0.8 * state + x[:, i, 0] * x[:, i, 1]
        ys.append(state)
    return x, torch.stack(ys, 1)


torch.manual_seed(6)
net = Smoother()
opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
for length, n_steps in [(32, 60), (96, 40), (160, 30), (448, 10)]:
    for i in range(n_steps):
        x, y = leaky_counter(8, length)
        loss = F.mse_loss(net(x), y)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
    print(f"length {length:4d}: loss {loss.item():.4f}")
