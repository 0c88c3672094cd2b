import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier


class Projector(nnx.Module):
    def __init__(self, rngs):
        self.trunk = nnx.Sequential(
            nnx.Linear(64, 128, rngs=rngs), nnx.relu,
            nnx.Linear(128, 128, rngs=rngs), nnx.relu)
        self.project = nnx.Linear(128, 32, rngs=rngs)

    def __call__(self, x):
        z = self.project(self.trunk(x))
        return z / jnp.linalg.norm(z, axis=-1, keepdims=True)


def info_nce(model, a, b, temperature=0.2):
    za, zb = model(a), model(b)
    sim = za @ zb.T / temperature
    labels = jnp.arange(sim.shape[0])
    ce = optax.softmax_cross_entropy_with_integer_labels
    return 0.5 * (ce(sim, labels).mean() + ce(sim.T, labels).mean())


def triangular(low, high, half_period):
    def schedule(count):
        phase = jnp.mod(count, 2 * half_period) / half_period
        return low + (high - low) * (1.0 - jnp.abs(phase - 1.0))
    return schedule


def augment(images, rng):
    out = np.empty_like(images)
    for k, (dr, dc) in enumerate(rng.integers(-1, 2, (len(images), 2))):
        out[k] = np.roll(images[k], (dr, dc), axis=(0, 1))
    out = out * (rng.random(out.shape) > 0.1) + 0.2 * rng.standard_normal(out.shape)
    return out.reshape(len(out), -1).astype(np.float32)


@nnx.jit
def train_step(model, optimizer, a, b):
    loss, grads = nnx.value_and_grad(info_nce)(model, a, b)
    optimizer.update(model, grads)
    return loss


def probe(model, flat, y, n):
    h = np.asarray(model.trunk(flat))
    return KNeighborsClassifier(5).fit(h[:n], y[:n]).score(h[n:], y[n:])


def main(steps=300, batch=128):
    x, y = load_digits(return_X_y=True)
    images = ((x - x.mean()) / x.std()).reshape(-1, 8, 8).astype(np.float32)
    flat = images.reshape(-1, 64)
    rng = np.random.default_rng(0)
    model = Projector(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(triangular(1e-5, 3e-3, 40)), wrt=nnx.Param)
    for i in range(steps):
        sel = rng.integers(0, len(images), batch)
        loss = train_step(model, optimizer, augment(images[sel], rng), augment(images[sel], rng))
        if i % 30 == 0 or i == steps - 1:
            print(f"step {i:3d} loss {float(loss):.4f} chance {np.log(batch):.4f}")
    print("neighbour accuracy", probe(model, flat, y, 1200))


if __name__ == "__main__":
    main()
