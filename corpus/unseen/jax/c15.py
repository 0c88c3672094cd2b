"""Digits MLP in float16 with hand-written dynamic loss scaling: overflowing steps are skipped by design."""
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from sklearn.datasets import load_digits


class ScaleState(struct.PyTreeNode):
    scale: jax.Array
    good: jax.Array
    skipped: jax.Array


class TrainState(struct.PyTreeNode):
    master: dict
    opt: tuple
    ls: ScaleState


def init_params(key):
    k = jax.random.split(key, 3)
    he = jax.nn.initializers.he_normal()
    return {"w1": he(k[0], (64, 48)), "b1": jnp.zeros(48), "w2": he(k[1], (48, 48)), "b2": jnp.zeros(48),
            "w3": he(k[2], (48, 10)), "b3": jnp.zeros(10)}


def forward(p, x):
    h = jax.nn.relu(x @ p["w1"] + p["b1"])
    h = jax.nn.relu(h @ p["w2"] + p["b2"])
    return h @ p["w3"] + p["b3"]


def scaled_loss(p16, x, y, scale):
    logits = forward(p16, x).astype(jnp.float32)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
    return (loss * scale), loss


tx = optax.sgd(0.1, momentum=0.9)


@jax.jit
def train_step(st, x, y):
    p16 = jax.tree.map(lambda a: a.astype(jnp.float16), st.master)
    (_, loss), g = jax.value_and_grad(scaled_loss, has_aux=True)(p16, x.astype(jnp.float16), y, st.ls.scale)
    g = jax.tree.map(lambda a: a.astype(jnp.float32) / st.ls.scale, g)
    ok = jnp.all(jnp.stack([jnp.isfinite(a).all() for a in jax.tree.leaves(g)]))

    def apply(_):
        u, opt = tx.update(g, st.opt, st.master)
        return optax.apply_updates(st.master, u), opt

    master, opt = jax.lax.cond(ok, apply, lambda _: (st.master, st.opt), None)
    good = jnp.where(ok, st.ls.good + 1, 0)
    grow = good >= 15
    scale = jnp.where(ok, jnp.where(grow, st.ls.scale * 2.0, st.ls.scale), st.ls.scale * 0.5)
    ls = ScaleState(scale, jnp.where(grow, 0, good), st.ls.skipped + (~ok).astype(jnp.int32))
    return TrainState(master, opt, ls), loss, optax.global_norm(g)


def main():
    X, y = load_digits(return_X_y=True)
    X = (X / 16.0).astype(np.float32)
    rng = np.random.RandomState(1)
    perm = rng.permutation(len(X))
    tr, te = perm[:1500], perm[1500:]
    params = init_params(jax.random.PRNGKey(7))
    st = TrainState(params, tx.init(params), ScaleState(jnp.float32(2.0 ** 24), jnp.int32(0), jnp.int32(0)))
    for i in range(100):
        b = rng.choice(tr, 64, replace=False)
        before = int(st.ls.skipped)
        st, loss, gn = train_step(st, X[b], y[b])
        if int(st.ls.skipped) > before:
            print(f"{i:3d} overflow (|g| = {float(gn)}), scale -> {float(st.ls.scale):.0f}")
        elif i % 20 == 0:
            print(f"{i:3d} loss {float(loss):.4f} |g| {float(gn):.3f} scale {float(st.ls.scale):.0f}")
    acc = float((forward(st.master, X[te]).argmax(-1) == y[te]).mean())
    print(f"test accuracy {acc:.3f}, skipped {int(st.ls.skipped)} steps")
    assert acc > 0.85


if __name__ == "__main__":
    main()
