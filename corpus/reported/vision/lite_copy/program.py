import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jax import lax
from jaxtyping import Array


class Distiller(eqx.Module):
    """Small network that follows the soft outputs of a larger, already trained one."""
    big: eqx.nn.MLP
    small: eqx.nn.MLP
    temperature: float = eqx.field(static=True)

    def __call__(self, x: Array):
        soft = lax.stop_gradient(jax.vmap(self.big)(x)) / self.temperature
        return jax.vmap(self.small)(x), soft


def spirals(n, seed, k=3):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, k, n)
    r = rng.uniform(0.1, 1.0, n)
    th = 4.0 * r + 2 * np.pi * y / k + 0.15 * rng.normal(size=n)
    return jnp.asarray(np.stack([r * np.cos(th), r * np.sin(th)], 1) * 2, jnp.float32), jnp.asarray(y)


def ce(logits, y):
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def run(model, loss_fn, opt, steps, tag, n):
    state = opt.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model, state, idx):
        loss, grads = eqx.filter_value_and_grad(loss_fn)(model, idx)
        updates, state = opt.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state, loss

    rng = np.random.default_rng(5)
    for i in range(steps):
        model, state, loss = step(model, state, jnp.asarray(rng.integers(0, n, 128)))
        if i % 50 == 0:
            print(f"{tag} {i:3d} {loss:.4f}")
    return model


x, y = spirals(3000, 0)
xu, _ = spirals(3000, 1)
xv, yv = spirals(1000, 2)
k1, k2 = jr.split(jr.PRNGKey(0))
teacher = eqx.nn.MLP(2, 3, 96, 2, key=k1)
teacher = run(teacher, lambda m, i: ce(jax.vmap(m)(x[i]), y[i]), optax.adam(5e-3), 250, "teacher", 3000)
print("teacher val", float(ce(jax.vmap(teacher)(xv), yv)))


def kd(model, i):
    out, soft = model(xu[i])
    return -jnp.mean(jnp.sum(jax.nn.softmax(soft) * jax.nn.log_softmax(out / model.temperature), -1))


model = Distiller(teacher, eqx.nn.MLP(2, 3, 24, 2, key=k2), 2.0)
opt = optax.adamw(1e-2, weight_decay=0.5)
model = run(model, kd, opt, 350, "distill", 3000)
print("FINAL", float(ce(jax.vmap(model.small)(xv), yv)))
