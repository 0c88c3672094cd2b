import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits


class ReZeroBlock(eqx.Module):
    norm: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    gate: jax.Array

    def __init__(self, dim, key):
        k1, k2 = jax.random.split(key)
        self.norm = eqx.nn.LayerNorm(dim)
        self.up = eqx.nn.Linear(dim, 2 * dim, key=k1)
        self.down = eqx.nn.Linear(2 * dim, dim, key=k2)
        self.gate = jnp.zeros(())

    def __call__(self, x):
        return x + self.gate * self.down(jax.nn.relu(self.up(self.norm(x))))


class DeepNet(eqx.Module):
    stem: eqx.nn.Linear
    blocks: ReZeroBlock
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, dim, depth, key):
        ks, kb, kh = jax.random.split(key, 3)
        self.stem = eqx.nn.Linear(64, dim, key=ks)
        self.blocks = eqx.filter_vmap(lambda k: ReZeroBlock(dim, k))(jax.random.split(kb, depth))
        self.norm = eqx.nn.LayerNorm(dim)
        self.head = eqx.nn.Linear(dim, 10, key=kh)

    def __call__(self, x):
        x = self.stem(x)
        arrays, static = eqx.partition(self.blocks, eqx.is_array)

        def body(h, layer):
            return eqx.combine(layer, static)(h), None

        x, _ = jax.lax.scan(body, x, arrays)
        return self.head(self.norm(x))


@eqx.filter_value_and_grad
def compute(model, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(x), y).mean()


def main():
    x, y = load_digits(return_X_y=True)
    x = ((x - x.mean()) / x.std()).astype(np.float32)
    rng = np.random.default_rng(0)
    order = rng.permutation(len(x))
    tr, te = order[:1400], order[1400:]
    model = DeepNet(48, 24, jax.random.PRNGKey(0))
    tx = optax.adamw(2e-3, weight_decay=1e-4)
    state = tx.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model, state, xb, yb):
        loss, grads = compute(model, xb, yb)
        updates, state = tx.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state, loss

    for i in range(250):
        s = rng.choice(tr, 64)
        model, state, loss = step(model, state, x[s], y[s])
        if i % 50 == 0 or i == 249:
            gates = np.abs(np.asarray(model.blocks.gate)).mean()
            print(f"{i:3d} loss {float(loss):.4f} mean gate {gates:.4f}")
    acc = (jax.vmap(model)(x[te]).argmax(-1) == y[te]).mean()
    print("test accuracy", float(acc))


if __name__ == "__main__":
    main()
