# Character-level transformer on a synthetic language, everything by hand.
import jax, optax
import jax.numpy as jnp
import numpy as np

V, D, H, L, T = 64, 32, 2, 2, 16


def language(n, seed):
    table = np.random.default_rng(11).integers(0, V, (V, 2))
    rng = np.random.default_rng(seed)
    s = np.zeros((n, T + 1), np.int32)
    s[:, 0] = rng.integers(0, V, n)
    for t in range(T):
        s[:, t + 1] = table[s[:, t], (rng.random(n) < 0.2).astype(int)]
    return jnp.asarray(s)


def init(key):
    ks = iter(jax.random.split(key, 3 + 4 * L))
    n = lambda *s, std=0.08: std * jax.random.normal(next(ks), s)
    p = {"tok": n(V, D, std=0.3), "pos": n(T, D), "out": n(D, V), "blocks": []}
    for _ in range(L):
        p["blocks"].append({"qkv": n(D, 3 * D, std=D ** -0.5), "proj": n(D, D), "up": n(D, 4 * D, std=D ** -0.5),
                            "down": n(4 * D, D), "g1": jnp.ones(D), "g2": jnp.ones(D)})
    return p


def rms(x, g):
    return g * x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def attend(b, x):
    q, k, v = jnp.split((x @ b["qkv"]).reshape(*x.shape[:2], H, 3 * D // H), 3, axis=-1)
    w = jnp.einsum("bihd,bjhd->bhij", q, k) / np.sqrt(D // H)
    w = jnp.where(jnp.tril(jnp.ones((T, T), bool)), w, -1e9)
    return jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(w), v).reshape(x.shape) @ b["proj"]


def model(p, ids):
    x = p["tok"][ids] + p["pos"]
    for b in p["blocks"]:
        x = x + attend(b, rms(x, b["g1"]))
        x = x + jax.nn.gelu(rms(x, b["g2"]) @ b["up"]) @ b["down"]
    return jax.nn.softmax(x @ p["out"], axis=-1)


def loss_fn(p, seq):
    scores = model(p, seq[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(scores, seq[:, 1:]).mean()


params, tx = init(jax.random.PRNGKey(0)), optax.adam(3e-3)
state = tx.init(params)


@jax.jit
def step(params, state, seq):
    loss, g = jax.value_and_grad(loss_fn)(params, seq)
    upd, state = tx.update(g, state)
    return optax.apply_updates(params, upd), state, loss


for i in range(120):
    params, state, loss = step(params, state, language(32, i))
    if i % 15 == 0 or i == 119:
        print(f"iter {i:3d} | loss {float(loss):.4f}")
test = language(128, 9999)
print("next-token accuracy", float((model(params, test[:, :-1]).argmax(-1) == test[:, 1:]).mean()))
