"""Energy consumption forecast from a meter export (CSV)."""
import io
import jax
import jax.numpy as jnp
import numpy as np
import optax


def meter_export():
    rng = np.random.default_rng(30)
    lines = ["hour,temp,humidity,occupancy,kwh"]
    for h in range(960):
        temp = 12 + 9 * np.sin(2 * np.pi * (h % 24 - 8) / 24) + rng.normal()
        hum = 60 - 1.1 * temp + 4 * rng.normal()
        occ = max(0.0, 40 * np.sin(np.pi * ((h % 24) - 6) / 14)) if 6 <= h % 24 <= 20 else 0.0
        kwh = 5 + 0.25 * abs(temp - 18) + 0.12 * occ + 0.3 * rng.normal()
        hum_txt = "--" if h == 437 else f"{hum:.1f}"
        lines.append(f"{h % 24},{temp:.2f},{hum_txt},{occ:.0f},{kwh:.3f}")
    return "\n".join(lines)


table = np.genfromtxt(io.StringIO(meter_export()), delimiter=",", skip_header=1, dtype=np.float32)
lo, hi = np.array([0, -20, 0, 0]), np.array([24, 45, 100, 60])
features = (table[:, :4] - lo) / (hi - lo) * 2.0 - 1.0
target = table[:, 4] / 10.0
n_train = 800
x_tr, y_tr = features[:n_train].astype(np.float32), target[:n_train]
x_va, y_va = features[n_train:].astype(np.float32), target[n_train:]


def init(key):
    k = jax.random.split(key, 3)
    s = jax.nn.initializers.glorot_normal()
    return {"a": s(k[0], (4, 32)), "b": s(k[1], (32, 32)), "c": s(k[2], (32, 1)),
            "ba": jnp.zeros(32), "bb": jnp.zeros(32), "bc": jnp.zeros(1)}


def forward(p, x):
    h = jax.nn.swish(x @ p["a"] + p["ba"])
    h = jax.nn.swish(h @ p["b"] + p["bb"])
    return (h @ p["c"] + p["bc"])[:, 0]


@jax.jit
def loss_fn(p, x, y):
    return jnp.mean(optax.log_cosh(forward(p, x), y))


params = init(jax.random.PRNGKey(0))
labels = {k: ("bias" if k.startswith("b") and len(k) == 2 else "weight") for k in params}
tx = optax.multi_transform({"weight": optax.adamw(3e-3, weight_decay=1e-3), "bias": optax.sgd(1e-2)}, labels)
opt_state = tx.init(params)


@jax.jit
def step(params, opt_state, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


shuffle = np.random.default_rng(1)
it = 0
for epoch in range(6):
    order = shuffle.permutation(n_train)
    for s in range(0, n_train, 40):
        b = order[s:s + 40]
        params, opt_state, loss = step(params, opt_state, x_tr[b], y_tr[b])
        if it % 8 == 0:
            print(f"it {it:3d} epoch {epoch} loss {float(loss):.5f}")
        it += 1
    print("validation", float(loss_fn(params, x_va, y_va)))
