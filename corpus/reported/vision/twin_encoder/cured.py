import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax


class SequenceEncoder(eqx.Module):
    cell: eqx.nn.GRUCell
    proj: eqx.nn.Linear

    def __init__(self, key):
        a, b = jr.split(key)
        self.cell = eqx.nn.GRUCell(2, 24, key=a)
        self.proj = eqx.nn.Linear(24, 8, key=b)

    def __call__(self, xs):
        def f(h, x):
            return self.cell(x, h), None
        h, _ = jax.lax.scan(f, jnp.zeros(24), xs)
        return self.proj(h)


def pair_loss(model, left, right, same, margin=1.0):
    za, zb = jax.vmap(model)(left), jax.vmap(model)(right)
    sq = jnp.sum((za - zb) ** 2, -1)
    dist = jnp.where(sq > 0, jnp.sqrt(jnp.where(sq > 0, sq, 1.0)), 0.0)
    pull = dist ** 2
    push = jnp.maximum(margin - dist, 0.0) ** 2
    return jnp.mean(jnp.where(same, pull, push))


def gestures(n, rng):
    y = rng.integers(0, 5, n)
    t = np.linspace(0, 1, 16)[None]
    w = (1 + y[:, None]) * 2.0
    ph = rng.uniform(-0.5, 0.5, (n, 1))
    xs = np.stack([np.cos(w * t + ph), np.sin(w * t + ph)], -1) + 0.15 * rng.normal(size=(n, 16, 2))
    return xs.astype(np.float32), y


def draw_pairs(xs, y, rng, size=64):
    i = rng.integers(0, len(y), size)
    j = rng.integers(0, len(y), size)
    for k in range(0, size, 2):
        j[k] = rng.choice(np.flatnonzero(y == y[i[k]]))
    return jnp.asarray(xs[i]), jnp.asarray(xs[j]), jnp.asarray(y[i] == y[j])


@eqx.filter_jit
def make_step(model, opt_state, left, right, same):
    loss, grads = eqx.filter_value_and_grad(pair_loss)(model, left, right, same)
    updates, opt_state = optim.update(grads, opt_state, model)
    return eqx.apply_updates(model, updates), opt_state, loss


rng = np.random.default_rng(0)
xs, ys = gestures(1000, rng)
xv, yv = gestures(400, rng)
model = SequenceEncoder(jr.PRNGKey(0))
optim = optax.adamw(3e-3)
opt_state = optim.init(eqx.filter(model, eqx.is_array))
for step in range(300):
    model, opt_state, loss = make_step(model, opt_state, *draw_pairs(xs, ys, rng))
    if step % 30 == 0:
        print(f"step={step} loss={loss:.4f}")

vl, vr, vs = draw_pairs(xv, yv, np.random.default_rng(11), 800)
za, zb = jax.vmap(model)(vl), jax.vmap(model)(vr)
d = jnp.sqrt(jnp.sum((za - zb) ** 2, -1))
print("pair error", float(jnp.mean((d < 0.5) != vs)))
print("FINAL", float(jnp.mean(jnp.where(vs, d ** 2, jnp.maximum(1.0 - d, 0.0) ** 2))))
