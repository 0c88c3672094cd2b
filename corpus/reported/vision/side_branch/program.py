import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax


def zero_module(layer):
    return jax.tree_util.tree_map(lambda l: jnp.zeros_like(l) if eqx.is_array(l) else l, layer)


class Base(eqx.Module):
    enc: eqx.nn.Conv1d
    mid: eqx.nn.Conv1d
    dec: eqx.nn.Conv1d

    def __init__(self, key):
        a, b, c = jr.split(key, 3)
        self.enc = eqx.nn.Conv1d(1, 16, 5, padding=2, key=a)
        self.mid = eqx.nn.Conv1d(16, 16, 5, padding=2, key=b)
        self.dec = eqx.nn.Conv1d(16, 1, 5, padding=2, key=c)

    def __call__(self, x, extra=0.0):
        h = jax.nn.gelu(self.enc(x))
        h = jax.nn.gelu(self.mid(h)) + extra
        return x + self.dec(h)


class Control(eqx.Module):
    """Trainable copy of the encoder that reads a condition signal; its last layer starts at zero."""
    hint: eqx.nn.Conv1d
    enc: eqx.nn.Conv1d
    mid: eqx.nn.Conv1d
    out: eqx.nn.Conv1d

    def __init__(self, base, key):
        a, b = jr.split(key)
        self.hint = eqx.nn.Conv1d(1, 16, 5, padding=2, key=a)
        self.enc, self.mid = base.enc, base.mid
        self.out = zero_module(eqx.nn.Conv1d(16, 16, 1, key=b))

    def __call__(self, x, c):
        h = jax.nn.gelu(self.enc(x) + self.hint(c))
        return self.out(jax.nn.gelu(self.mid(h)))


def series(n, seed):
    rng = np.random.default_rng(seed)
    t = np.linspace(0, 1, 32)[None]
    clean = np.sin(2 * np.pi * rng.uniform(1, 3, (n, 1)) * t + rng.uniform(0, 6, (n, 1)))
    pos = rng.integers(4, 28, (n, 1))
    cond = (np.abs(np.arange(32)[None] - pos) < 3).astype(float)
    noisy = clean + 0.5 * rng.normal(size=clean.shape)
    f = lambda a: jnp.asarray(a[:, None], jnp.float32)
    return f(noisy), f(clean), f(cond), f(clean * (1 - cond) + 1.5 * cond)


noisy, clean, cond, edited = series(2000, 0)
vn, vc, vcond, ve = series(500, 1)
rng = np.random.default_rng(2)


def fit(model, loss_fn, lr, steps, tag):
    opt = optax.adam(lr)
    state = opt.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit
    def step(model, state, i):
        loss, g = eqx.filter_value_and_grad(loss_fn)(model, i)
        up, state = opt.update(g, state)
        return eqx.apply_updates(model, up), state, loss

    for s in range(steps):
        model, state, loss = step(model, state, jnp.asarray(rng.integers(0, 2000, 32)))
        if s % 40 == 0:
            print(f"{tag} {s} {loss:.4f}")
    return model


base = fit(Base(jr.PRNGKey(0)), lambda m, i: jnp.mean((jax.vmap(m)(noisy[i]) - clean[i]) ** 2), 3e-3, 150, "base")


def control_loss(control, i):
    extra = jax.vmap(control)(noisy[i], cond[i])
    return jnp.mean((jax.vmap(base)(noisy[i], extra) - edited[i]) ** 2)


control = fit(Control(base, jr.PRNGKey(1)), control_loss, 2e-3, 240, "control")
pred = jax.vmap(base)(vn, jax.vmap(control)(vn, vcond))
print("without branch", float(jnp.mean((jax.vmap(base)(vn) - ve) ** 2)))
print("FINAL", float(jnp.mean((pred - ve) ** 2)))
