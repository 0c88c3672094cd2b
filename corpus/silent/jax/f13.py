import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax


class SequenceClassifier(eqx.Module):
    cell: eqx.nn.GRUCell
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, n_in, hidden, n_out, key):
        k1, k2 = jax.random.split(key)
        self.cell = eqx.nn.GRUCell(n_in, hidden, key=k1)
        self.norm = eqx.nn.LayerNorm(hidden)
        self.head = eqx.nn.Linear(hidden, n_out, key=k2)

    def __call__(self, xs):
        def tick(h, x):
            h = self.cell(x, lax.stop_gradient(h))
            return h, None

        h0 = jnp.zeros(self.cell.hidden_size)
        h, _ = lax.scan(tick, h0, xs)
        return self.head(self.norm(h))


def first_symbol_data(rng, n, length=14, classes=6):
    """The class is given in the first symbol; the rest are distractors."""
    tok = rng.integers(0, classes, (n, length))
    label = tok[:, 0]
    onehot = np.eye(classes, dtype=np.float32)[tok]
    flag = np.zeros((n, length, 1), np.float32)
    flag[:, 0] = 1.0
    return np.concatenate([onehot, flag], -1), label


@eqx.filter_value_and_grad(has_aux=True)
def loss_and_grads(model, x, y):
    logits = jax.vmap(model)(x)
    ce = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
    return ce, jnp.mean(logits.argmax(-1) == y)


def main():
    rng = np.random.default_rng(0)
    model = SequenceClassifier(7, 64, 6, jax.random.PRNGKey(4))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(5e-3))
    state = tx.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit
    def step(model, state, x, y):
        (loss, acc), grads = loss_and_grads(model, x, y)
        up, state = tx.update(grads, state)
        return eqx.apply_updates(model, up), state, loss, acc

    for it in range(400):
        x, y = first_symbol_data(rng, 128)
        model, state, loss, acc = step(model, state, x, y)
        if it % 50 == 0 or it == 399:
            print(f"it {it:3d} loss {float(loss):.4f} acc {float(acc):.3f}")


main()
