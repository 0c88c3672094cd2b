"""Sequence tagging with padded batches; the tag set has one tag that is switched off."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(9)
VOCAB, TAGS, MAXLEN, PAD = 40, 6, 18, 0
INF = float("inf")
tag_of = torch.randint(0, TAGS - 1, (VOCAB,))
tag_of[tag_of == 3] = 2                              # tag 3 is legal but never annotated
allowed = torch.zeros(TAGS)
allowed[TAGS - 1] = -INF                             # retired tag: probability exactly zero


class Tagger(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, d, padding_idx=PAD)
        self.pos = nn.Parameter(0.02 * torch.randn(MAXLEN, d))
        self.q, self.k, self.v = (nn.Linear(d, d) for _ in range(3))
        self.ff = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 64), nn.ReLU(), nn.Linear(64, TAGS))

    def forward(self, tokens):
        h = self.emb(tokens) + self.pos[: tokens.shape[1]]
        scores = self.q(h) @ self.k(h).transpose(1, 2) / h.shape[-1] ** 0.5
        bias = torch.zeros_like(scores)
        bias = bias.masked_fill((tokens == PAD)[:, None, :], -INF)
        bias = bias + torch.full_like(bias[0], -INF).triu(1)
        mixed = torch.softmax(scores + bias, -1) @ self.v(h)
        return self.ff(h + mixed) + allowed


def batch(n=32):
    lengths = torch.randint(4, MAXLEN + 1, (n,))
    tokens = torch.randint(1, VOCAB, (n, MAXLEN))
    real = torch.arange(MAXLEN)[None] < lengths[:, None]
    tokens = tokens * real
    prev = torch.cat([tokens[:, :1], tokens[:, :-1]], 1)
    tags = torch.where(tokens % 2 == 0, tag_of[prev], tag_of[tokens])
    return tokens, torch.where(real, tags, torch.tensor(-100))


model = Tagger()
opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
best = INF
for step in range(201):
    tokens, tags = batch()
    logits = model(tokens)
    loss = F.cross_entropy(logits.flatten(0, 1), tags.flatten(), ignore_index=-100)
    opt.zero_grad()
    loss.backward()
    opt.step()
    best = min(best, loss.item())
    if step % 40 == 0:
        with torch.no_grad():
            hit = (logits.argmax(-1) == tags).float()
            recall = torch.stack([hit[tags == c].mean() for c in range(TAGS)])
            entropy = torch.distributions.Categorical(logits=logits).entropy().mean()
        print(f"{step:3d} loss {loss.item():.4f} recall {recall.nanmean().item():.3f} entropy {entropy.item():.3f}",
              recall.tolist())
print("best", round(best, 4))
