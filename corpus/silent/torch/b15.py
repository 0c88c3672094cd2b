"""Character model of a small text with an LSTM."""
import math

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

TEXT = (
    "the quick brown fox jumps over the lazy dog. the lazy dog sleeps in the sun while the fox "
    "runs through the green wood. in the evening the dog wakes and the fox goes home to its den. "
    "the sun goes down over the wood and the night comes quietly. "
) * 6
CHARS = sorted(set(TEXT))
LOOKUP = {c: i for i, c in enumerate(CHARS)}
DATA = torch.tensor([LOOKUP[c] for c in TEXT])

PEAK_LR = 8e-3
TOTAL = 160
WARMUP = 16


class CharLSTM(nn.Module):
    def __init__(self, n_chars, emb=24, hidden=96):
        super().__init__()
        self.emb = nn.Embedding(n_chars, emb)
        self.lstm = nn.LSTM(emb, hidden, batch_first=True)
        self.head = nn.Linear(hidden, n_chars)

    def forward(self, ids):
        h, _ = self.lstm(self.emb(ids))
        return self.head(h)


def lr_at(step):
    if step < WARMUP:
        return PEAK_LR * (step + 1) / WARMUP
    progress = (step - WARMUP) / (TOTAL - WARMUP)
    return PEAK_LR * 0.5 * (1 + math.cos(math.pi * progress))


def get_batch(n=16, length=40):
    start = torch.randint(0, len(DATA) - length - 1, (n,))
    rows = torch.stack([DATA[s:s + length + 1] for s in start])
    return rows[:, :-1], rows[:, 1:]


def train():
    torch.manual_seed(8)
    model = CharLSTM(len(CHARS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, weight_decay=0.01)
    scheduler = LambdaLR(optimizer, lr_at)
    ce = nn.CrossEntropyLoss()
    for step in range(TOTAL):
        x, y = get_batch()
        loss = ce(model(x).transpose(1, 2), y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if (step + 1) % 20 == 0:
            print(f"{step + 1}/{TOTAL}  loss {loss.item():.3f}  ppl {math.exp(loss.item()):.1f}")


train()
