import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


class RowGRU(eqx.Module):
    cell: eqx.nn.GRUCell
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear
    hidden: int = eqx.field(static=True)

    def __init__(self, in_size, hidden, n_classes, key):
        k1, k2 = jax.random.split(key)
        self.hidden = hidden
        self.cell = eqx.nn.GRUCell(in_size, hidden, key=k1)
        self.norm = eqx.nn.LayerNorm(hidden)
        self.head = eqx.nn.Linear(hidden, n_classes, key=k2)

    def __call__(self, rows):
        def scan_fn(h, row):
            return self.cell(row, h), None

        h0 = jnp.zeros(self.hidden)
        h, _ = jax.lax.scan(scan_fn, h0, rows)
        return self.head(self.norm(h))


def loss_fn(model, x, y):
    logits = jax.vmap(model)(x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


@eqx.filter_jit
def accuracy(model, x, y):
    return (jax.vmap(model)(x).argmax(-1) == y).mean()


def build_optimizer(args):
    sched = optax.warmup_cosine_decay_schedule(
        init_value=1e-6, peak_value=args.lr, warmup_steps=30, decay_steps=args.steps, end_value=1e-5
    )
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(sched))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=300)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--hidden", type=int, default=64)
    ap.add_argument("--lr", type=float, default=5e-3)
    args = ap.parse_args()

    data = load_digits()
    images = (data.images / 16.0).astype(np.float32)
    xtr, xte, ytr, yte = train_test_split(images, data.target, test_size=0.25, random_state=0)

    model = RowGRU(8, args.hidden, 10, jax.random.PRNGKey(3))
    optim = build_optimizer(args)
    opt_state = optim.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit
    def make_step(model, opt_state, x, y):
        loss, grads = eqx.filter_value_and_grad(loss_fn)(model, x, y)
        updates, opt_state = optim.update(grads, opt_state, model)
        model = eqx.apply_updates(model, updates)
        return model, loss

    rng = np.random.default_rng(0)
    for step in range(args.steps):
        idx = rng.integers(0, len(xtr), args.batch)
        model, loss = make_step(model, opt_state, jnp.asarray(xtr[idx]), jnp.asarray(ytr[idx]))
        if step % 30 == 0:
            print(f"step {step:4d}  loss {float(loss):.4f}")

    print("test accuracy", float(accuracy(model, jnp.asarray(xte), jnp.asarray(yte))))


if __name__ == "__main__":
    main()
