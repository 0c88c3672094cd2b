"""Embed a small taxonomy in the Poincare disc."""
import jax
import jax.numpy as jnp
import numpy as np
from sklearn.neighbors import NearestNeighbors

BRANCH, DEPTH, DIM, NEG = 3, 4, 2, 8

# ---- tree -----------------------------------------------------------------
edges, level, parent = [], [0], [-1]
frontier = [0]
for d in range(1, DEPTH):
    nxt = []
    for p in frontier:
        for _ in range(BRANCH):
            c = len(level)
            level.append(d)
            parent.append(p)
            edges.append((c, p))
            nxt.append(c)
    frontier = nxt
n = len(level)
for c in range(1, n):
    a = parent[parent[c]] if parent[c] >= 0 else -1
    while a >= 0:
        edges.append((c, a))
        a = parent[a]
edges = np.array(edges)
print(n, "nodes,", len(edges), "ancestor pairs")


# ---- geometry ---------------------------------------------------------------
def mobius_add(x, y):
    xy = jnp.dot(x, y)
    x2 = jnp.dot(x, x)
    y2 = jnp.dot(y, y)
    num = (1 + 2 * xy + y2) * x + (1 - x2) * y
    return num / (1 + 2 * xy + x2 * y2)


def dist(x, y):
    diff = mobius_add(-x, y)
    return 2.0 * jnp.arctanh(jnp.sqrt(jnp.dot(diff, diff) + 1e-12))


dists = jax.vmap(dist, in_axes=(None, 0))


def loss(table, u, v, neg):
    def one(u, v, neg):
        d = dists(table[u], jnp.concatenate([table[v][None], table[neg]]))
        return jax.nn.logsumexp(-d) + d[0]
    return jnp.mean(jax.vmap(one)(u, v, neg))


vg = jax.jit(jax.value_and_grad(loss))
table = jax.random.uniform(jax.random.PRNGKey(1), (n, DIM), minval=-0.05, maxval=0.05)
rng = np.random.default_rng(9)
lr = 0.3
step = 0
for epoch in range(60):
    rng.shuffle(edges)
    tot = 0.0
    for lo in range(0, len(edges), 20):
        e = edges[lo:lo + 20]
        neg = (e[:, :1] + rng.integers(1, n, size=(len(e), NEG))) % n
        val, g = vg(table, e[:, 0], e[:, 1], neg)
        table = table - lr * g
        tot += float(val)
        step += 1
    if epoch % 6 == 0:
        print("epoch", epoch, "loss", tot, "max radius", float(jnp.linalg.norm(table, axis=1).max()))

nn_ = NearestNeighbors(n_neighbors=2).fit(np.asarray(table))
print("nearest of the root:", nn_.kneighbors(np.asarray(table[:1]))[1])
