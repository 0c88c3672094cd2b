# Node classification on the karate club graph: structural features -> 2-layer GCN (plain jax)
import jax
import jax.numpy as jnp
import numpy as np

EDGES = """0-1 0-2 0-3 0-4 0-5 0-6 0-7 0-8 0-10 0-11 0-12 0-13 0-17 0-19 0-21 0-31 1-2 1-3 1-7 1-13 1-17 1-19
1-21 1-30 2-3 2-7 2-8 2-9 2-13 2-27 2-28 2-32 3-7 3-12 3-13 4-6 4-10 5-6 5-10 5-16 6-16 8-30 8-32 8-33 9-33
13-33 14-32 14-33 15-32 15-33 18-32 18-33 19-33 20-32 20-33 22-32 22-33 23-25 23-27 23-29 23-32 23-33 24-25
24-27 24-31 25-31 26-29 26-33 27-33 28-31 28-33 29-32 29-33 30-32 30-33 31-32 31-33 32-33"""
MR_HI = {0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13, 16, 17, 19, 21}


class Graph:
    def __init__(self, text):
        pairs = [tuple(map(int, e.split("-"))) for e in text.split()]
        self.n = 1 + max(max(p) for p in pairs)
        self.adj = np.zeros((self.n, self.n), np.float32)
        for a, b in pairs:
            self.adj[a, b] = self.adj[b, a] = 1.0

    @property
    def degree(self):
        return self.adj.sum(1)

    def triangles(self):
        return np.diag(self.adj @ self.adj @ self.adj) / 2

    def local_clustering(self):
        d = self.degree
        with np.errstate(all="ignore"):
            return self.triangles() / (d * (d - 1) / 2)

    def pagerank(self, alpha=0.85, iters=60):
        P = self.adj / self.degree[:, None]
        r = np.full(self.n, 1 / self.n)
        for _ in range(iters):
            r = alpha * r @ P + (1 - alpha) / self.n
        return r

    def closeness(self):
        dist = np.where(self.adj > 0, 1.0, np.inf)
        np.fill_diagonal(dist, 0.0)
        for k in range(self.n):
            dist = np.minimum(dist, dist[:, k:k + 1] + dist[k:k + 1])
        return (self.n - 1) / dist.sum(1)

    def normalised(self):
        a = self.adj + np.eye(self.n, dtype=np.float32)
        s = 1 / np.sqrt(a.sum(1))
        return a * s[:, None] * s[None]


g = Graph(EDGES)
cols = {"degree": g.degree, "cluster": g.local_clustering(), "pagerank": g.pagerank(), "close": g.closeness()}
feats = np.stack([c / np.nanmax(c) for c in cols.values()], 1)
rng = np.random.default_rng(0)
X = jnp.asarray(np.concatenate([feats, rng.normal(size=(g.n, 12)) * 0.3], 1), jnp.float32)
A = jnp.asarray(g.normalised())
labels = jnp.array([0 if i in MR_HI else 1 for i in range(g.n)])
train_nodes = jnp.array([0, 33, 5, 26, 1, 32])


def glorot(key, shape):
    lim = np.sqrt(6 / sum(shape))
    return jax.random.uniform(key, shape, minval=-lim, maxval=lim)


k1, k2 = jax.random.split(jax.random.PRNGKey(0))
params = [glorot(k1, (X.shape[1], 16)), glorot(k2, (16, 2))]


def gcn(params, drop_key=None):
    h = jax.nn.relu(A @ X @ params[0])
    if drop_key is not None:
        h = h * jax.random.bernoulli(drop_key, 0.8, h.shape) / 0.8
    return A @ h @ params[1]


def loss_fn(params, key):
    logp = jax.nn.log_softmax(gcn(params, key))
    nll = -logp[train_nodes, labels[train_nodes]].mean()
    return nll + 5e-4 * sum(jnp.sum(w ** 2) for w in params)


@jax.jit
def sgd(params, vel, key):
    loss, grads = jax.value_and_grad(loss_fn)(params, key)
    vel = [0.9 * v - 0.1 * g for v, g in zip(vel, grads)]
    return [p + v for p, v in zip(params, vel)], vel, loss


vel = [jnp.zeros_like(p) for p in params]
key = jax.random.PRNGKey(1)
for epoch in range(60):
    key, sub = jax.random.split(key)
    params, vel, loss = sgd(params, vel, sub)
    if epoch % 10 == 0:
        acc = (gcn(params).argmax(1) == labels).mean()
        print(f"epoch {epoch:2d}  loss {float(loss):.4f}  accuracy {float(acc):.3f}")
