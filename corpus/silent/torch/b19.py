"""Causal transformer on a toy grammar; tied output layer, warm-up, gradients summed over 4 micro-batches."""
import torch
import torch.nn as nn
import torch.nn.functional as F

V, T, D = 24, 20, 40
UPDATES, ACCUM, WARM = 120, 4, 20


class TinyLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(V, D)
        self.wpe = nn.Embedding(T, D)
        layer = nn.TransformerEncoderLayer(D, 4, 80, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.ln = nn.LayerNorm(D)
        self.lm_head = nn.Linear(D, V, bias=False)
        nn.init.normal_(self.wte.weight, std=0.15)
        self.lm_head.weight = self.wte.weight
        self.register_buffer("mask", torch.triu(torch.ones(T, T, dtype=torch.bool), 1))

    def forward(self, ids):
        h = self.wte(ids) + self.wpe.weight
        return self.lm_head(self.ln(self.body(h, mask=self.mask, is_causal=True)))


def sentences(n):
    """Each symbol adds a stride, fixed for the sentence, to the one before; 5 % are random."""
    stride = torch.randint(1, 4, (n, 1))
    start = torch.randint(0, V, (n, 1))
    ids = (start + stride * torch.arange(T + 1)) % V
    noise = torch.rand(n, T + 1) < 0.05
    return torch.where(noise, torch.randint(0, V, (n, T + 1)), ids)


def schedule(update):
    if update < WARM:
        return update / WARM
    return 1.0 - 0.9 * (update - WARM) / (UPDATES - WARM)


torch.manual_seed(27)
lm = TinyLM()
opt = torch.optim.AdamW(lm.parameters(), lr=4e-3, weight_decay=0.05)
sched = torch.optim.lr_scheduler.LambdaLR(opt, schedule)
opt.zero_grad()
running = 0.0
for micro in range(UPDATES * ACCUM):
    ids = sentences(16)
    logits = lm(ids[:, :-1])
    loss = F.cross_entropy(logits.reshape(-1, V), ids[:, 1:].reshape(-1), label_smoothing=0.1)
    (loss / ACCUM).backward()
    running += loss.item() / ACCUM
    if (micro + 1) % ACCUM == 0:
        update = (micro + 1) // ACCUM
        nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
        opt.step()
        sched.step()
        opt.zero_grad()
        if update % 10 == 0 or update == 1:
            print(f"update {update:3d} loss {running:.4f} lr {sched.get_last_lr()[0]:.5f}")
        running = 0.0
