"""n-gram neural language model."""
import random

import torch
import torch.nn as nn

random.seed(4)
torch.manual_seed(4)

DTYPE = torch.bfloat16
CONTEXT, EMB, HID = 4, 32, 256

words = "ka mi to re so la ne du".split()
follow = {w: random.sample(words, 2) for w in words}
corpus = ["ka"]
while len(corpus) < 6000:
    corpus.append(random.choices(follow[corpus[-1]], weights=[9, 1])[0])
text = " ".join(corpus)
alphabet = sorted(set(text))
ids = torch.tensor([alphabet.index(c) for c in text])

model = nn.Sequential(
    nn.Embedding(len(alphabet), EMB),
    nn.Flatten(),
    nn.Linear(CONTEXT * EMB, HID),
    nn.ReLU(),
    nn.Linear(HID, len(alphabet)),
).to(DTYPE)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

windows = ids.unfold(0, CONTEXT + 1, 1)
history = []
for step in range(300):
    rows = windows[torch.randint(0, len(windows), (256,))]
    logits = model(rows[:, :CONTEXT])
    loss = nn.functional.cross_entropy(logits.float(), rows[:, -1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
    if step % 30 == 0:
        print(f"step={step} loss={history[-1]:.4f}")

with torch.no_grad():
    full = nn.functional.cross_entropy(model(windows[:4000, :CONTEXT]).float(), windows[:4000, -1])
print(f"final metric: loss {full.item():.4f}")
