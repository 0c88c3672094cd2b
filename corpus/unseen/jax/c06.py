"""Concrete selector layer (choose k features of wine) followed by an MLP, fp16 compute, fp32 master weights."""
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_wine
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

K, HID = 4, 32
T_START, T_END, STEPS = 5.0, 0.5, 60


class Params(NamedTuple):
    sel: jax.Array
    w1: jax.Array
    b1: jax.Array
    w2: jax.Array
    b2: jax.Array


def init_params(seed, n_feat, n_cls):
    k = jax.random.split(jax.random.PRNGKey(seed), 3)
    return Params(
        0.01 * jax.random.normal(k[0], (K, n_feat)),
        jax.random.normal(k[1], (K, HID)) * np.sqrt(2 / K), jnp.zeros(HID),
        jax.random.normal(k[2], (HID, n_cls)) * np.sqrt(1 / HID), jnp.zeros(n_cls))


def sample_gumbel(key, shape, dtype):
    u = jax.random.uniform(key, shape).astype(dtype)
    return -jnp.log(-jnp.log(u))


def select(sel, x, key, temp, train):
    if not train:
        return x[:, sel.argmax(-1)]
    g = sample_gumbel(key, (x.shape[0],) + sel.shape, x.dtype)
    m = jax.nn.softmax((sel + g) / temp.astype(x.dtype), axis=-1)
    return jnp.einsum("bkf,bf->bk", m, x)


def apply(params, x, key=None, temp=None, train=False):
    p = jax.tree.map(lambda a: a.astype(jnp.float16), params)
    z = select(p.sel, x.astype(jnp.float16), key, temp, train)
    h = jax.nn.relu(z @ p.w1 + p.b1)
    return (h @ p.w2 + p.b2).astype(jnp.float32)


def loss_fn(params, x, y, key, temp):
    logits = apply(params, x, key, temp, True)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


X, y = load_wine(return_X_y=True)
Xa, Xb, ya, yb = train_test_split(X, y, test_size=0.3, random_state=1, stratify=y)
sc = StandardScaler().fit(Xa)
Xa, Xb = sc.transform(Xa).astype("float32"), sc.transform(Xb).astype("float32")

params = init_params(0, X.shape[1], 3)
tx = optax.adam(optax.exponential_decay(0.03, 20, 0.8))
state = tx.init(params)


@jax.jit
def update(params, state, x, y, key, i):
    temp = T_START * (T_END / T_START) ** (i / STEPS)
    loss, g = jax.value_and_grad(loss_fn)(params, x, y, key, temp)
    up, state = tx.update(g, state, params)
    return optax.apply_updates(params, up), state, loss


rng = np.random.RandomState(5)
key = jax.random.PRNGKey(2024)
for i in range(STEPS):
    key, sub = jax.random.split(key)
    b = rng.choice(len(Xa), 10, replace=False)
    params, state, loss = update(params, state, Xa[b], ya[b], sub, jnp.float32(i))
    if i % 10 == 0:
        acc = (apply(params, Xb).argmax(-1) == yb).mean()
        print(f"{i:03d} loss={float(loss):.4f} acc={float(acc):.3f} picked={sorted(set(np.asarray(params.sel.argmax(-1)).tolist()))}")
    assert np.isfinite(float(loss)), f"step {i}: loss={float(loss)}"
