import torch
import torch.nn as nn
import torch.nn.functional as F


class Attention(nn.Module):
    def __init__(self, dim, heads=4):
        super().__init__()
        self.h = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.h, d // self.h).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).reshape(b, n, d))


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attention(dim)
        self.ff = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.ff(self.ln2(x))


class Reverser(nn.Module):
    """Writes the input sequence backwards."""

    def __init__(self, vocab=16, length=10, dim=64, depth=2):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Embedding(length, dim)
        self.layers = [Layer(dim) for _ in range(depth)]
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, x):
        h = self.tok(x) + self.pos(torch.arange(x.shape[1]))
        for layer in self.layers:
            h = layer(h)
        return self.head(self.norm(h))


class Trainer:
    def __init__(self, model, lr=2e-3):
        self.model = model
        self.opt = torch.optim.AdamW(model.parameters(), lr=lr)

    def step(self, x, y):
        self.opt.zero_grad()
        loss = F.cross_entropy(self.model(x).flatten(0, 1), y.flatten())
        loss.backward()
        self.opt.step()
        return loss.item()

    def fit(self, steps):
        for i in range(steps):
            x = torch.randint(0, 16, (64, 10))
            loss = self.step(x, x.flip(1))
            if i % 40 == 0 or i == steps - 1:
                print(f"iter {i:3d}: {loss:.4f}")
        return loss


if __name__ == "__main__":
    torch.manual_seed(0)
    model = Reverser()
    print("FINAL", f"{Trainer(model).fit(400):.4f}")
    with torch.no_grad():
        x = torch.randint(0, 16, (200, 10))
        print("token accuracy", (model(x).argmax(-1) == x.flip(1)).float().mean().item())
