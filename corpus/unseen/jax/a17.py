"""Match click-through mixtures: per-context categorical targets, Fisher-Rao distance as the loss."""
import jax
import jax.numpy as jnp
from jax import random, vmap

CONTEXTS, ITEMS, RANK = 20, 6, 8


def init(key):
    ka, kb = random.split(key)
    return {"ctx": 0.5 * random.normal(ka, (CONTEXTS, RANK)), "item": 0.5 * random.normal(kb, (RANK, ITEMS))}


def model(params, c):
    return jax.nn.softmax(params["ctx"][c] @ params["item"])


def fisher_rao(p, q):
    overlap = jnp.vdot(jnp.sqrt(p), jnp.sqrt(q))
    return 2.0 * jnp.arccos(overlap)


def loss(params, targets):
    q = vmap(lambda c: model(params, c))(jnp.arange(CONTEXTS))
    return jnp.mean(vmap(fisher_rao)(targets, q) ** 2)


@jax.jit
def adam_step(i, params, m, v, targets):
    val, g = jax.value_and_grad(loss)(params, targets)
    m = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, m, g)
    v = jax.tree.map(lambda a, b: 0.999 * a + 0.001 * b * b, v, g)
    lr = 0.02 * jnp.sqrt(1 - 0.999 ** i) / (1 - 0.9 ** i)
    params = jax.tree.map(lambda p, a, b: p - lr * a / (jnp.sqrt(b) + 1e-8), params, m, v)
    return params, m, v, val


key = random.PRNGKey(10)
k1, k2, k3 = random.split(key, 3)
targets = jax.nn.softmax(1.2 * random.normal(k1, (CONTEXTS, ITEMS)), axis=-1)
params = init(k2)
m = jax.tree.map(jnp.zeros_like, params)
v = jax.tree.map(jnp.zeros_like, params)
for i in range(1, 601):
    params, m, v, val = adam_step(i, params, m, v, targets)
    if i % 25 == 0:
        print(f"iter {i}: squared distance {val:.3e}")
top1 = jnp.mean(vmap(lambda c: model(params, c).argmax())(jnp.arange(CONTEXTS)) == targets.argmax(-1))
print("top-1 agreement", top1)
