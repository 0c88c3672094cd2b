"""float16 training with a home made dynamic loss scaler (overflowing steps are dropped), flax linen."""
import numpy as np
import jax
import jax.numpy as jnp
import flax.linen as nn
from flax import struct
import optax
from sklearn.datasets import load_wine


@struct.dataclass
class LossScale:
    value: jax.Array
    good: jax.Array
    skipped: jax.Array
    period: int = struct.field(pytree_node=False, default=12)

    def adjust(self, finite):
        grown = jnp.where(self.good + 1 >= self.period, self.value * 2, self.value)
        return self.replace(
            value=jnp.where(finite, grown, jnp.maximum(self.value / 2, 1.0)),
            good=jnp.where(finite & (self.good + 1 < self.period), self.good + 1, 0),
            skipped=self.skipped + (1 - finite.astype(jnp.int32)))


class Tabular(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x.astype(jnp.float16)
        x = nn.relu(nn.Dense(32, dtype=jnp.float16)(x))
        x = nn.relu(nn.Dense(32, dtype=jnp.float16)(x))
        return nn.Dense(3, dtype=jnp.float16)(x)


def all_finite(tree):
    return jnp.stack([jnp.isfinite(a).all() for a in jax.tree.leaves(tree)]).all()


net = Tabular()
tx = optax.adamw(4e-3, weight_decay=5e-2)


@jax.jit
def train_step(params, opt_state, scaler, x, y):
    def scaled(p):
        ce = optax.softmax_cross_entropy_with_integer_labels(net.apply(p, x).astype(jnp.float32), y)
        loss = ce.mean()
        return (loss * scaler.value).astype(jnp.float32), loss

    grads, loss = jax.grad(scaled, has_aux=True)(params)
    grads = jax.tree.map(lambda g: g / scaler.value, grads)
    ok = all_finite(grads)
    norm = optax.global_norm(grads)
    updates, new_state = tx.update(grads, opt_state, params)
    new_params = optax.apply_updates(params, updates)
    keep = lambda new, old: jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, old)
    return keep(new_params, params), keep(new_state, opt_state), scaler.adjust(ok), loss, norm


def main():
    x, y = load_wine(return_X_y=True)
    x = ((x - x.mean(0)) / x.std(0)).astype(np.float32)
    rng = np.random.default_rng(1)
    order = rng.permutation(len(y))
    tr, te = order[:130], order[130:]
    params = net.init(jax.random.PRNGKey(0), x[:1])
    opt_state = tx.init(params)
    scaler = LossScale(jnp.float32(2.0 ** 24), jnp.int32(0), jnp.int32(0))
    history = []
    for step in range(80):
        b = rng.choice(tr, 32, replace=False)
        params, opt_state, scaler, loss, norm = train_step(params, opt_state, scaler, x[b], y[b])
        history.append(float(norm))
        if step < 12 or step % 15 == 0:
            print(f"{step:3d} loss {float(loss):.4f} scale 2^{int(np.log2(float(scaler.value)))} "
                  f"grad norm {float(norm):.3f}{'' if np.isfinite(norm) else '   <- skipped'}")
    acc = (np.asarray(net.apply(params, x[te])).argmax(-1) == y[te]).mean()
    bad = int(np.sum(~np.isfinite(history)))
    print(f"test accuracy {acc:.3f}, {int(scaler.skipped)} skipped steps")
    assert bad == int(scaler.skipped) and acc > 0.9


if __name__ == "__main__":
    main()
