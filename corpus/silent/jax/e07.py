import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--hidden", type=int, default=64)
    p.add_argument("--length", type=int, default=35)
    p.add_argument("--symbols", type=int, default=6)
    p.add_argument("--steps", type=int, default=400)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--batch", type=int, default=64)
    return p.parse_args()


def make_params(key, n_in, n_h, n_out):
    k1, k2, k3 = jax.random.split(key, 3)
    return {
        "w_in": jax.random.normal(k1, (n_in, n_h)) / np.sqrt(n_in),
        "w_rec": 0.05 * jax.random.normal(k2, (n_h, n_h)),
        "b": jnp.zeros(n_h),
        "w_out": jax.random.normal(k3, (n_h, n_out)) / np.sqrt(n_h),
        "b_out": jnp.zeros(n_out),
    }


def rnn(params, seq):
    def cell(h, x):
        h = jnp.tanh(x @ params["w_in"] + h @ params["w_rec"] + params["b"])
        return h, None

    h0 = jnp.zeros((seq.shape[0], params["b"].shape[0]))
    h, _ = jax.lax.scan(cell, h0, jnp.swapaxes(seq, 0, 1))
    return h @ params["w_out"] + params["b_out"]


def make_batch(rng, batch, length, symbols):
    cue = rng.integers(0, symbols, batch)
    seq = 0.02 * rng.standard_normal((batch, length, symbols))
    seq[np.arange(batch), 0, cue] += 1.0
    return seq.astype(np.float32), cue


def loss_fn(params, seq, cue):
    logits = rnn(params, seq)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, cue).mean()
    return loss, (logits.argmax(-1) == cue).mean()


def main():
    args = parse_args()
    rng = np.random.default_rng(11)
    params = make_params(jax.random.PRNGKey(5), args.symbols, args.hidden, args.symbols)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(args.lr))
    opt_state = tx.init(params)

    @jax.jit
    def update(params, opt_state, seq, cue):
        (loss, acc), g = jax.value_and_grad(loss_fn, has_aux=True)(params, seq, cue)
        u, opt_state = tx.update(g, opt_state, params)
        return optax.apply_updates(params, u), opt_state, loss, acc

    for step in range(args.steps):
        seq, cue = make_batch(rng, args.batch, args.length, args.symbols)
        params, opt_state, loss, acc = update(params, opt_state, seq, cue)
        if step % 50 == 0 or step == args.steps - 1:
            print(f"{step:4d} loss {float(loss):.4f} acc {float(acc):.3f}")


if __name__ == "__main__":
    main()
