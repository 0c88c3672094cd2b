from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


@dataclass
class MoEConfig:
    dim: int = 8
    experts: int = 6
    hidden: int = 4
    aux_weight: float = 1.0
    lr: float = 1e-2
    steps: int = 400
    batch: int = 256


class Expert(nnx.Module):
    def __init__(self, dim, hidden, rngs):
        self.fc1 = nnx.Linear(dim, hidden, rngs=rngs)
        self.fc2 = nnx.Linear(hidden, 1, rngs=rngs)

    def __call__(self, x):
        return self.fc2(jnp.tanh(self.fc1(x)))


class MoE(nnx.Module):
    def __init__(self, cfg, rngs):
        self.router = nnx.Linear(cfg.dim, cfg.experts, rngs=rngs)
        self.experts = nnx.List([Expert(cfg.dim, cfg.hidden, rngs) for _ in range(cfg.experts)])

    def __call__(self, x):
        probs = jax.nn.softmax(self.router(x))
        outs = jnp.concatenate([e(x) for e in self.experts], axis=-1)
        top, chosen = jax.lax.top_k(probs, 2)
        gate = top / top.sum(-1, keepdims=True)
        y = jnp.sum(gate * jnp.take_along_axis(outs, chosen, axis=-1), axis=-1)
        return y, probs


def usage_entropy(probs):
    mean = probs.mean(axis=0)
    return -jnp.sum(mean * jnp.log(mean + 1e-9))


def loss_fn(model, x, y, aux_weight):
    pred, probs = model(x)
    mse = jnp.mean((pred - y) ** 2)
    balance = usage_entropy(probs)
    return mse + aux_weight * balance, (mse, balance)


@nnx.jit
def train_step(model, optimizer, x, y, aux_weight):
    (_, aux), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, x, y, aux_weight)
    optimizer.update(model, grads)
    return aux


def make_data(rng, cfg, n, n_clusters=6):
    centers = 2.0 * rng.standard_normal((n_clusters, cfg.dim))
    slopes = rng.standard_normal((n_clusters, cfg.dim))
    c = rng.integers(0, n_clusters, n)
    noise = rng.standard_normal((n, cfg.dim))
    y = np.tanh((noise * slopes[c]).sum(1)) * np.where(c % 2 == 0, 1.5, -1.5)
    return (centers[c] + noise).astype(np.float32), y.astype(np.float32)


def main():
    cfg = MoEConfig()
    rng = np.random.default_rng(0)
    x, y = make_data(rng, cfg, 6000)
    model = MoE(cfg, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(cfg.lr), wrt=nnx.Param)
    for step in range(cfg.steps):
        sel = rng.integers(0, 5000, cfg.batch)
        mse, balance = train_step(model, optimizer, x[sel], y[sel], cfg.aux_weight)
        if step % 40 == 0:
            print(f"step {step:3d}  mse {float(mse):.4f}  usage entropy {float(balance):.3f}")
    pred, probs = model(x[5000:])
    print("test mse", float(jnp.mean((pred - y[5000:]) ** 2)), "variance", float(y[5000:].var()))
    print("load", np.round(np.asarray(probs.mean(0)), 3))


if __name__ == "__main__":
    main()
