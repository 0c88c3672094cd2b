import torch
import torch.nn as nn
import torch.nn.functional as F

# Bag-of-words topic model: a big vocabulary of which a small corpus uses only a little.
VOCAB, TOPICS, DIM = 40_000, 6, 24
gen = torch.Generator().manual_seed(11)
topic_words = torch.randint(0, VOCAB, (TOPICS, 40), generator=gen)
common_words = torch.randint(0, VOCAB, (120,), generator=gen)


def sample_docs(n):
    topics = torch.randint(0, TOPICS, (n,), generator=gen)
    words, offsets = [], []
    at = 0
    for t in topics.tolist():
        length = int(torch.randint(8, 20, (1,), generator=gen))
        own = topic_words[t][torch.randint(0, 40, (length // 3,), generator=gen)]
        rest = common_words[torch.randint(0, 120, (length - length // 3,), generator=gen)]
        doc = torch.cat([own, rest])
        words.append(doc)
        offsets.append(at)
        at += len(doc)
    return torch.cat(words), torch.tensor(offsets), topics


class TopicNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(VOCAB, DIM, mode="mean", sparse=True)
        nn.init.normal_(self.bag.weight, std=0.1)
        self.out = nn.Linear(DIM, TOPICS)

    def forward(self, words, offsets):
        return self.out(self.bag(words, offsets))


torch.manual_seed(5)
net = TopicNet()
sparse_opt = torch.optim.SparseAdam(net.bag.parameters(), lr=0.02)
dense_opt = torch.optim.Adam(net.out.parameters(), lr=0.01)

for it in range(120):
    words, offsets, topics = sample_docs(32)
    loss = F.cross_entropy(net(words, offsets), topics)
    sparse_opt.zero_grad()
    dense_opt.zero_grad()
    loss.backward()
    sparse_opt.step()
    dense_opt.step()
    if it % 20 == 0 or it == 119:
        print("iter", it, "loss", round(loss.item(), 4))

words, offsets, topics = sample_docs(400)
with torch.no_grad():
    hit = (net(words, offsets).argmax(-1) == topics).float().mean()
print("held-out accuracy", round(hit.item(), 3))
