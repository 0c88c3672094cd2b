"""Recover travel times of the streets of a small town from observed door-to-door times (differentiable Bellman-Ford)."""
import jax
import jax.numpy as jnp
import numpy as np
import optax

INF = jnp.inf
N = 25


def town(seed=0):
    rng = np.random.default_rng(seed)
    adj = np.zeros((N, N), bool)
    for i in range(N):
        r, c = divmod(i, 5)
        for dr, dc in ((0, 1), (1, 0)):
            if r + dr < 5 and c + dc < 5:
                j = (r + dr) * 5 + c + dc
                adj[i, j] = rng.random() < 0.9
                adj[j, i] = rng.random() < 0.6
    adj[:, 20] = False          # nobody can drive into the old quarter
    adj[20, :] = False
    minutes = np.where(adj, rng.uniform(1.0, 6.0, (N, N)), np.inf)
    return jnp.array(adj), jnp.array(minutes, jnp.float32)


def shortest(weights, rounds=14):
    start = jnp.where(jnp.eye(N, dtype=bool), 0.0, INF)

    def relax(dist, _):
        via = jnp.min(dist[:, :, None] + weights[None], axis=1)
        return jnp.minimum(dist, via), None

    dist, _ = jax.lax.scan(relax, start, None, length=rounds)
    return dist


class StreetModel:
    def __init__(self, adj):
        self.adj = adj

    def init(self):
        return {"raw": jnp.full((N, N), 1.5)}

    def weights(self, p):
        return jnp.where(self.adj, jax.nn.softplus(p["raw"]) + 0.1, INF)

    def loss(self, p, src, obs):
        d = shortest(self.weights(p))[src]
        ok = jnp.isfinite(d) & jnp.isfinite(obs)
        diff = jnp.where(ok, d, 0.0) - jnp.where(ok, obs, 0.0)
        return jnp.sum(jnp.where(ok, diff ** 2, 0.0)) / jnp.sum(ok)


adj, minutes = town()
true_dist = shortest(minutes)
rng = np.random.default_rng(1)
noisy = np.array(true_dist) * rng.normal(1.0, 0.01, (N, N))
noisy[rng.random((N, N)) < 0.15] = np.nan
observed = jnp.array(noisy, jnp.float32)
print("pairs without a route:", int(jnp.isinf(true_dist).sum()), " missing reports:", int(np.isnan(noisy).sum()))

model = StreetModel(adj)
params = model.init()
opt = optax.adam(optax.exponential_decay(0.15, 100, 0.5))
state = opt.init(params)


@jax.jit
def step(params, state, src, obs):
    loss, g = jax.value_and_grad(model.loss)(params, src, obs)
    upd, state = opt.update(g, state)
    return optax.apply_updates(params, upd), state, loss


best = float("inf")
for it in range(240):
    src = jnp.array(rng.choice(N, 12, replace=False))
    params, state, loss = step(params, state, src, observed[src])
    best = min(best, float(loss))
    if it % 40 == 0:
        table = shortest(model.weights(params))
        worst = jnp.nanmax(jnp.abs(table - true_dist))
        print(f"{it:3d} loss {float(loss):.4f} best {best:.4f} worst pair off by {float(worst):.2f} min, "
              f"longest route {float(table.max())}")
used = adj & jnp.isfinite(minutes)
err = jnp.abs(model.weights(params) - minutes)[used]
print("median error per street: %.3f minutes" % float(jnp.median(err)))
print("town diameter:", float(true_dist.max()), "(inf: the old quarter cannot be reached)")
