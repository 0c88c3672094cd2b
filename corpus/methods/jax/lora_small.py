"""LoRA alone: a frozen head gets an adapter with B = 0 for a small shift of its targets."""
import equinox as eqx
import jax
import jax.numpy as jnp
import optax


class Adapter(eqx.Module):
    weight: jax.Array
    a: jax.Array
    b: jax.Array

    def __init__(self, base, key, rank=8):
        self.weight = base
        self.a = jax.random.normal(key, (rank, base.shape[1])) / base.shape[1] ** 0.5
        self.b = jnp.zeros((base.shape[0], rank))

    def __call__(self, x):
        return x @ jax.lax.stop_gradient(self.weight).T + x @ self.a.T @ self.b.T


def only_adapters(layer):
    spec = jax.tree.map(lambda _: True, layer)
    return eqx.tree_at(lambda l: l.weight, spec, False)


def main(steps=60, width=64, classes=20):
    k1, k2, k3, k4, k5, key = jax.random.split(jax.random.key(0), 6)
    base = jax.random.normal(k1, (classes, width)) / width**0.5
    change = jax.random.normal(k2, (classes, 4)) @ jax.random.normal(k3, (4, width))
    wanted = base + 0.07 * change / 2
    trained, frozen = (lambda l: eqx.partition(l, only_adapters(l)))(Adapter(base, k4))
    tx = optax.adamw(1e-2, weight_decay=0.0)
    state = tx.init(trained)
    test = jax.random.normal(k5, (2000, width))

    def agreement(trained):
        made = eqx.combine(trained, frozen)(test)
        return float((made.argmax(-1) == (test @ wanted.T).argmax(-1)).mean())

    @eqx.filter_jit
    def step(trained, state, x):
        def loss_fn(trained):
            # The entropy of the targets is a floor that the loss cannot pass.
            target = jax.nn.softmax(x @ wanted.T)
            return optax.softmax_cross_entropy(eqx.combine(trained, frozen)(x), target).mean()

        loss, grads = eqx.filter_value_and_grad(loss_fn)(trained)
        updates, state = tx.update(grads, state, trained)
        return eqx.apply_updates(trained, updates), state, loss

    print(f"agreement before {agreement(trained):.3f}")
    for i in range(steps):
        key, sub = jax.random.split(key)
        trained, state, loss = step(trained, state, jax.random.normal(sub, (256, width)))
        if i % 10 == 0:
            print(f"{i:3d} loss {float(loss):.4f} agreement {agreement(trained):.3f}")
    print(f"agreement after {agreement(trained):.3f}")


if __name__ == "__main__":
    main()
