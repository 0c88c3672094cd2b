"""char-level language model, pre-norm residual blocks with gated feed forward, pure half precision weights
   + fp32 master copy (to save memory on the small box)"""
import torch
import torch.nn as nn
import torch.nn.functional as F

TEXT = """It was the best of times, it was the worst of times, it was the age of wisdom,
it was the age of foolishness, it was the epoch of belief, it was the epoch of incredulity,
it was the season of Light, it was the season of Darkness, it was the spring of hope,
it was the winter of despair, we had everything before us, we had nothing before us. """ * 4

torch.manual_seed(0)
chars = sorted(set(TEXT))
stoi = {c: k for k, c in enumerate(chars)}
data = torch.tensor([stoi[c] for c in TEXT])
CTX = 24


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        var = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(var + self.eps)
        return self.weight * x.to(self.weight.dtype)


class GatedFF(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.wi_0 = nn.Linear(dim, hidden, bias=False)
        self.wi_1 = nn.Linear(dim, hidden, bias=False)
        self.wo = nn.Linear(hidden, dim, bias=False)
        for lin in (self.wi_0, self.wi_1, self.wo):
            nn.init.normal_(lin.weight, std=2.0)

    def forward(self, x):
        return self.wo(F.gelu(self.wi_0(x)) * self.wi_1(x))


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.n1, self.n2 = RMSNorm(dim), RMSNorm(dim)
        self.mix = nn.Linear(dim * 2, dim, bias=False)
        self.ff = GatedFF(dim, 4 * dim)

    def forward(self, x):
        h = self.n1(x)
        prev = F.pad(h, (0, 0, 1, 0))[:, :-1]
        x = x + self.mix(torch.cat([h, prev], -1))
        return x + self.ff(self.n2(x))


class CharLM(nn.Module):
    def __init__(self, vocab, dim=64, depth=2):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList([Block(dim) for _ in range(depth)])
        self.norm = RMSNorm(dim)
        self.out = nn.Linear(dim, vocab, bias=False)

    def forward(self, idx):
        x = self.emb(idx)
        for b in self.blocks:
            x = b(x)
        return self.out(self.norm(x)).float()


master = CharLM(len(chars))
work = CharLM(len(chars)).half()
opt = torch.optim.Adam(master.parameters(), lr=3e-2)


def sync():
    with torch.no_grad():
        for w, m in zip(work.parameters(), master.parameters()):
            w.copy_(m)


@torch.no_grad()
def sample(n=24):
    idx = data[:8][None]
    for _ in range(n):
        nxt = work(idx[:, -CTX:])[:, -1].argmax(-1, keepdim=True)
        idx = torch.cat([idx, nxt], 1)
    return "".join(chars[k] for k in idx[0].tolist()).replace("\n", "/")


sync()
for step in range(50):
    pos = torch.randint(0, len(data) - CTX - 1, (8,))
    x = torch.stack([data[p:p + CTX] for p in pos])
    y = torch.stack([data[p + 1:p + CTX + 1] for p in pos])
    loss = F.cross_entropy(work(x).flatten(0, 1), y.flatten())
    work.zero_grad()
    (loss * 64).backward()
    for w, m in zip(work.parameters(), master.parameters()):
        m.grad = w.grad.float() / 64
    gn = nn.utils.clip_grad_norm_(master.parameters(), 1.0)
    opt.step()
    sync()
    if step % 5 == 0:
        print(step, f"loss {loss.item():.4f} gradnorm {gn.item():.3f}", "|", sample() if step % 15 == 0 else "")
