# Copy-with-decay memory task: parallel form of a decayed linear attention (retention), equinox modules.
import math
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

SEQ, DIM, HEADS, VOC = 160, 32, 4, 12


def rms(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


class Retention(eqx.Module):
    qkv: eqx.nn.Linear
    out: eqx.nn.Linear
    decay_logit: jax.Array

    def __init__(self, key):
        k1, k2 = jax.random.split(key)
        self.qkv = eqx.nn.Linear(DIM, 3 * DIM, use_bias=False, key=k1)
        self.out = eqx.nn.Linear(DIM, DIM, use_bias=False, key=k2)
        gammas = 1 - np.array([1 / 2, 1 / 4, 1 / 16, 1 / 64])
        self.decay_logit = jnp.array(np.log(gammas / (1 - gammas)), jnp.float32)

    def __call__(self, x):
        t = x.shape[0]
        q, k, v = jnp.split(jax.vmap(self.qkv)(x), 3, -1)
        heads = lambda a: a.reshape(t, HEADS, -1).transpose(1, 0, 2)
        q, k, v = heads(q) / math.sqrt(DIM // HEADS), heads(k), heads(v)
        gamma = jax.nn.sigmoid(self.decay_logit)[:, None, None]
        pos = jnp.arange(t, dtype=jnp.float32)[None, :, None]
        q = q * gamma ** pos
        k = k * gamma ** -pos
        scores = jnp.tril(jnp.einsum("hid,hjd->hij", q, k))
        y = jnp.einsum("hij,hjd->hid", scores, v)
        return jax.vmap(self.out)(rms(y).transpose(1, 0, 2).reshape(t, DIM))


class Block(eqx.Module):
    mix: Retention
    ff: eqx.nn.MLP

    def __init__(self, key):
        a, b = jax.random.split(key)
        self.mix = Retention(a)
        self.ff = eqx.nn.MLP(DIM, DIM, 64, 1, activation=jax.nn.silu, key=b)

    def __call__(self, x):
        x = x + self.mix(rms(x))
        return x + jax.vmap(self.ff)(rms(x))


class LM(eqx.Module):
    emb: eqx.nn.Embedding
    blocks: list
    head: eqx.nn.Linear

    def __init__(self, key):
        ks = jax.random.split(key, 3)
        self.emb = eqx.nn.Embedding(VOC, DIM, key=ks[0])
        self.blocks = [Block(ks[1])]
        self.head = eqx.nn.Linear(DIM, VOC, key=ks[2])

    def __call__(self, tok):
        x = jax.vmap(self.emb)(tok)
        for b in self.blocks:
            x = b(x)
        return jax.vmap(self.head)(rms(x))


def make_batch(rng, length, n=6):
    """noisy periodic strings, the period changes from row to row"""
    rows = []
    for _ in range(n):
        p = rng.integers(3, 7)
        motif = rng.integers(0, VOC, p)
        row = np.resize(motif, length + 1)
        flip = rng.random(length + 1) < 0.02
        rows.append(np.where(flip, rng.integers(0, VOC, length + 1), row))
    return jnp.array(np.stack(rows))


def nll(model, rows):
    logits = jax.vmap(model)(rows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:]).mean()


tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(4e-3))


@eqx.filter_jit
def train_step(model, state, rows):
    loss, g = eqx.filter_value_and_grad(nll)(model, rows)
    upd, state = tx.update(g, state, eqx.filter(model, eqx.is_inexact_array))
    return eqx.apply_updates(model, upd), state, loss


model = LM(jax.random.PRNGKey(0))
state = tx.init(eqx.filter(model, eqx.is_inexact_array))
rng = np.random.default_rng(0)
for length, steps in [(64, 16), (SEQ, 8)]:
    for s in range(steps):
        model, state, loss = train_step(model, state, make_batch(rng, length))
        if s % 5 == 0:
            print(f"length {length} step {s} nll {float(loss):.4f}")
