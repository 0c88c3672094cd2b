"""The library's attention with `is_causal=True`."""

from corpus.case import program


def in_torch():
    import torch
    from torch.nn import functional

    torch.manual_seed(0)
    attention = torch.nn.MultiheadAttention(4, 2, batch_first=True)

    def loss(x):
        mask = torch.nn.Transformer.generate_square_subsequent_mask(3)
        out, weights = attention(x, x, x, attn_mask=mask, is_causal=True)
        direct = functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        return out.square().mean() + weights.square().mean() + direct.mean()

    return program(loss, torch.randn(2, 3, 4), model=attention)


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(w, x):
        h = (x @ w).reshape(2, 3, 2, 2)
        return (jax.nn.dot_product_attention(h, h, h, is_causal=True) ** 2).mean()

    return program(loss, jnp.eye(4), jnp.sin(jnp.arange(24.0)).reshape(2, 3, 4))
