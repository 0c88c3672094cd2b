"""Tiny instruction-tuning loop: character-level GRU LM, loss on the response only."""
import random
import torch
import torch.nn as nn

random.seed(8)
torch.manual_seed(8)

IGNORE = -100
MAX_LEN = 48
ACCUM = 8
CHARS = "abcdefghijklmnopqrstuvwxyz ?:.#"
STOI = {c: i for i, c in enumerate(CHARS)}

WORDS = "red blue green cat dog house river stone cloud apple lamp train paper window".split()


def example():
    k = min(1 + int(random.expovariate(0.55)), 9)
    words = [random.choice(WORDS) for _ in range(k)]
    prompt = "last word of: " + " ".join(words) + "?"
    return prompt, " " + words[-1] + ".#"


def encode(s):
    return [STOI[c] for c in s]


def tokenize(prompt, answer):
    p, a = encode(prompt), encode(answer)
    ids = (p + a)[:MAX_LEN]
    labels = ([IGNORE] * len(p) + a)[:MAX_LEN]
    return torch.tensor(ids), torch.tensor(labels)


class CharLM(nn.Module):
    def __init__(self, vocab, d=48):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.rnn = nn.GRU(d, d, batch_first=True)
        self.head = nn.Linear(d, vocab)

    def forward(self, ids, labels=None):
        h, _ = self.rnn(self.emb(ids))
        logits = self.head(h)
        loss = None
        if labels is not None:
            shift_logits = logits[:, :-1].reshape(-1, logits.size(-1))
            shift_labels = labels[:, 1:].reshape(-1)
            mask = (shift_labels != IGNORE).float()
            logp = shift_logits.log_softmax(-1).gather(1, shift_labels.clamp(min=0)[:, None]).squeeze(1)
            loss = -torch.sum(logp * mask) / torch.sum(mask)
        return loss, logits


data = [tokenize(*example()) for _ in range(200)]
lm = CharLM(len(CHARS))
opt = torch.optim.AdamW(lm.parameters(), lr=3e-3)
acc_loss, updates = 0.0, 0
for i, (ids, labels) in enumerate(data):
    loss, _ = lm(ids[None], labels[None])
    (loss / ACCUM).backward()
    acc_loss += loss.item() / ACCUM
    if (i + 1) % ACCUM == 0:
        nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        updates += 1
        print(f"update {updates:2d} loss {acc_loss:.4f}")
        acc_loss = 0.0
