"""Tiny causal language model; keeps the best weights and stops early."""
import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(123)

TEXT = ("the quick brown fox jumps over the lazy dog. "
        "pack my box with five dozen liquor jugs. "
        "how vexingly quick daft zebras jump. ") * 12
vocab = sorted(set(TEXT))
stoi = {c: i for i, c in enumerate(vocab)}
ids = torch.tensor([stoi[c] for c in TEXT])
split = int(0.85 * len(ids))
CTX = 24


class CausalLM(nn.Module):
    def __init__(self, n_vocab, d=48, heads=4):
        super().__init__()
        self.tok = nn.Embedding(n_vocab, d)
        self.pos = nn.Parameter(0.02 * torch.randn(CTX, d))
        self.q, self.k, self.v = (nn.Linear(d, d, bias=False) for _ in range(3))
        self.o = nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, n_vocab)
        self.heads = heads
        mask = torch.full((CTX, CTX), float("-inf")).triu(1)
        self.register_buffer("mask", mask)

    def forward(self, x):
        b, t = x.shape
        h = self.tok(x) + self.pos[:t]
        y = self.norm(h)
        q, k, v = (f(y).view(b, t, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        att = q @ k.transpose(-1, -2) / math.sqrt(q.size(-1)) + self.mask[:t, :t]
        y = (att.softmax(-1) @ v).transpose(1, 2).reshape(b, t, -1)
        h = h + self.o(y)
        return self.head(h + self.mlp(h))


def batch(part, n=32):
    src = ids[:split] if part == "train" else ids[split:]
    start = torch.randint(0, len(src) - CTX - 1, (n,))
    x = torch.stack([src[s:s + CTX] for s in start])
    y = torch.stack([src[s + 1:s + CTX + 1] for s in start])
    return x, y


model = CausalLM(len(vocab))
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
best_val, best_state, best_step, patience = math.inf, None, -1, 4
first = None
for step in range(300):
    x, y = batch("train")
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    opt.zero_grad(set_to_none=True)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=math.inf)
    opt.step()
    first = loss.item() if first is None else first
    if step % 15 == 0:
        model.eval()
        with torch.no_grad():
            x, y = batch("val", 64)
            val = F.cross_entropy(model(x).flatten(0, 1), y.flatten()).item()
        model.train()
        print(f"{step:4d} train {loss.item():.3f} val {val:.3f} (best {best_val:.3f}) |g| {norm:.2f}")
        if val < best_val - 1e-3:
            best_val, best_step = val, step
            best_state = copy.deepcopy(model.state_dict())
        elif step - best_step >= 15 * patience:
            print("early stop")
            break

model.load_state_dict(best_state)
print("best", best_val, "at", best_step)
assert best_val < first
assert all(torch.isfinite(p).all() for p in model.parameters())
