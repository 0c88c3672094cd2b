"""Train a small causal transformer in PyTorch on sums modulo 97; the argument is the number of steps."""

from __future__ import annotations

import sys

import torch
from torch import nn

WIDTH, LAYERS, TOKENS, BATCH, CLASSES = 128, 4, 48, 32, 97


class Layer(nn.Module):
    """Attention and a feed-forward part, each after a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the stream after this layer."""
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.first(x)).chunk(3, dim=-1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


def main(steps: int) -> None:
    """Train, and print the loss at times."""
    torch.manual_seed(0)
    embed, places = nn.Embedding(CLASSES, WIDTH), nn.Embedding(TOKENS, WIDTH)
    model = nn.Sequential(*[Layer() for _ in range(LAYERS)], nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES))
    parts = nn.ModuleList([embed, places, model])
    optimizer = torch.optim.AdamW(parts.parameters(), lr=1e-3)
    for step in range(steps):
        rows = torch.randint(0, CLASSES, (BATCH, 2))
        columns = list(rows.unbind(1))
        while len(columns) <= TOKENS:
            columns.append((columns[-1] + columns[-2]) % CLASSES)
        ids = torch.stack(columns, dim=1)
        x = embed(ids[:, :-1]) + places(torch.arange(TOKENS))
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(step, loss.item())


main(int(sys.argv[1]))
