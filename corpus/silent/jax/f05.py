import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

HALF = jnp.float16


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=300)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--init-scale", type=float, default=2.0 ** 18)
    p.add_argument("--growth-every", type=int, default=60)
    return p.parse_args()


def init(key, sizes):
    out = []
    for a, b in zip(sizes[:-1], sizes[1:]):
        key, k = jax.random.split(key)
        out.append((jax.random.normal(k, (a, b)) * (2.0 / a) ** 0.5, jnp.zeros((b,))))
    return out


def to_half(tree):
    return jax.tree.map(lambda a: a.astype(HALF), tree)


def apply(params, x):
    h = x.astype(HALF)
    for w, b in params[:-1]:
        h = jax.nn.relu(h @ w + b)
    w, b = params[-1]
    return (h @ w + b).astype(jnp.float32)


def main():
    args = parse()
    d = load_digits()
    x = (d.data / 8.0 - 1.0).astype(np.float32)
    y = d.target
    master = init(jax.random.PRNGKey(0), [64, 256, 256, 10])
    tx = optax.adam(args.lr)
    opt_state = tx.init(master)
    scale = jnp.float32(args.init_scale)
    good = jnp.int32(0)

    @jax.jit
    def step(master, opt_state, scale, good, xb, yb):
        def scaled_loss(m):
            logits = apply(to_half(m), xb)
            ce = optax.softmax_cross_entropy_with_integer_labels(logits, yb).mean()
            return ce * scale, ce

        grads, ce = jax.grad(scaled_loss, has_aux=True)(master)
        grads = jax.tree.map(lambda g: g / scale, grads)
        ok = jnp.all(jnp.array([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]))
        safe = jax.tree.map(lambda g: jnp.where(ok, g, 0.0), grads)
        up, new_state = tx.update(safe, opt_state, master)
        new_master = optax.apply_updates(master, up)
        keep = lambda new, old: jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, old)
        good = jnp.where(ok, good + 1, 0)
        grow = good >= args.growth_every
        scale = jnp.where(ok, jnp.where(grow, scale * 2, scale), scale / 2)
        good = jnp.where(grow, 0, good)
        return keep(new_master, master), keep(new_state, opt_state), scale, good, ce, ok

    rng = np.random.default_rng(0)
    skipped = 0
    for i in range(args.steps):
        j = rng.integers(0, 1500, 128)
        master, opt_state, scale, good, ce, ok = step(master, opt_state, scale, good, x[j], y[j])
        skipped += int(not bool(ok))
        if i % 50 == 0 or i == args.steps - 1:
            print(f"{i:3d} loss {float(ce):.4f} scale {float(scale):.0f} skipped {skipped}")
    pred = apply(to_half(master), x[1500:]).argmax(-1)
    print("test acc", float(jnp.mean(pred == y[1500:])))


if __name__ == "__main__":
    main()
