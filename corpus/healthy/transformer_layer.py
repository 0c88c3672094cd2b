"""A stock encoder layer with a causal mask and padding, trained by AdamW."""

from corpus.case import program


def in_torch():
    import torch

    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    optimizer = torch.optim.AdamW(layer.parameters())

    def step(x, padding):
        optimizer.zero_grad()
        mask = torch.triu(torch.full((4, 4), float("-inf")), diagonal=1)
        loss = layer(x, src_mask=mask, src_key_padding_mask=padding).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    padding = torch.zeros(2, 4).masked_fill(torch.tensor([[0, 0, 0, 1], [0, 0, 1, 1]]) > 0, float("-inf"))
    return program(step, torch.randn(2, 4, 8), padding, model=layer, optimizer=optimizer)


def in_jax():
    import jax
    import jax.numpy as jnp
    import optax

    tx = optax.adamw(1e-3)
    params = {"qkv": 0.1 * jnp.ones((8, 24)), "out": 0.1 * jnp.ones((8, 8))}

    def loss(params, x, padding):
        q, k, v = jnp.split(x @ params["qkv"], 3, axis=-1)
        keep = jnp.tril(jnp.ones((4, 4), dtype=bool)) & ~padding[:, None, :]
        p = jax.nn.softmax(jnp.where(keep, q @ k.swapaxes(-1, -2), -jnp.inf), axis=-1)
        return ((x + p @ v @ params["out"]) ** 2).mean()

    def step(params, state, x, padding):
        value, grads = jax.value_and_grad(loss)(params, x, padding)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    padding = jnp.array([[False, False, False, True], [False, False, True, True]])
    x = jnp.arange(64.0).reshape(2, 4, 8) / 64
    return program(step, params, tx.init(params), x, padding)
