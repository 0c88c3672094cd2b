import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits


def binarize(z):
    hard = jnp.where(z > 0, 1.0, -1.0)
    soft = jnp.tanh(z)
    return soft + jax.lax.stop_gradient(hard - soft)


class HashAutoencoder(eqx.Module):
    encoder: eqx.nn.MLP
    decoder: eqx.nn.MLP

    def __init__(self, bits, key):
        ke, kd = jax.random.split(key)
        self.encoder = eqx.nn.MLP(64, bits, 96, 1, key=ke)
        self.decoder = eqx.nn.MLP(bits, 64, 96, 1, key=kd)

    def codes(self, x):
        return binarize(self.encoder(x))

    def __call__(self, x):
        return self.decoder(self.codes(x))


class ShadowAverage:
    def __init__(self, model, decay):
        self.model, self.decay = model, decay

    def update(self, model):
        mix = lambda a, b: self.decay * a + (1 - self.decay) * b if eqx.is_inexact_array(a) else a
        self.model = jax.tree.map(mix, self.model, model)


def loss_fn(model, shadow, x):
    recon = jax.vmap(model)(x)
    target = jax.lax.stop_gradient(jax.vmap(shadow)(x))
    rec = jnp.mean((recon - x) ** 2)
    return rec + 1e-3 * jnp.mean((recon - target) ** 2), rec


def main(bits=32, steps=350, batch=128):
    x = load_digits().data.astype(np.float32)
    x = (x - x.mean()) / x.std()
    rng = np.random.default_rng(0)
    model = HashAutoencoder(bits, jax.random.PRNGKey(0))
    shadow = ShadowAverage(model, 0.98)
    tx = optax.adam(2e-3)
    state = tx.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model, shadow, state, xb):
        (_, rec), g = eqx.filter_value_and_grad(loss_fn, has_aux=True)(model, shadow, xb)
        u, state = tx.update(g, state)
        return eqx.apply_updates(model, u), state, rec

    for i in range(steps):
        xb = x[rng.integers(0, len(x), batch)]
        model, state, rec = step(model, shadow.model, state, xb)
        shadow.update(model)
        if i % 50 == 0 or i == steps - 1:
            full = jnp.mean((jax.vmap(shadow.model)(x) - x) ** 2)
            print(f"step {i:3d} recon {float(rec):.4f} averaged model {float(full):.4f}")


if __name__ == "__main__":
    main()
