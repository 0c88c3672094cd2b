import jax
import jax.numpy as jnp
import numpy as np
import optax

N_SYMBOLS, SEQ_LEN, HIDDEN = 6, 40, 48


def make_params(key):
    k_in, k_rec, k_out = jax.random.split(key, 3)
    return {
        "w_in": jax.random.normal(k_in, (N_SYMBOLS + 1, HIDDEN)) / np.sqrt(N_SYMBOLS + 1),
        "w_rec": jax.random.normal(k_rec, (HIDDEN, HIDDEN)) / HIDDEN,
        "b_h": jnp.zeros(HIDDEN),
        "w_out": jax.random.normal(k_out, (HIDDEN, N_SYMBOLS)) / np.sqrt(HIDDEN),
        "b_out": jnp.zeros(N_SYMBOLS),
    }


def rnn(params, seq):
    def cell(h, x):
        h = jnp.tanh(x @ params["w_in"] + h @ params["w_rec"] + params["b_h"])
        return h, None

    h0 = jnp.zeros((seq.shape[0], HIDDEN))
    h, _ = jax.lax.scan(cell, h0, jnp.swapaxes(seq, 0, 1))
    return h @ params["w_out"] + params["b_out"]


def recall_batch(rng, n):
    symbol = rng.integers(0, N_SYMBOLS, n)
    seq = np.zeros((n, SEQ_LEN, N_SYMBOLS + 1), np.float32)
    seq[np.arange(n), 0, symbol] = 2.0
    seq[:, 1:, -1] = 0.1 * rng.standard_normal((n, SEQ_LEN - 1))
    return seq, symbol


def objective(params, seq, symbol):
    logits = rnn(params, seq)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, symbol).mean()
    return loss, (logits.argmax(-1) == symbol).mean()


def run(steps=400, batch=64, lr=1e-3, seed=0):
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(lr))
    params = make_params(jax.random.PRNGKey(seed))
    state = tx.init(params)

    @jax.jit
    def step(params, state, seq, symbol):
        (loss, acc), grads = jax.value_and_grad(objective, has_aux=True)(params, seq, symbol)
        updates, state = tx.update(grads, state)
        return optax.apply_updates(params, updates), state, loss, acc

    rng = np.random.default_rng(seed)
    accs = []
    for i in range(steps):
        params, state, loss, acc = step(params, state, *recall_batch(rng, batch))
        accs.append(float(acc))
        if i % 50 == 0:
            print(f"{i:4d}: loss {float(loss):.4f}, acc {float(acc):.3f}")
    print("accuracy over the last 50 steps:", np.mean(accs[-50:]))


if __name__ == "__main__":
    run()
