"""House-price style regression: targets in the hundred thousands, micro-batches of 8."""
import jax
import jax.numpy as jnp
import numpy as np
import optax

rng = np.random.default_rng(11)
N, D, MICRO, K = 3000, 12, 8, 8


def make():
    x = rng.normal(size=(N, D))
    w = rng.normal(size=D)
    price = 350_000 + 60_000 * (x @ w) / np.sqrt(D) + 40_000 * np.tanh(x[:, 0] * x[:, 1])
    price += 4_000 * rng.normal(size=N)
    return x.astype(np.float32), price.astype(np.float32)


X, PRICE = make()
TRAIN = slice(0, 2500)
MU, SD = PRICE[TRAIN].mean(), PRICE[TRAIN].std()


def init(key, sizes=(D, 64, 64, 1)):
    layers = []
    for i, (a, b) in enumerate(zip(sizes[:-1], sizes[1:])):
        key, k = jax.random.split(key)
        layers.append({"w": jax.random.normal(k, (a, b)) * jnp.sqrt(2.0 / a), "b": jnp.zeros(b)})
    return layers


def predict_std(params, x):
    for p in params[:-1]:
        x = jax.nn.gelu(x @ p["w"] + p["b"])
    return (x @ params[-1]["w"] + params[-1]["b"])[:, 0]


def predict_price(params, x):
    return MU + SD * predict_std(params, x)


def objective(params, x, price):
    err = (predict_price(params, x) - price) / SD
    return jnp.mean(err ** 2)


total = 200
schedule = optax.cosine_onecycle_schedule(total, peak_value=1e-2, pct_start=0.3)
inner = optax.chain(optax.clip_by_global_norm(0.05), optax.adam(schedule))
tx = optax.MultiSteps(inner, every_k_schedule=K)
params = init(jax.random.PRNGKey(0))
opt_state = tx.init(params)


@jax.jit
def micro_step(params, opt_state, x, price):
    loss, grads = jax.value_and_grad(objective)(params, x, price)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss, optax.global_norm(updates)


window = []
for i in range(total * K):
    j = rng.integers(0, 2500, MICRO)
    params, opt_state, loss, unorm = micro_step(params, opt_state, X[j], PRICE[j])
    window.append(float(loss))
    if (i + 1) % (20 * K) == 0:
        print(f"update {(i + 1) // K:3d} loss {np.mean(window):.4f} last update norm {float(unorm):.4f}")
        window.clear()

rmse = float(jnp.sqrt(jnp.mean((predict_price(params, X[2500:]) - PRICE[2500:]) ** 2)))
print(f"test rmse {rmse:.0f} (std of prices {SD:.0f})")
