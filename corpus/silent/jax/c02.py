"""Pretrain a digit classifier, then adapt it to inverted/flipped digits with low-rank adapters."""
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

RANK = 4
data = load_digits()
X = (data.data / 16.0).astype(np.float32)
Y = data.target.astype(np.int32)
X_flip = np.ascontiguousarray(X.reshape(-1, 8, 8)[:, ::-1, :]).reshape(-1, 64)


def init_base(key, sizes=(64, 96, 96, 10)):
    out = []
    for k, m, n in zip(jax.random.split(key, len(sizes)), sizes[:-1], sizes[1:]):
        out.append({"w": jax.random.normal(k, (m, n)) * jnp.sqrt(2.0 / m), "b": jnp.zeros(n)})
    return out


def init_lora(key, base):
    ks = jax.random.split(key, len(base))
    return [
        {"A": jax.random.normal(k, (l["w"].shape[0], RANK)) / jnp.sqrt(l["w"].shape[0]),
         "B": jnp.zeros((RANK, l["w"].shape[1]))}
        for k, l in zip(ks, base)
    ]


def apply(base, x, lora=None):
    for i, layer in enumerate(base):
        w = layer["w"]
        if lora is not None:
            w = w + 2.0 * lora[i]["A"] @ lora[i]["B"]
        x = x @ w + layer["b"]
        if i < len(base) - 1:
            x = jax.nn.relu(x)
    return x


def xent(logits, y):
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


base = init_base(jax.random.PRNGKey(0))
opt = optax.adam(3e-3)
st = opt.init(base)


@jax.jit
def pretrain_step(base, st, x, y):
    l, g = jax.value_and_grad(lambda b: xent(apply(b, x), y))(base)
    u, st = opt.update(g, st)
    return optax.apply_updates(base, u), st, l


rng = np.random.default_rng(0)
for i in range(120):
    idx = rng.integers(0, 1500, 128)
    base, st, l = pretrain_step(base, st, X[idx], Y[idx])
    if i % 40 == 0:
        print("pretrain", i, float(l))

lora = init_lora(jax.random.PRNGKey(7), base)
lopt = optax.adam(1e-2)
lst = lopt.init(lora)


@jax.jit
def lora_step(lora, lst, x, y):
    l, g = jax.value_and_grad(lambda q: xent(apply(base, x, q), y))(lora)
    u, lst = lopt.update(g, lst)
    return optax.apply_updates(lora, u), lst, l


for i in range(180):
    idx = rng.integers(0, 1500, 128)
    lora, lst, l = lora_step(lora, lst, X_flip[idx], Y[idx])
    if i % 30 == 0:
        print("adapt", i, float(l))

a0 = np.mean(np.argmax(apply(base, X_flip[1500:]), -1) == Y[1500:])
a1 = np.mean(np.argmax(apply(base, X_flip[1500:], lora), -1) == Y[1500:])
print(f"flipped digits: before {a0:.3f}, after {a1:.3f}")
