import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

SLOTS, CODES, DIM = 8, 32, 8


class Quantizer(eqx.Module):
    codebook: jax.Array

    def __init__(self, key):
        self.codebook = jax.random.normal(key, (CODES, DIM))

    def __call__(self, z):
        dist = jnp.sum((z[:, None, :] - self.codebook[None]) ** 2, axis=-1)
        idx = jnp.argmin(dist, axis=-1)
        picked = self.codebook[idx]
        codebook_loss = jnp.mean((jax.lax.stop_gradient(z) - picked) ** 2)
        commit_loss = jnp.mean((z - jax.lax.stop_gradient(picked)) ** 2)
        return jax.lax.stop_gradient(picked), idx, codebook_loss + 0.25 * commit_loss


class VQAutoencoder(eqx.Module):
    enc: eqx.nn.MLP
    dec: eqx.nn.MLP
    vq: Quantizer

    def __init__(self, key):
        k1, k2, k3 = jax.random.split(key, 3)
        self.enc = eqx.nn.MLP(64, SLOTS * DIM, 128, 2, key=k1)
        self.dec = eqx.nn.MLP(SLOTS * DIM, 64, 128, 2, key=k2)
        self.vq = Quantizer(k3)

    def __call__(self, x):
        z = self.enc(x).reshape(SLOTS, DIM)
        q, idx, aux = self.vq(z)
        return self.dec(q.reshape(-1)), idx, aux


def objective(model, x):
    recon, idx, aux = jax.vmap(model)(x)
    rec = jnp.mean((recon - x) ** 2)
    return rec + aux.mean(), (rec, idx)


def train(steps=400, batch=128, lr=2e-3):
    x = load_digits().data.astype(np.float32)
    x = (x - x.mean()) / x.std()
    rng = np.random.default_rng(0)
    model = VQAutoencoder(jax.random.PRNGKey(0))
    tx = optax.adam(lr)
    state = tx.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model, state, xb):
        (loss, aux), grads = eqx.filter_value_and_grad(objective, has_aux=True)(model, xb)
        updates, state = tx.update(grads, state)
        return eqx.apply_updates(model, updates), state, loss, aux

    for i in range(steps):
        xb = x[rng.integers(0, len(x), batch)]
        model, state, loss, (rec, idx) = step(model, state, xb)
        if i % 50 == 0 or i == steps - 1:
            used = len(np.unique(np.asarray(idx)))
            print(f"step {i:3d} total {float(loss):.4f} recon {float(rec):.4f} codes in use {used}")


train()
