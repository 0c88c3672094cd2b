"""Keyword spotting toy: learnable band-pass (sinc) front end followed by a small classifier."""
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

FS = 1000.0
TAPS = 33
N_FILT = 6


class SincBank(eqx.Module):
    low: jax.Array
    band: jax.Array

    def __init__(self):
        edges = np.linspace(20.0, 400.0, N_FILT + 1)
        self.low = jnp.asarray(edges[:-1], jnp.float32)
        self.band = jnp.asarray(np.diff(edges), jnp.float32)

    def kernels(self):
        t = (jnp.arange(TAPS) - TAPS // 2) / FS
        f1 = jnp.abs(self.low)
        f2 = f1 + jnp.abs(self.band)

        def lowpass(f):
            arg = jnp.pi * t
            return jnp.where(t == 0, 2 * f, jnp.sin(2 * f * arg) / arg)

        bank = jax.vmap(lambda a, b: lowpass(b) - lowpass(a))(f1, f2)
        return bank * jnp.hamming(TAPS) / FS

    def __call__(self, wave):
        return jax.vmap(lambda k: jnp.convolve(wave, k, mode="valid"))(self.kernels())


class Spotter(eqx.Module):
    bank: SincBank
    head: eqx.nn.MLP

    def __init__(self, key):
        self.bank = SincBank()
        self.head = eqx.nn.MLP(N_FILT, 4, 24, 1, key=key)

    def __call__(self, wave):
        power = jnp.mean(self.bank(wave) ** 2, axis=-1)
        return self.head(jnp.log(power + 1e-5))


def clips(n, seed):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 4, n)
    f = np.array([60.0, 140.0, 230.0, 330.0])[y] + rng.uniform(-20, 20, n)
    t = np.arange(200) / FS
    x = np.sin(2 * np.pi * f[:, None] * t + rng.uniform(0, 6, (n, 1))) + 0.5 * rng.standard_normal((n, 200))
    return x.astype(np.float32), y


@eqx.filter_jit
def make_step(model, state, x, y):
    @eqx.filter_value_and_grad(has_aux=True)
    def objective(m):
        logits = jax.vmap(m)(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), logits

    (loss, logits), grads = objective(model)
    updates, state = optim.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
    return eqx.apply_updates(model, updates), state, loss, jnp.mean(logits.argmax(-1) == y)


x, y = clips(512, 0)
model = Spotter(jax.random.PRNGKey(0))
optim = optax.adam(1e-2)
state = optim.init(eqx.filter(model, eqx.is_inexact_array))
for it in range(60):
    s = (it * 32) % 512
    model, state, loss, acc = make_step(model, state, x[s:s + 32], y[s:s + 32])
    if it % 5 == 0:
        print(f"it {it} loss {float(loss):.4f} acc {float(acc):.2f} cutoffs {np.asarray(model.bank.low).round(1)}")
