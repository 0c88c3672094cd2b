"""Remember the first symbol of a sequence until the end: Elman network with lax.scan over time."""
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

N_SYM, N_HID, T, BATCH, STEPS = 6, 64, 40, 64, 300


class Params(NamedTuple):
    w_in: jax.Array
    w_rec: jax.Array
    b: jax.Array
    w_out: jax.Array
    b_out: jax.Array


def initialise(key):
    k1, k2, k3 = jax.random.split(key, 3)
    normal = jax.nn.initializers.normal(0.02)
    return Params(
        w_in=jax.random.normal(k1, (N_SYM, N_HID)) * 0.5,
        w_rec=normal(k2, (N_HID, N_HID)),
        b=jnp.zeros(N_HID),
        w_out=jax.random.normal(k3, (N_HID, N_SYM)) / N_HID ** 0.5,
        b_out=jnp.zeros(N_SYM),
    )


def run(params, seq):
    def cell(h, x):
        return jnp.tanh(x @ params.w_in + h @ params.w_rec + params.b), None

    h0 = jnp.zeros((seq.shape[1], N_HID))
    h, _ = jax.lax.scan(cell, h0, seq)
    return h @ params.w_out + params.b_out


def sample(key):
    ka, kb = jax.random.split(key)
    target = jax.random.randint(ka, (BATCH,), 0, N_SYM)
    seq = 0.05 * jax.random.normal(kb, (T, BATCH, N_SYM))
    return seq.at[0].add(jax.nn.one_hot(target, N_SYM)), target


def loss_fn(params, seq, target):
    logits = run(params, seq)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, target).mean()
    return loss, (logits.argmax(-1) == target).mean()


optimizer = optax.adam(1e-3)


@jax.jit
def step(params, opt_state, key):
    seq, target = sample(key)
    (loss, acc), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, seq, target)
    updates, opt_state = optimizer.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss, acc


params = initialise(jax.random.PRNGKey(0))
opt_state = optimizer.init(params)
for i in range(STEPS):
    params, opt_state, loss, acc = step(params, opt_state, jax.random.PRNGKey(i + 1))
    if i % 30 == 0 or i == STEPS - 1:
        print(f"{i:4d} loss={float(loss):.4f} acc={float(acc):.3f}")
