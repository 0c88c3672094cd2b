import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
gen = torch.Generator().manual_seed(0)
VOCAB, TOPICS, DIM, NEG = 600, 12, 16, 6

topic_of = torch.arange(VOCAB) % TOPICS
members = [torch.where(topic_of == t)[0] for t in range(TOPICS)]


def pairs(n):
    centre = torch.randint(0, VOCAB, (n,), generator=gen)
    slot = torch.randint(0, VOCAB // TOPICS, (n,), generator=gen)
    context = torch.stack(members)[topic_of[centre], slot]
    noise = torch.rand(n, generator=gen) < 0.1
    context = torch.where(noise, torch.randint(0, VOCAB, (n,), generator=gen), context)
    negatives = torch.randint(0, VOCAB, (n, NEG), generator=gen)
    return centre, context, negatives


class SkipGram(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Embedding(VOCAB, DIM, sparse=True)
        self.outer = nn.Embedding(VOCAB, DIM, sparse=True)
        self.mix = nn.Linear(DIM, DIM, bias=False)
        self.offset = nn.Parameter(torch.zeros(()))
        nn.init.normal_(self.inner.weight, std=0.1)
        nn.init.normal_(self.outer.weight, std=0.1)
        nn.init.eye_(self.mix.weight)

    def forward(self, c, o, neg):
        h = self.mix(self.inner(c))
        pos = (h * self.outer(o)).sum(-1) + self.offset
        bad = torch.einsum("nd,nkd->nk", h, self.outer(neg)) + self.offset
        return -(F.logsigmoid(pos) + F.logsigmoid(-bad).sum(-1)).mean()


model = SkipGram()
opt_tables = torch.optim.SparseAdam([model.inner.weight, model.outer.weight], lr=0.02)
opt_rest = torch.optim.Adam([model.mix.weight, model.offset], lr=2e-3)

for step in range(400):
    loss = model(*pairs(256))
    opt_tables.zero_grad()
    opt_rest.zero_grad()
    loss.backward()
    opt_tables.step()
    opt_rest.step()
    if step % 40 == 0:
        touched = model.inner.weight.grad.coalesce().indices().numel()
        print(f"{step:4d} loss {loss.item():.4f}  rows touched {touched}/{VOCAB}")

with torch.no_grad():
    e = F.normalize(model.inner.weight, dim=-1)
    sim = e @ e.t() - 2 * torch.eye(VOCAB)
    hit = (topic_of[sim.topk(5).indices] == topic_of[:, None]).float().mean()
print(f"neighbours with the same topic {hit.item():.3f}")
