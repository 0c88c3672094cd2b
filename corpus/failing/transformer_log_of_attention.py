"""A penalty on attention's entropy takes the logarithm of causally masked weights: 0 * -inf."""

from corpus.case import Case, program


def in_torch():
    import torch

    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = torch.nn.Linear(4, 12)

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, dim=-1)
            mask = torch.triu(torch.ones(3, 3, dtype=torch.bool), diagonal=1)
            p = torch.softmax((q @ k.transpose(-1, -2)).masked_fill(mask, float("-inf")), dim=-1)
            entropy = -(p * p.log()).sum(-1)  # BAD
            return p @ v, entropy

    torch.manual_seed(0)
    attention = Attention()

    def loss(x):
        out, entropy = attention(x)
        return out.square().mean() + 0.01 * entropy.mean()

    return program(loss, torch.randn(2, 3, 4), model=attention)


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(w, x):
        q, k, v = jnp.split(x @ w, 3, axis=-1)
        mask = jnp.triu(jnp.ones((3, 3), dtype=bool), k=1)
        p = jax.nn.softmax(jnp.where(mask, -jnp.inf, q @ k.swapaxes(-1, -2)), axis=-1)
        entropy = -(p * jnp.log(p)).sum(-1)  # BAD
        return ((p @ v) ** 2).mean() + 0.01 * entropy.mean()

    return program(loss, 0.1 * jnp.ones((4, 12)), jnp.arange(24.0).reshape(2, 3, 4) / 24)


CASE = Case(cause="domain", operation="log")
