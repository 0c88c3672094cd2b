"""Vision transformer in flax linen: patches, class token, pre-norm blocks, AdamW."""
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import stablenum_jax

IMAGE, PATCH, DIM, HEADS, LAYERS, CLASSES = 16, 4, 32, 4, 2, 6


def patchify(images):
    """(batch, height, width, channels) -> (batch, patches, values of one patch)."""
    b, h, w, c = images.shape
    x = images.reshape(b, h // PATCH, PATCH, w // PATCH, PATCH, c)
    x = x.transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(b, (h // PATCH) * (w // PATCH), PATCH * PATCH * c)


class SelfAttention(nn.Module):
    heads: int

    @nn.compact
    def __call__(self, x):
        b, t, d = x.shape
        head_dim = d // self.heads
        qkv = nn.Dense(3 * d, use_bias=False, name="qkv")(x)
        qkv = qkv.reshape(b, t, 3, self.heads, head_dim)
        q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        scores = scores / jnp.sqrt(head_dim)
        weights = jax.nn.softmax(scores, axis=-1)
        out = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        return nn.Dense(d, name="out")(out.reshape(b, t, d))


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.Dense(2 * x.shape[-1], name="up")(x)
        h = nn.gelu(h, approximate=False)
        return nn.Dense(x.shape[-1], name="down")(h)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm(epsilon=1e-6, name="norm1")(x)
        x = x + SelfAttention(HEADS, name="attn")(y)
        y = nn.LayerNorm(epsilon=1e-6, name="norm2")(x)
        return x + MLP(name="mlp")(y)


class ViT(nn.Module):
    @nn.compact
    def __call__(self, images):
        x = nn.Dense(DIM, name="embed")(patchify(images))
        b, t, d = x.shape
        cls = self.param("cls", nn.initializers.normal(0.5), (1, 1, d))
        x = jnp.concatenate([jnp.broadcast_to(cls, (b, 1, d)), x], axis=1)
        pos = self.param("pos", nn.initializers.normal(0.2), (1, t + 1, d))
        x = x + pos
        for i in range(LAYERS):
            x = Block(name=f"block_{i}")(x)
        x = nn.LayerNorm(name="norm")(x)
        return nn.Dense(CLASSES, name="head")(x[:, 0])


def make_data(n=8, seed=10):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, size=n)
    images = rng.normal(size=(n, IMAGE, IMAGE, 3)) + 0.2 * labels[:, None, None, None]
    return images.astype(np.float32), labels.astype(np.int32)


def make_optimizer():
    schedule = optax.linear_schedule(init_value=1e-3, end_value=1e-4, transition_steps=100)
    decay_matrices = lambda params: jax.tree.map(lambda p: p.ndim > 1, params)
    return optax.adamw(schedule, b2=0.99, weight_decay=0.05, mask=decay_matrices)


def program():
    model = ViT()
    images, labels = make_data()
    params = model.init(jax.random.PRNGKey(10), images)["params"]

    def loss_fn(params, images, labels):
        logits = model.apply({"params": params}, images)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean()

    return stablenum_jax.program(loss_fn, params, images, labels, optimizer=make_optimizer())
