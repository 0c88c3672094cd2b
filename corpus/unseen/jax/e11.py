"""Discrete bottleneck autoencoder for 8x8 digits, Gumbel-softmax codes, flax nnx."""
import numpy as np
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from sklearn.datasets import load_digits

GROUPS, CODES = 6, 8
TOTAL, ANNEAL = 60, 45


class Encoder(nnx.Module):
    def __init__(self, rngs):
        self.a = nnx.Linear(64, 64, rngs=rngs)
        self.b = nnx.Linear(64, GROUPS * CODES, rngs=rngs)

    def __call__(self, x):
        return self.b(nnx.gelu(self.a(x))).reshape(-1, GROUPS, CODES)


class Decoder(nnx.Module):
    def __init__(self, rngs):
        self.a = nnx.Linear(GROUPS * CODES, 64, rngs=rngs)
        self.b = nnx.Linear(64, 64, rngs=rngs)

    def __call__(self, z):
        return self.b(nnx.gelu(self.a(z.reshape(z.shape[0], -1))))


class DiscreteAE(nnx.Module):
    def __init__(self, rngs):
        self.enc = Encoder(rngs)
        self.dec = Decoder(rngs)

    def __call__(self, x, tau, noise):
        logits = self.enc(x)
        z = gumbel_softmax(logits, noise, tau)
        return self.dec(z), logits

    def hard(self, x):
        z = jax.nn.one_hot(self.enc(x).argmax(-1), CODES)
        return self.dec(z)


def gumbel_softmax(logits, noise, tau):
    y = (logits + noise) / tau
    return jax.nn.softmax(y, axis=-1)


temperature = optax.join_schedules(
    [optax.constant_schedule(2.0), optax.linear_schedule(2.0, 0.0, ANNEAL - 5)], boundaries=[5])


def elbo_like(model, x, tau, noise, beta=0.002):
    recon, logits = model(x, tau, noise)
    rec = optax.sigmoid_binary_cross_entropy(recon, x).sum(-1).mean()
    q = jax.nn.softmax(logits)
    kl = (q * (jax.nn.log_softmax(logits) + jnp.log(CODES))).sum((-1, -2)).mean()
    return rec + beta * kl, (rec, kl)


@nnx.jit
def train_step(model, optimizer, x, tau, noise):
    (loss, parts), grads = nnx.value_and_grad(elbo_like, has_aux=True)(model, x, tau, noise)
    optimizer.update(model, grads)
    return loss, parts


@nnx.jit
def hard_eval(model, x):
    return optax.sigmoid_binary_cross_entropy(model.hard(x), x).sum(-1).mean()


def main():
    x = (load_digits().data / 16.0).astype(np.float32)
    train, test = x[:1500], x[1500:]
    model = DiscreteAE(nnx.Rngs(0))
    optimizer = nnx.Optimizer(
        model, optax.chain(optax.clip_by_global_norm(5.0), optax.adam(4e-3)), wrt=nnx.Param)
    rng = np.random.default_rng(0)
    best = np.inf
    for step in range(TOTAL):
        batch = train[rng.choice(len(train), 96, replace=False)]
        noise = rng.gumbel(size=(len(batch), GROUPS, CODES)).astype(np.float32)
        tau = temperature(step)
        loss, (rec, kl) = train_step(model, optimizer, batch, tau, noise)
        if step % 5 == 0:
            val = float(hard_eval(model, test))
            best = min(best, val)
            print(f"{step:3d} tau {float(tau):.2f} loss {float(loss):.3f} rec {float(rec):.3f} "
                  f"kl {float(kl):.3f} hard val {val:.3f}")
        if not jnp.isfinite(loss):
            raise RuntimeError(f"loss {loss} in step {step} (best hard val so far {best:.3f})")


main()
