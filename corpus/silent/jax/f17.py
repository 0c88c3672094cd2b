"""Mean-teacher training: 200 labelled digits, the rest unlabelled."""
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.relu(nn.LayerNorm()(nn.Dense(128)(x)))
        h = nn.relu(nn.LayerNorm()(nn.Dense(128)(h)))
        return nn.Dense(10)(h)


net = Net()


def perturb(rng, x):
    img = x.reshape(-1, 8, 8)
    sh = rng.integers(-1, 2, (len(img), 2))
    sh[rng.random(len(img)) < 0.7] = 0
    img = np.stack([np.roll(a, s, axis=(0, 1)) for a, s in zip(img, sh)])
    return (img + 0.15 * rng.normal(size=img.shape)).reshape(-1, 64).astype(np.float32)


def objective(student, teacher, xl, yl, v1, v2, weight):
    target = jax.nn.softmax(jax.lax.stop_gradient(net.apply(teacher, v1)))
    guess = jax.nn.softmax(net.apply(student, v2))
    consistency = jnp.mean(jnp.sum((guess - target) ** 2, -1))
    ce = optax.softmax_cross_entropy_with_integer_labels(net.apply(student, xl), yl).mean()
    return ce + weight * consistency, (ce, consistency)


def accuracy(params, x, y):
    return float(jnp.mean(net.apply(params, x).argmax(-1) == y))


def main(steps=400, ramp=120):
    d = load_digits()
    x = ((d.data - 4.9) / 6.0).astype(np.float32)
    mix = np.random.default_rng(1).permutation(len(x))
    x, y = x[mix], d.target[mix]
    xl, yl = x[:200], y[:200]
    student = net.init(jax.random.PRNGKey(0), x[:1])
    teacher = jax.tree.map(jnp.copy, student)
    tx = optax.adam(1e-3)
    state = tx.init(student)

    @jax.jit
    def step(student, teacher, state, xl, yl, v1, v2, weight):
        (_, parts), g = jax.value_and_grad(objective, has_aux=True)(
            student, teacher, xl, yl, v1, v2, weight)
        up, state = tx.update(g, state)
        student = optax.apply_updates(student, up)
        teacher = optax.incremental_update(student, teacher, 0.03)
        return student, teacher, state, parts

    rng = np.random.default_rng(0)
    for i in range(steps):
        j = rng.integers(0, 200, 32)
        xu = x[rng.integers(0, 1500, 96)]
        weight = 4.0 * np.exp(-5.0 * (1.0 - min(i / ramp, 1.0)) ** 2)
        student, teacher, state, (ce, cons) = step(
            student, teacher, state, perturb(rng, xl[j]), yl[j], perturb(rng, xu), perturb(rng, xu), weight)
        if i % 50 == 0 or i == steps - 1:
            print(f"{i:3d} ce {float(ce):.4f} consistency {float(cons):.4f} "
                  f"student {accuracy(student, x[1500:], y[1500:]):.3f} teacher {accuracy(teacher, x[1500:], y[1500:]):.3f}")


if __name__ == "__main__":
    main()
