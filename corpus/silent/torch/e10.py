import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB, TOPICS, DOC = 4000, 5, 30


def corpus(n, seed):
    g = torch.Generator().manual_seed(seed)
    shared = torch.Generator().manual_seed(99)
    boost = torch.rand(TOPICS, VOCAB, generator=shared).pow(6)
    freq = 1.0 / torch.arange(1, VOCAB + 1).float().pow(0.8)
    dist = freq * (0.05 + boost)
    y = torch.randint(0, TOPICS, (n,), generator=g)
    x = torch.multinomial(dist[y], DOC, replacement=True, generator=g)
    return x, y


class TopicModel(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.bag = nn.EmbeddingBag(VOCAB, dim, mode="mean", sparse=True)
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 64), nn.ReLU(),
                                 nn.Linear(64, TOPICS))

    def forward(self, tokens):
        return self.mlp(self.bag(tokens))


def main():
    torch.manual_seed(1)
    xtr, ytr = corpus(4000, 0)
    xte, yte = corpus(800, 1)
    model = TopicModel()
    opts = [
        torch.optim.SparseAdam(model.bag.parameters(), lr=5e-2),
        torch.optim.AdamW(model.mlp.parameters(), lr=2e-3),
    ]
    for step in range(300):
        k = torch.randint(0, len(xtr), (64,))
        loss = F.cross_entropy(model(xtr[k]), ytr[k])
        for o in opts:
            o.zero_grad()
        loss.backward()
        for o in opts:
            o.step()
        if step % 50 == 0 or step == 299:
            with torch.no_grad():
                acc = (model(xte).argmax(1) == yte).float().mean().item()
            rows = model.bag.weight.grad.coalesce().indices().shape[1]
            print(f"step {step:3d} loss {loss.item():.4f} acc {acc:.3f} rows {rows}/{VOCAB}")


if __name__ == "__main__":
    main()
