"""Multi-assay regression.  Every compound was measured in only a few of the assays; an
unmeasured cell of the table is NaN.  Scaffold-level context comes from segment means."""
import functools
import jax
import jax.numpy as jnp
import numpy as np
import optax

N, D, T, S = 400, 20, 6, 40


def load():
    r = np.random.RandomState(7)
    X = r.randn(N, D).astype("float32")
    W = r.randn(D, T).astype("float32") / np.sqrt(D)
    Y = X @ W + 0.1 * r.randn(N, T).astype("float32")
    Y[r.rand(N, T) < 0.7] = np.nan
    Y[:200, 5] = np.nan
    scaffold = r.choice(np.arange(0, S, 2), size=N)
    return X, Y, scaffold


def segment_mean(x, seg):
    tot = jax.ops.segment_sum(x, seg, S)
    cnt = jax.ops.segment_sum(jnp.ones(x.shape[0]), seg, S)[:, None]
    raw = tot / cnt
    return jnp.where(cnt > 0, raw, 0.0)


def forward(p, x, seg):
    ctx = jax.lax.stop_gradient(segment_mean(x, seg))[seg]
    h = jnp.concatenate([x, ctx], -1)
    h = jax.nn.gelu(h @ p["w1"] + p["b1"])
    return h @ p["w2"] + p["b2"]


def loss_fn(p, x, y, seg):
    pred = forward(p, x, seg)
    seen = ~jnp.isnan(y)
    err = jnp.where(seen, pred - jnp.where(seen, y, 0.0), 0.0)
    per_assay = jnp.sum(err**2, 0) / jnp.sum(seen, 0)
    loss = jnp.sum(err**2) / jnp.maximum(seen.sum(), 1)
    return loss, per_assay


@functools.partial(jax.jit, static_argnums=0)
def step(tx, p, st, x, y, seg):
    (loss, per_assay), g = jax.value_and_grad(loss_fn, has_aux=True)(p, x, y, seg)
    up, st = tx.update(g, st, p)
    return optax.apply_updates(p, up), st, loss, per_assay


X, Y, scaffold = load()
k1, k2 = jax.random.split(jax.random.key(0))
p = {"w1": jax.random.normal(k1, (2 * D, 48)) * 0.15, "b1": jnp.zeros(48),
     "w2": jax.random.normal(k2, (48, T)) * 0.15, "b2": jnp.zeros(T)}
tx = optax.adam(5e-3)
st = tx.init(p)

log = []
for epoch in range(40):
    for lo in range(0, N, 100):
        sl = slice(lo, lo + 100)
        p, st, loss, per_assay = step(tx, p, st, X[sl], Y[sl], scaffold[sl])
        log.append(np.asarray(per_assay))
    if epoch % 8 == 0 or epoch == 39:
        print(epoch, "loss", round(float(loss), 4), "assays", np.round(np.nanmean(log[-4:], 0), 3))
print("cells without a value in the log:", int(np.isnan(np.array(log)).sum()))
