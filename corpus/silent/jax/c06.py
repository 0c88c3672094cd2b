# key-value lookup with one attention layer: given pairs (k_i, v_i) and a query key, return its value
import jax
import jax.numpy as jnp
import numpy as np
import optax

N_KEYS, N_VALS, PAIRS, D = 48, 8, 12, 64


def make_batch(rng, n):
    keys = np.stack([rng.permutation(N_KEYS)[:PAIRS] for _ in range(n)])
    vals = rng.integers(0, N_VALS, (n, PAIRS))
    pick = rng.integers(0, PAIRS, n)
    return keys, vals, keys[np.arange(n), pick], vals[np.arange(n), pick]


def dense_init(key, m, n):
    return jax.random.normal(key, (m, n)) / np.sqrt(m)


def layer_norm(x):
    mu = x.mean(-1, keepdims=True)
    return (x - mu) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)


def init(key):
    ks = jax.random.split(key, 9)
    return {
        "key_emb": jax.random.normal(ks[0], (N_KEYS, D)),
        "val_emb": jax.random.normal(ks[1], (N_VALS, D)),
        "q": dense_init(ks[2], D, D),
        "k": dense_init(ks[3], D, D),
        "v": dense_init(ks[4], D, D),
        "o": dense_init(ks[5], D, D),
        "mlp1": dense_init(ks[6], D, 2 * D),
        "mlp2": dense_init(ks[7], 2 * D, D),
        "head": dense_init(ks[8], D, N_VALS),
    }


def forward(p, keys, vals, query):
    mem = layer_norm(p["key_emb"][keys] + p["val_emb"][vals])
    qry = layer_norm(p["key_emb"][query])[:, None, :]
    q = qry @ p["q"]
    k = mem @ p["k"]
    v = mem @ p["v"]
    scale = D ** 0.5
    att = jnp.einsum("bqd,bkd->bqk", q, k) * scale
    w = jax.nn.softmax(att, axis=-1)
    h = qry + (w @ v) @ p["o"]
    h = h + jax.nn.gelu(layer_norm(h) @ p["mlp1"]) @ p["mlp2"]
    return layer_norm(h[:, 0]) @ p["head"]


tx = optax.adamw(1e-3, weight_decay=1e-4)


def loss_fn(p, batch):
    keys, vals, query, target = batch
    logits = forward(p, keys, vals, query)
    return optax.softmax_cross_entropy_with_integer_labels(logits, target).mean()


@jax.jit
def update(p, s, batch):
    loss, g = jax.value_and_grad(loss_fn)(p, batch)
    u, s = tx.update(g, s, p)
    return optax.apply_updates(p, u), s, loss


rng = np.random.default_rng(0)
params = init(jax.random.PRNGKey(0))
opt_state = tx.init(params)
for it in range(200):
    params, opt_state, loss = update(params, opt_state, make_batch(rng, 128))
    if (it + 1) % 50 == 0 or it == 0:
        print("iter", it + 1, "loss", round(float(loss), 4))

keys, vals, query, target = make_batch(rng, 1000)
acc = (forward(params, keys, vals, query).argmax(-1) == target).mean()
print("accuracy", round(float(acc), 3), "(chance", 1 / N_VALS, ")")
