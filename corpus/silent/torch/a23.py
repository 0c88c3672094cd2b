# bag-of-words topic classifier; large hashed vocabulary of which a run sees only a part
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(33)
BUCKETS, TOPICS, WORDS, DOC = 20000, 6, 300, 25
topic_words = torch.randint(0, BUCKETS, (TOPICS, WORDS))
common = torch.randint(0, BUCKETS, (200,))


def documents(n):
    y = torch.randint(0, TOPICS, (n,))
    own = topic_words[y].gather(1, torch.randint(0, WORDS, (n, DOC)))
    noise = common[torch.randint(0, len(common), (n, DOC))]
    return torch.where(torch.rand(n, DOC) < 0.4, own, noise), y


class Bag(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.table = nn.EmbeddingBag(BUCKETS, dim, mode="mean", sparse=True)
        nn.init.normal_(self.table.weight, std=0.01)
        self.hidden = nn.Linear(dim, 32)
        self.out = nn.Linear(32, TOPICS)

    def forward(self, tokens):
        h = F.dropout(self.table(tokens), 0.5, self.training)
        return self.out(torch.relu(self.hidden(h)))


model = Bag()
optimizers = [
    torch.optim.SparseAdam(model.table.parameters(), lr=0.02),
    torch.optim.Adam([*model.hidden.parameters(), *model.out.parameters()], lr=3e-3),
]
test_x, test_y = documents(600)
for step in range(150):
    x, y = documents(64)
    loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
    for o in optimizers:
        o.zero_grad()
    loss.backward()
    for o in optimizers:
        o.step()
    if step % 15 == 14:
        model.eval()
        with torch.no_grad():
            acc = (model(test_x).argmax(1) == test_y).float().mean().item()
        model.train()
        print(f"{step + 1:4d} loss {loss.item():.4f} test acc {acc:.3f}")
