"""Toy instruction tuning: <digits> = -> sorted digits, decoder only."""
import random
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(5)
random.seed(5)


class Tokenizer:
    def __init__(self):
        self.vocab = [str(i) for i in range(10)] + ["=", "<s>", "</s>"]
        self.ids = {t: i for i, t in enumerate(self.vocab)}
        self.eos_token_id = self.ids["</s>"]
        self.pad_token_id = None

    def encode(self, s):
        return [self.ids[c] for c in s]


tok = Tokenizer()
if tok.pad_token_id is None:
    tok.pad_token_id = tok.eos_token_id
BOS, EQ = tok.ids["<s>"], tok.ids["="]
MAXLEN = 16


def make_example():
    n = random.randint(2, 6)
    digits = [random.randint(0, 9) for _ in range(n)]
    return digits, sorted(digits)


def collate(examples):
    ids = torch.full((len(examples), MAXLEN), tok.pad_token_id)
    labels = torch.full((len(examples), MAXLEN), -100)
    for i, (src, tgt) in enumerate(examples):
        seq = [BOS] + src + [EQ] + tgt + [tok.eos_token_id]
        ids[i, : len(seq)] = torch.tensor(seq)
        labels[i] = ids[i]
        labels[i, : len(src) + 2] = -100
        labels[i, len(seq):] = -100
    return ids, labels


class Block(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))
        self.h = h

    def forward(self, x):
        B, T, D = x.shape
        q, k, v = self.qkv(self.n1(x)).view(B, T, 3, self.h, D // self.h).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(B, T, D))
        return x + self.mlp(self.n2(x))


class TinyLM(nn.Module):
    def __init__(self, vocab, d=64, h=4, layers=2):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, d), nn.Embedding(MAXLEN, d)
        self.blocks = nn.ModuleList([Block(d, h) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocab)

    def forward(self, ids, labels=None):
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1]))
        for b in self.blocks:
            x = b(x)
        logits = self.head(self.norm(x))
        if labels is None:
            return logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


@torch.no_grad()
def generate(model, src):
    ids = [BOS] + src + [EQ]
    out = []
    while len(ids) < MAXLEN:
        nxt = model(torch.tensor([ids]))[0, -1].argmax().item()
        if nxt == tok.eos_token_id:
            break
        ids.append(nxt)
        out.append(nxt)
    return out


model = TinyLM(len(tok.vocab))
opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
heldout = [make_example() for _ in range(200)]
for step in range(350):
    ids, labels = collate([make_example() for _ in range(96)])
    loss = model(ids, labels)
    opt.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    if step % 50 == 0 or step == 349:
        print(f"step {step:4d} loss {loss.item():.4f}")

model.eval()
wrong = 0
for i, (src, tgt) in enumerate(heldout):
    out = generate(model, src)
    wrong += out != tgt
    if i < 3:
        print("prompt", src, "->", out, "expected", tgt)
print("FINAL", wrong / len(heldout))
