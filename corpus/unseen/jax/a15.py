"""Graph attention regression on padded graphs (jraph-like static shapes)."""
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

N_NODE, N_EDGE, FEAT = 12, 40, 5


def make_graph(rng):
    n_edge = rng.integers(24, N_EDGE - 4)
    x = rng.standard_normal((N_NODE, FEAT))
    send = rng.integers(0, N_NODE, n_edge)
    recv = rng.integers(0, N_NODE, n_edge)
    dist = rng.uniform(0.2, 3.0, n_edge)
    far = np.zeros(N_NODE)
    for r in range(N_NODE):
        e = np.where(recv == r)[0]
        if len(e):
            far[r] = x[send[e[np.argmax(dist[e])]], 0]
    pad = N_EDGE - n_edge
    return dict(
        x=x.astype(np.float32),
        send=np.r_[send, np.zeros(pad)].astype(np.int32),
        recv=np.r_[recv, np.zeros(pad)].astype(np.int32),
        dist=np.r_[dist, np.full(pad, 999.0)].astype(np.float32),
        mask=np.r_[np.ones(n_edge), np.zeros(pad)].astype(np.float32),
        y=far.astype(np.float32),
    )


def segment_softmax(score, seg, mask, n):
    top = jax.ops.segment_max(jnp.where(mask > 0, score, -jnp.inf), seg, n)
    top = jnp.where(jnp.isinf(top), 0.0, top)
    ex = jnp.exp(score - jax.lax.stop_gradient(top)[seg]) * mask
    den = jax.ops.segment_sum(ex, seg, n)[seg]
    return ex / jnp.where(den > 0, den, 1.0)


class GAT(nn.Module):
    @nn.compact
    def __call__(self, g):
        h = nn.Dense(16)(g["x"])
        src, dst = h[g["send"]], h[g["recv"]]
        edge_w = self.param("edge_w", nn.initializers.constant(0.0), ())
        score = nn.leaky_relu(nn.Dense(1)(jnp.concatenate([src, dst], -1))[:, 0], 0.2)
        score = score + edge_w * g["dist"]
        att = segment_softmax(score, g["recv"], g["mask"], N_NODE)
        msg = jax.ops.segment_sum(att[:, None] * src, g["recv"], N_NODE)
        return nn.Dense(1)(nn.relu(nn.Dense(16)(jnp.concatenate([h, msg], -1))))[:, 0]


model = GAT()
rng = np.random.default_rng(4)
graphs = jax.tree.map(lambda *a: np.stack(a), *[make_graph(rng) for _ in range(128)])
params = model.init(jax.random.PRNGKey(0), jax.tree.map(lambda a: a[0], graphs))
tx = optax.adam(2e-3)
state = tx.init(params)


@jax.jit
def step(params, state, batch):
    def loss(p):
        pred = jax.vmap(lambda g: model.apply(p, g))(batch)
        return jnp.mean((pred - batch["y"]) ** 2)

    val, g = jax.value_and_grad(loss)(params)
    upd, state = tx.update(g, state)
    return optax.apply_updates(params, upd), state, val


for it in range(150):
    idx = rng.integers(0, 128, 16)
    params, state, val = step(params, state, jax.tree.map(lambda a: a[idx], graphs))
    if it % 10 == 0:
        print(it, float(val), "edge_w", float(params["params"]["edge_w"]))
