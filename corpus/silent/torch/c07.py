"""Sequence classification with a CLS token: which of two marker tokens occurs more often?"""
from dataclasses import dataclass

import torch
from torch import nn, Tensor

PAD, CLS = 0, 1
VOCAB = 20


@dataclass
class Config:
    dim: int = 48
    heads: int = 4
    layers: int = 2
    max_len: int = 20
    batch: int = 64
    steps: int = 180
    lr: float = 2e-3
    seed: int = 21


def sample_batch(cfg: Config, gen: torch.Generator):
    tokens = torch.full((cfg.batch, cfg.max_len), PAD)
    labels = torch.randint(0, 2, (cfg.batch,), generator=gen)
    for i in range(cfg.batch):
        n = int(torch.randint(8, cfg.max_len - 2, (1,), generator=gen))
        seq = torch.randint(4, VOCAB, (n,), generator=gen)
        k = int(torch.randint(1, 4, (1,), generator=gen))
        where = torch.randperm(n, generator=gen)[:2 * k + 1]
        a, b = (2, 3) if labels[i] == 0 else (3, 2)
        seq[where[:k + 1]] = a
        seq[where[k + 1:]] = b
        tokens[i, 0] = CLS
        tokens[i, 1:n + 1] = seq
    return tokens, labels


class Classifier(nn.Module):
    def __init__(self, cfg: Config):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, cfg.dim, padding_idx=PAD)
        self.pos = nn.Parameter(0.02 * torch.randn(1, cfg.max_len, cfg.dim))
        layer = nn.TransformerEncoderLayer(cfg.dim, cfg.heads, 2 * cfg.dim, dropout=0.0,
                                           batch_first=True, norm_first=True)
        self.enc = nn.TransformerEncoder(layer, cfg.layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(cfg.dim)
        self.head = nn.Linear(cfg.dim, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = tokens != PAD
        x = self.tok(tokens) + self.pos
        x = self.enc(x, src_key_padding_mask=mask)
        return self.head(self.norm(x[:, 0]))


def run(cfg: Config):
    torch.manual_seed(cfg.seed)
    gen = torch.Generator().manual_seed(cfg.seed)
    model = Classifier(cfg)
    opt = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
    loss_fn = nn.CrossEntropyLoss()
    window = []
    for step in range(1, cfg.steps + 1):
        x, y = sample_batch(cfg, gen)
        logits = model(x)
        loss = loss_fn(logits, y)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        window.append((loss.item(), (logits.argmax(1) == y).float().mean().item()))
        if step % 20 == 0:
            l = sum(w[0] for w in window[-20:]) / 20
            a = sum(w[1] for w in window[-20:]) / 20
            print(f"step {step:3d} | loss {l:.4f} | acc {a:.3f}")
    print(f"final metric: loss {l:.4f} acc {a:.3f}")


run(Config())
