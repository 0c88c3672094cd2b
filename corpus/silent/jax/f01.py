"""Vector-quantised autoencoder on the 8x8 digits (equinox)."""
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits


class Quantizer(eqx.Module):
    codebook: jax.Array
    beta: float = eqx.field(static=True)

    def __init__(self, n_codes, dim, key, beta=0.25):
        self.codebook = 0.3 * jax.random.normal(key, (n_codes, dim))
        self.beta = beta

    def __call__(self, z):
        d = jnp.sum((z[:, None, :] - self.codebook[None]) ** 2, axis=-1)
        idx = jnp.argmin(d, axis=-1)
        q = self.codebook[idx]
        sg = jax.lax.stop_gradient
        commit = self.beta * jnp.mean((z - sg(q)) ** 2)
        book = jnp.mean((sg(z) - q) ** 2)
        return z + sg(q - z), commit + book, idx


class VQAE(eqx.Module):
    enc: eqx.nn.MLP
    dec: eqx.nn.MLP
    vq: Quantizer
    slots: int = eqx.field(static=True)

    def __init__(self, key, slots=8, dim=4, n_codes=32):
        k1, k2, k3 = jax.random.split(key, 3)
        self.enc = eqx.nn.MLP(64, slots * dim, 128, 2, activation=jax.nn.gelu, key=k1)
        self.dec = eqx.nn.MLP(slots * dim, 64, 128, 2, activation=jax.nn.gelu, key=k2)
        self.vq = Quantizer(n_codes, dim, k3)
        self.slots = slots

    def __call__(self, x):
        z = self.enc(x).reshape(self.slots, -1)
        q, aux, idx = self.vq(z)
        return self.dec(q.reshape(-1)), aux, idx


def loss_fn(model, xb):
    rec, aux, idx = jax.vmap(model)(xb)
    mse = jnp.mean((rec - xb) ** 2)
    return mse + jnp.mean(aux), (mse, idx)


def main():
    x = load_digits().data.astype(np.float32) / 16.0
    mean = x.mean(0)
    rng = np.random.default_rng(0)
    model = VQAE(jax.random.PRNGKey(0))
    tx = optax.adam(2e-3)
    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model, opt_state, xb):
        (loss, (mse, idx)), grads = eqx.filter_value_and_grad(loss_fn, has_aux=True)(model, xb)
        updates, opt_state = tx.update(grads, opt_state)
        return eqx.apply_updates(model, updates), opt_state, loss, mse, idx

    base = float(np.mean((x - mean) ** 2))
    for it in range(400):
        xb = jnp.asarray(x[rng.integers(0, len(x), 128)])
        model, opt_state, loss, mse, idx = step(model, opt_state, xb)
        if it % 50 == 0 or it == 399:
            used = len(np.unique(np.asarray(idx)))
            print(f"{it:4d} loss {float(loss):.4f} mse {float(mse):.4f} (mean predictor {base:.4f}) codes used {used}")


if __name__ == "__main__":
    main()
