import argparse
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax


def get_args():
    ap = argparse.ArgumentParser(description="remember the first symbol of a noisy sequence")
    ap.add_argument("--steps", type=int, default=250)
    ap.add_argument("--length", type=int, default=40)
    ap.add_argument("--hidden", type=int, default=48)
    ap.add_argument("--classes", type=int, default=4)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--rec-scale", type=float, default=0.3)
    ap.add_argument("--seed", type=int, default=0)
    return ap.parse_args()


def sample(rng, n, length, classes):
    label = rng.integers(0, classes, n)
    x = rng.normal(0, 0.05, (n, length, classes)).astype(np.float32)
    x[np.arange(n), 0, label] += 1.0
    return x, label.astype(np.int32)


def init_params(key, n_in, hidden, n_out, rec_scale):
    k1, k2, k3 = jax.random.split(key, 3)
    q = jax.nn.initializers.orthogonal()(k2, (hidden, hidden))
    return dict(
        wx=jax.random.normal(k1, (n_in, hidden)) / math.sqrt(n_in),
        wh=rec_scale * q,
        bh=jnp.zeros(hidden),
        wo=jax.random.normal(k3, (hidden, n_out)) / math.sqrt(hidden),
        bo=jnp.zeros(n_out),
    )


def rnn(params, x):
    def cell(h, xt):
        h = jnp.tanh(xt @ params["wx"] + h @ params["wh"] + params["bh"])
        return h, None

    h0 = jnp.zeros((x.shape[0], params["wh"].shape[0]))
    h, _ = jax.lax.scan(cell, h0, jnp.swapaxes(x, 0, 1))
    return h @ params["wo"] + params["bo"]


def main():
    args = get_args()
    rng = np.random.default_rng(args.seed)
    params = init_params(
        jax.random.PRNGKey(args.seed), args.classes, args.hidden, args.classes, args.rec_scale
    )
    opt = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(args.lr))
    state = opt.init(params)

    def loss_fn(p, x, y):
        logits = rnn(p, x)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
        return loss, (logits.argmax(-1) == y).mean()

    @jax.jit
    def step(p, s, x, y):
        (loss, acc), g = jax.value_and_grad(loss_fn, has_aux=True)(p, x, y)
        u, s = opt.update(g, s, p)
        return optax.apply_updates(p, u), s, loss, acc

    for i in range(args.steps):
        x, y = sample(rng, args.batch, args.length, args.classes)
        params, state, loss, acc = step(params, state, x, y)
        if i % 50 == 0 or i == args.steps - 1:
            print(f"{i:5d} loss={loss:.4f} acc={acc:.3f}")

    x, y = sample(rng, 512, args.length, args.classes)
    loss, acc = loss_fn(params, x, y)
    print(f"eval loss={loss:.4f} acc={acc:.3f}")


if __name__ == "__main__":
    main()
