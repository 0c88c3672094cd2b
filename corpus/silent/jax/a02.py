# Pre-train a small MLP on digits 0-9, then adapt it to rotated digits with low-rank adapters only.
import jax, jax.numpy as jnp, numpy as np, optax
from sklearn.datasets import load_digits

RANK, ALPHA = 4, 8.0
d = load_digits()
X = (d.images / 16.0).astype(np.float32)
Xrot = np.rot90(X, k=1, axes=(1, 2)).reshape(len(X), -1).copy()
X = X.reshape(len(X), -1)
Y = d.target


def init_base(key, sizes):
    out = []
    for a, b in zip(sizes[:-1], sizes[1:]):
        key, k = jax.random.split(key)
        out.append({"w": jax.random.normal(k, (a, b)) * np.sqrt(2.0 / a), "b": jnp.zeros(b)})
    return out


def init_lora(key, base):
    out = []
    for layer in base:
        key, k = jax.random.split(key)
        a, b = layer["w"].shape
        out.append({"A": jax.random.normal(k, (a, RANK)) / np.sqrt(a), "B": jnp.zeros((RANK, b))})
    return out


def forward(base, lora, x):
    for i, layer in enumerate(base):
        y = x @ layer["w"] + layer["b"]
        if lora is not None:
            y = y + (ALPHA / RANK) * (x @ lora[i]["A"]) @ lora[i]["B"]
        x = jax.nn.relu(y) if i < len(base) - 1 else y
    return x


def xent(logits, y):
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def fit(loss, params, tx, x, y, steps, name):
    state = tx.init(params)

    @jax.jit
    def step(params, state, xb, yb):
        l, g = jax.value_and_grad(loss)(params, xb, yb)
        up, state = tx.update(g, state, params)
        return optax.apply_updates(params, up), state, l

    rng = np.random.default_rng(0)
    for t in range(steps):
        i = rng.choice(len(x), 64, replace=False)
        params, state, l = step(params, state, x[i], y[i])
        if t % 25 == 0 or t == steps - 1:
            print(f"[{name}] step {t:3d} loss {float(l):.4f}")
    return params


base = init_base(jax.random.PRNGKey(0), [64, 96, 96, 10])
base = fit(lambda p, x, y: xent(forward(p, None, x), y), base, optax.adam(2e-3), X, Y, 100, "base")
lora = init_lora(jax.random.PRNGKey(1), base)
print("rotated accuracy before", float((forward(base, None, Xrot).argmax(1) == Y).mean()))
lora = fit(lambda p, x, y: xent(forward(base, p, x), y), lora, optax.adam(1e-2), Xrot, Y, 150, "lora")
print("rotated accuracy after", float((forward(base, lora, Xrot).argmax(1) == Y).mean()))
