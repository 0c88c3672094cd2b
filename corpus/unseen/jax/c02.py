import numpy as np
import jax
import jax.numpy as jnp
from sklearn.datasets import load_diabetes

# ---------------------------------------------------------------- config
cfg = dict(epochs=6, batch_size=48, base_lr=0.08, power=0.9, warmup=5, wd=1e-4, seed=11)

# ---------------------------------------------------------------- data
X, y = load_diabetes(return_X_y=True)
X = (X - X.mean(0)) / X.std(0)
y = (y - y.mean()) / y.std()
X, y = X.astype(np.float32), y.astype(np.float32)[:, None]
rng = np.random.default_rng(cfg["seed"])
order = rng.permutation(len(X))
Xtr, ytr, Xva, yva = X[order[:340]], y[order[:340]], X[order[340:]], y[order[340:]]


def loader(x, t, bs):
    p = rng.permutation(len(x))
    for i in range(0, len(x), bs):
        yield x[p[i:i + bs]], t[p[i:i + bs]]


steps_per_epoch = len(Xtr) // cfg["batch_size"]
max_iter = steps_per_epoch * cfg["epochs"]


# ---------------------------------------------------------------- model
def mlp_init(key):
    k1, k2, k3 = jax.random.split(key, 3)
    g = lambda k, a, b: jax.random.normal(k, (a, b)) / np.sqrt(a)
    return [(g(k1, 10, 32), jnp.zeros(32)), (g(k2, 32, 32), jnp.zeros(32)), (g(k3, 32, 1), jnp.zeros(1))]


def mlp(ps, x):
    for w, b in ps[:-1]:
        x = jnp.tanh(x @ w + b)
    w, b = ps[-1]
    return x @ w + b


def mse(ps, x, t):
    return jnp.mean((mlp(ps, x) - t) ** 2)


def poly_lr(it):
    warm = cfg["base_lr"] * (it + 1) / cfg["warmup"]
    decay = cfg["base_lr"] * (1.0 - it / max_iter) ** cfg["power"]
    return jnp.where(it < cfg["warmup"], warm, decay)


@jax.jit
def train_step(ps, vel, it, x, t):
    loss, g = jax.value_and_grad(mse)(ps, x, t)
    lr = poly_lr(it)
    g = jax.tree.map(lambda gi, p: gi + cfg["wd"] * p, g, ps)
    vel = jax.tree.map(lambda v, gi: 0.9 * v + gi, vel, g)
    ps = jax.tree.map(lambda p, v: p - lr * v, ps, vel)
    return ps, vel, loss


params = mlp_init(jax.random.PRNGKey(cfg["seed"]))
vel = jax.tree.map(jnp.zeros_like, params)
it = 0
best, best_params = np.inf, None
for epoch in range(cfg["epochs"]):
    losses = []
    for xb, tb in loader(Xtr, ytr, cfg["batch_size"]):
        params, vel, loss = train_step(params, vel, jnp.float32(it), xb, tb)
        losses.append(float(loss))
        it += 1
    val = float(mse(params, Xva, yva))
    if val < best:
        best, best_params = val, params
    print(f"epoch {epoch} it {it:3d} train {np.mean(losses):.4f} val {val:.4f} best {best:.4f}")
assert np.isfinite(val), "validation loss of the last epoch is not a number"
