import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

STEPS = 400
BATCH = 128
N_LABELLED = 250
EMA = 0.97
NOISE = 0.15


class Student(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(128)(x))
        x = nn.relu(nn.Dense(64)(x))
        return nn.Dense(10)(x)


model = Student()
tx = optax.adam(1e-3)


def consistency_weight(step, ramp=150.0):
    phase = 1.0 - jnp.minimum(step / ramp, 1.0)
    return 2.0 * jnp.exp(-5.0 * phase ** 2)


def total_loss(params, teacher, x, y, labelled, key, step):
    k1, k2 = jax.random.split(key)
    out = model.apply(params, x + NOISE * jax.random.normal(k1, x.shape))
    target = model.apply(teacher, x + NOISE * jax.random.normal(k2, x.shape))
    target = jax.lax.stop_gradient(jax.nn.softmax(target))
    ce = optax.softmax_cross_entropy_with_integer_labels(out, jnp.where(labelled, y, 0))
    supervised = jnp.sum(ce * labelled) / jnp.maximum(labelled.sum(), 1)
    consistency = jnp.mean(jnp.sum((jax.nn.softmax(out) - target) ** 2, -1))
    return supervised + consistency_weight(step) * consistency, (supervised, consistency)


@jax.jit
def update(params, teacher, opt_state, x, y, labelled, key, step):
    (loss, parts), grads = jax.value_and_grad(total_loss, has_aux=True)(
        params, teacher, x, y, labelled, key, step)
    updates, opt_state = tx.update(grads, opt_state)
    params = optax.apply_updates(params, updates)
    teacher = optax.incremental_update(params, teacher, 1.0 - EMA)
    return params, teacher, opt_state, loss, parts


def main():
    x, y = load_digits(return_X_y=True)
    x = (x / 16.0).astype(np.float32)
    rng = np.random.default_rng(3)
    order = rng.permutation(len(x))
    tr, te = order[:1400], order[1400:]
    has_label = np.zeros(len(x), bool)
    has_label[tr[:N_LABELLED]] = True

    key = jax.random.PRNGKey(0)
    params = model.init(key, x[:1])
    teacher = params
    opt_state = tx.init(params)
    for step in range(STEPS):
        key, sub = jax.random.split(key)
        b = rng.choice(tr, BATCH, replace=False)
        params, teacher, opt_state, loss, (sup, con) = update(
            params, teacher, opt_state, x[b], y[b], has_label[b], sub, step)
        if step % 50 == 0:
            print(f"step {step:3d} total {float(loss):.4f} sup {float(sup):.4f} cons {float(con):.5f}")
    for name, p in (("student", params), ("teacher", teacher)):
        acc = (model.apply(p, x[te]).argmax(-1) == y[te]).mean()
        print(name, "test accuracy", float(acc))


main()
