import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.lr_scheduler import LambdaLR


class Config:
    vocab = 20
    d_model = 64
    seq = 14
    warmup = 60
    lr = 1e-3
    steps = 260
    batch = 48


class Predictor(nn.Module):
    """Causal transformer; every sequence repeats with its own period (3 to 5)."""

    def __init__(self, c):
        super().__init__()
        self.emb = nn.Embedding(c.vocab, c.d_model)
        self.pos = nn.Embedding(c.seq, c.d_model)
        layer = nn.TransformerEncoderLayer(c.d_model, 4, 2 * c.d_model, dropout=0.0,
                                           batch_first=True, norm_first=True)
        self.tr = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(c.d_model)
        self.out = nn.Linear(c.d_model, c.vocab)

    def forward(self, x):
        t = x.size(1)
        mask = nn.Transformer.generate_square_subsequent_mask(t)
        h = self.emb(x) + self.pos(torch.arange(t))
        return self.out(self.norm(self.tr(h, mask=mask, is_causal=True)))


def sample(c):
    rows = []
    for _ in range(c.batch):
        period = int(torch.randint(3, 6, ()))
        base = torch.randint(0, c.vocab, (period,))
        rows.append(base.repeat(c.seq // period + 2)[:c.seq + 1])
    w = torch.stack(rows)
    return w[:, :-1], w[:, 1:]


def noam(d_model, warmup):
    def rate(step):
        step = max(step, 1)
        return d_model ** -0.5 * min(step ** -0.5, step * warmup ** -1.5)
    return rate


torch.manual_seed(12)
cfg = Config()
model = Predictor(cfg)
optimizer = torch.optim.Adam(model.parameters(), lr=cfg.lr, betas=(0.9, 0.98), eps=1e-9)
scheduler = LambdaLR(optimizer, noam(cfg.d_model, cfg.warmup))
for step in range(cfg.steps):
    x, y = sample(cfg)
    logits = model(x)
    loss = F.cross_entropy(logits[:, 5:].reshape(-1, cfg.vocab), y[:, 5:].reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    if step % 20 == 0 or step == cfg.steps - 1:
        print(step, "loss", round(loss.item(), 4))
