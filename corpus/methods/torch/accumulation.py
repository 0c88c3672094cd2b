"""Gradients accumulated over four micro-batches and clipped by their norm, a small character model."""
import torch
import torch.nn as nn
import torch.nn.functional as F

TEXT = ("the cat sat on the mat and the dog lay by the door while the rain fell on the roof of the house "
        "and the wind went round the corner to the garden where the old tree stood ") * 40


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x, mask):
        h = self.norm1(x)
        x = x + self.attention(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocab, context, dim=48):
        super().__init__()
        self.token, self.place = nn.Embedding(vocab, dim), nn.Embedding(context, dim)
        self.blocks = nn.ModuleList(Block(dim, 2) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab)

    def forward(self, x):
        mask = torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)
        h = self.token(x) + self.place.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h, mask)
        return self.head(self.norm(h))


def main(steps=120, micro=4, context=32):
    torch.manual_seed(0)
    chars = sorted(set(TEXT))
    data = torch.tensor([chars.index(c) for c in TEXT])
    model = GPT(len(chars), context)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 20))
    for step in range(steps):
        total = 0.0
        for _ in range(micro):
            start = torch.randint(0, len(data) - context - 1, (16,))
            x = torch.stack([data[i : i + context] for i in start])
            y = torch.stack([data[i + 1 : i + context + 1] for i in start])
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten()) / micro
            loss.backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        opt.zero_grad(set_to_none=True)
        schedule.step()
        if step % 20 == 0:
            print(f"{step:4d} loss {total:.4f} norm {norm:.3f}")
    with torch.no_grad():
        right = (model(x).argmax(-1) == y)[:, 8:].float().mean()
    print(f"loss {total:.4f} accuracy {right:.3f}")


if __name__ == "__main__":
    main()
