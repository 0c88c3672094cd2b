# character level pretraining on a small generated recipe corpus
import random
import numpy as np
import torch
import torch.nn as nn
from torch.nn import functional as F

torch.manual_seed(1337)
rng = random.Random(1337)
verbs = ["boil", "chop", "fry", "mix", "peel", "roast", "season", "slice"]
things = ["carrots", "lentils", "onions", "pasta", "peppers", "potatoes", "rice", "tofu"]
how = ["briefly", "for ten minutes", "in a large pan", "until golden", "with olive oil", "with salt"]


def sentence():
    s = f"{rng.choice(verbs)} the {rng.choice(things)} {rng.choice(how)}"
    if rng.random() < 0.4:
        s += f", then {rng.choice(verbs)} the {rng.choice(things)}"
    return s + ". "


text = "".join(sentence() for _ in range(6000))
chars = sorted(set(text))
stoi = {c: i for i, c in enumerate(chars)}
itos = dict(enumerate(chars))
data = np.array([stoi[c] for c in text])
BLOCK = 48


class PretrainDataset:
    def __init__(self, ids):
        self.ids = ids

    def __len__(self):
        return len(self.ids) - BLOCK - 1

    def __getitem__(self, i):
        sample = self.ids[i:i + BLOCK + 1]
        X = np.array(sample[:-1]).astype(np.int64)
        Y = np.array(sample[1:]).astype(np.int64)
        return torch.from_numpy(X), torch.from_numpy(Y)


class GRULM(nn.Module):
    def __init__(self, vocab, n_embd=48, hidden=96):
        super().__init__()
        self.wte = nn.Embedding(vocab, n_embd)
        self.rnn = nn.GRU(n_embd, hidden, batch_first=True)
        self.ln = nn.LayerNorm(hidden)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, input_ids, labels=None):
        h, _ = self.rnn(self.wte(input_ids))
        logits = self.lm_head(self.ln(h))
        loss = None
        if labels is not None:
            shift_logits = logits[..., :-1, :].contiguous()
            shift_labels = labels[..., 1:].contiguous()
            loss = F.cross_entropy(shift_logits.view(-1, shift_logits.size(-1)), shift_labels.view(-1))
        return logits, loss


@torch.no_grad()
def complete(model, prompt, n=60):
    ids = [stoi[c] for c in prompt]
    for _ in range(n):
        logits, _ = model(torch.tensor([ids[-BLOCK:]]))
        ids.append(logits[0, -1].argmax().item())
    return "".join(itos[i] for i in ids)


split = int(0.9 * len(data))
train, valid = PretrainDataset(data[:split]), data[split:]
model = GRULM(len(chars))
optim = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
sched = torch.optim.lr_scheduler.CosineAnnealingLR(optim, 300, 3e-4)
for it in range(300):
    rows = [train[rng.randrange(len(train))] for _ in range(32)]
    X, Y = torch.stack([r[0] for r in rows]), torch.stack([r[1] for r in rows])
    _, loss = model(X, labels=Y)
    optim.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optim.step()
    sched.step()
    if it % 50 == 0:
        print(f"iter {it}: loss {loss.item():.4f}")

print(repr(complete(model, "boil the ")))
with torch.no_grad():
    n = len(valid) // (BLOCK + 1)
    chunk = torch.from_numpy(valid[: n * (BLOCK + 1)].reshape(n, BLOCK + 1).astype(np.int64))
    logits, _ = model(chunk[:, :-1])
    bpc = F.cross_entropy(logits.flatten(0, 1), chunk[:, 1:].flatten()).item() / np.log(2)
print("FINAL", bpc)
