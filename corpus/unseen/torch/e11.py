# multi-label tagging of digit images: parity, loops, straight strokes ... with prior-initialised output bias
import torch
import torch.nn as nn
from sklearn.datasets import load_digits
from sklearn.metrics import average_precision_score

torch.manual_seed(123)
TAGS = {
    "even": {0, 2, 4, 6, 8},
    "has_loop": {0, 6, 8, 9},
    "prime": {2, 3, 5, 7},
    "two_loops": {8},
    "straight": {1, 4, 7},
    "multiple_of_9": {9},
}


def make_split(first_labels=None, seed=0):
    d = load_digits()
    x = torch.tensor(d.images / 16.0, dtype=torch.float32).unsqueeze(1)
    y = torch.tensor([[float(t in s) for s in TAGS.values()] for t in d.target])
    g = torch.Generator().manual_seed(seed)
    perm = torch.randperm(len(x), generator=g)
    train, test = perm[:1200], perm[1200:]
    if first_labels is not None:
        keep = torch.tensor([d.target[i] in first_labels for i in train.tolist()])
        train = train[keep]
    return x[train], y[train], x[test], y[test]


class ResBlock(nn.Module):
    def __init__(self, ch):
        super().__init__()
        self.f = nn.Sequential(
            nn.Conv2d(ch, ch, 3, padding=1, bias=False), nn.BatchNorm2d(ch), nn.ReLU(),
            nn.Conv2d(ch, ch, 3, padding=1, bias=False), nn.BatchNorm2d(ch),
        )

    def forward(self, x):
        return torch.relu(x + self.f(x))


class Tagger(nn.Module):
    def __init__(self, n_tags, pos, neg, ch=16):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, ch, 3, padding=1), nn.ReLU())
        self.blocks = nn.Sequential(ResBlock(ch), nn.MaxPool2d(2), ResBlock(ch))
        self.fc = nn.Linear(ch, n_tags)
        with torch.no_grad():
            self.fc.bias.copy_(torch.log(pos / neg))

    def forward(self, x):
        h = self.blocks(self.stem(x)).mean(dim=(2, 3))
        return self.fc(h)


def evaluate(model, x, y):
    model.eval()
    with torch.no_grad():
        p = torch.sigmoid(model(x))
    model.train()
    return average_precision_score(y.numpy(), p.numpy(), average="macro")


# stage one of the curriculum only shows the small digits
x, y, xt, yt = make_split(first_labels={0, 1, 2, 3, 4, 5, 6, 8})
pos = y.sum(0)
neg = len(y) - pos
print({k: int(v) for k, v in zip(TAGS, pos)}, "of", len(y))

model = Tagger(len(TAGS), pos, neg)
crit = nn.BCEWithLogitsLoss()
optim = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=1e-2)
sched = torch.optim.lr_scheduler.OneCycleLR(optim, 4e-3, total_steps=60)

for step in range(60):
    idx = torch.randint(0, len(x), (64,))
    loss = crit(model(x[idx]), y[idx])
    optim.zero_grad()
    loss.backward()
    optim.step()
    sched.step()
    if step % 15 == 14:
        print(f"step {step + 1} loss {loss.item():.4f} test mAP {evaluate(model, xt, yt):.3f}")
