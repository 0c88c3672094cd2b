"""Supervised fine-tuning on question and answer records."""
import random
import torch
import torch.nn as nn
import torch.nn.functional as F

random.seed(21)
torch.manual_seed(21)
MAX_LENGTH, VOCAB, SEP, EOS = 24, 30, 28, 29
IGNORE = -100


def make_record():
    # question: a list of numbers with filler; answer: the numbers again, plus one
    n = random.randint(2, 5)
    nums = [random.randint(0, 19) for _ in range(n)]
    question = []
    for v in nums:
        question.append(v)
        question += [random.randint(20, 27) for _ in range(random.choice([0, 1, 1, 2, 2, 3, 4, 7]))]
    return question, [(v + 1) % 20 for v in nums]


def tokenize(question, answer):
    prompt = question + [SEP]
    ids = (prompt + answer + [EOS])[:MAX_LENGTH]
    labels = ([IGNORE] * len(prompt) + answer + [EOS])[:MAX_LENGTH]
    return ids, labels


def collate(records):
    width = max(len(r[0]) for r in records)
    ids = torch.full((len(records), width), EOS)
    labels = torch.full((len(records), width), IGNORE)
    for i, (x, y) in enumerate(records):
        ids[i, :len(x)] = torch.tensor(x)
        labels[i, :len(y)] = torch.tensor(y)
    return ids, labels


class Model(nn.Module):
    def __init__(self, d=64):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, d)
        self.position = nn.Embedding(MAX_LENGTH, d)
        layer = nn.TransformerEncoderLayer(d, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(d, VOCAB)

    def forward(self, ids):
        T = ids.shape[1]
        causal = torch.triu(torch.ones(T, T, dtype=torch.bool), 1)
        h = self.embed(ids) + self.position.weight[:T]
        return self.head(self.body(h, mask=causal))


def sft_loss(logits, labels):
    logits = logits[:, :-1].reshape(-1, VOCAB)
    target = labels[:, 1:].reshape(-1)
    mask = (target != IGNORE).float()
    logp = F.log_softmax(logits, dim=-1)
    per_token = -logp.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return (per_token * mask).sum() / mask.sum()


train = [tokenize(*make_record()) for _ in range(4000)]
valid = collate([tokenize(*make_record()) for _ in range(400)])
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
MICRO, ACCUM = 2, 8
for step in range(250):
    total = 0.0
    optimizer.zero_grad()
    for _ in range(ACCUM):
        ids, labels = collate(random.sample(train, MICRO))
        loss = sft_loss(model(ids), labels) / ACCUM
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 25 == 0:
        print(f"step {step} loss {total:.4f}")

model.eval()
with torch.no_grad():
    print("FINAL", sft_loss(model(valid[0]), valid[1]).item())
