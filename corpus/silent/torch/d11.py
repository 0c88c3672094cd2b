"""Next-item model: sparse embedding table plus a dense tower, padded sessions."""
import torch
import torch.nn as nn
import torch.nn.functional as F

PAD = 0


class SessionModel(nn.Module):
    def __init__(self, n_items, dim=32):
        super().__init__()
        self.items = nn.Embedding(n_items, dim, padding_idx=PAD, sparse=True)
        self.tower = nn.Sequential(nn.Linear(dim, 64), nn.ReLU(), nn.Linear(64, n_items))

    def forward(self, seq):
        return self.tower(self.items(seq))


def make_sessions(n, n_items, max_len, g):
    succ = torch.randperm(n_items - 1, generator=g) + 1
    seq = torch.full((n, max_len + 1), PAD)
    popular = 1.0 / torch.arange(1, n_items).float()
    for r in range(n):
        ln = int(torch.randint(3, max_len + 2, (1,), generator=g))
        cur = int(torch.multinomial(popular, 1, generator=g)) + 1
        for t in range(ln):
            seq[r, t] = cur
            if torch.rand(1, generator=g) < 0.1:
                cur = int(torch.randint(1, n_items, (1,), generator=g))
            else:
                cur = int(succ[cur - 1])
    return seq


def masked_ce(logits, target):
    keep = target != PAD
    loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
    return (loss * keep.flatten()).sum() / keep.sum().clamp(min=1)


def main():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(0)
    n_items = 400
    data = make_sessions(1500, n_items, 12, g)
    train, test = data[:1300], data[1300:]
    model = SessionModel(n_items)
    sparse_opt = torch.optim.SparseAdam(list(model.items.parameters()), lr=1e-2)
    dense_opt = torch.optim.AdamW(model.tower.parameters(), lr=4e-3, weight_decay=1e-3)
    for step in range(400):
        b = train[torch.randint(0, len(train), (64,))]
        loss = masked_ce(model(b[:, :-1]), b[:, 1:])
        for o in (sparse_opt, dense_opt):
            o.zero_grad()
        loss.backward()
        for o in (sparse_opt, dense_opt):
            o.step()
        if step % 40 == 0 or step == 399:
            print(f"step {step} masked loss {loss.item():.4f}")
    with torch.no_grad():
        x, y = test[:, :-1], test[:, 1:]
        hit = (model(x).argmax(-1) == y)[y != PAD].float().mean().item()
    print(f"FINAL loss {loss.item():.4f} hit-rate {hit:.3f}")


if __name__ == "__main__":
    main()
