import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits


class Generator(nnx.Module):
    def __init__(self, z_dim, hidden, out, rngs):
        self.l1 = nnx.Linear(z_dim, hidden, rngs=rngs)
        self.l2 = nnx.Linear(hidden, hidden, rngs=rngs)
        self.l3 = nnx.Linear(hidden, out, rngs=rngs)

    def __call__(self, z):
        h = nnx.relu(self.l1(z))
        h = nnx.relu(self.l2(h))
        return jnp.tanh(self.l3(h))


class Discriminator(nnx.Module):
    def __init__(self, inp, hidden, rngs):
        self.l1 = nnx.Linear(inp, hidden, rngs=rngs)
        self.l2 = nnx.Linear(hidden, 1, rngs=rngs)

    def __call__(self, x):
        h = nnx.leaky_relu(self.l1(x), 0.2)
        return self.l2(h)[:, 0]


def bce(logits, target):
    return optax.sigmoid_binary_cross_entropy(logits, jnp.full_like(logits, target)).mean()


def adversarial_losses(gen, disc, real, z):
    fake = jax.lax.stop_gradient(gen(z))
    d_loss = 0.5 * (bce(disc(real), 0.9) + bce(disc(fake), 0.0))
    g_loss = bce(disc(fake), 1.0)
    return d_loss, g_loss


@nnx.jit
def train_step(gen, disc, g_opt, d_opt, real, z):
    d_loss, d_grads = nnx.value_and_grad(
        lambda d: adversarial_losses(gen, d, real, z)[0])(disc)
    d_opt.update(disc, d_grads)
    g_loss, g_grads = nnx.value_and_grad(
        lambda g: adversarial_losses(g, disc, real, z)[1])(gen)
    g_opt.update(gen, g_grads)
    return d_loss, g_loss


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=400)
    p.add_argument("--batch-size", type=int, default=64)
    p.add_argument("--z-dim", type=int, default=16)
    p.add_argument("--lr", type=float, default=1e-3)
    args = p.parse_args()

    x, y = load_digits(return_X_y=True)
    x = (x[y == 0] / 8.0 - 1.0).astype(np.float32)
    rngs = nnx.Rngs(0)
    gen = Generator(args.z_dim, 128, 64, rngs)
    disc = Discriminator(64, 64, rngs)
    g_opt = nnx.Optimizer(gen, optax.adam(args.lr, b1=0.5), wrt=nnx.Param)
    d_opt = nnx.Optimizer(disc, optax.adam(args.lr, b1=0.5), wrt=nnx.Param)

    rng = np.random.default_rng(0)
    for step in range(args.steps):
        real = x[rng.integers(0, len(x), args.batch_size)]
        z = rng.standard_normal((args.batch_size, args.z_dim)).astype(np.float32)
        d_loss, g_loss = train_step(gen, disc, g_opt, d_opt, real, z)
        if step % 50 == 0 or step == args.steps - 1:
            print(f"step {step:3d}  d {float(d_loss):.4f}  g {float(g_loss):.4f}")

    samples = np.asarray(gen(rng.standard_normal((500, args.z_dim)).astype(np.float32)))
    print("distance of mean image:", float(np.linalg.norm(samples.mean(0) - x.mean(0))))


if __name__ == "__main__":
    main()
