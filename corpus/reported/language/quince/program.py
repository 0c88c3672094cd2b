# sigmoid router with a load balancing bias (arXiv:2408.15664), no auxiliary loss
import jax
import jax.numpy as jnp
import numpy as np
import optax

D, HID, N_EXPERTS, TOP_K, CLASSES = 24, 16, 8, 2, 10
BIAS_RATE = 5e-3


def init(key):
    k = jax.random.split(key, 5)
    return {
        "router": {"w": jax.random.normal(k[0], (D, N_EXPERTS)) * 0.3, "bias": jnp.zeros(N_EXPERTS)},
        "experts": {"up": jax.random.normal(k[1], (N_EXPERTS, D, HID)) / np.sqrt(D),
                    "down": jax.random.normal(k[2], (N_EXPERTS, HID, D)) / np.sqrt(HID)},
        "shared": {"up": jax.random.normal(k[3], (D, HID)) / np.sqrt(D), "down": jnp.zeros((HID, D))},
        "head": jax.random.normal(k[4], (D, CLASSES)) * 0.1,
    }


def forward(params, x):
    scores = jax.nn.sigmoid(x @ params["router"]["w"])
    _, chosen = jax.lax.top_k(scores + params["router"]["bias"], TOP_K)
    picked = jax.nn.one_hot(chosen, N_EXPERTS).sum(1)
    weight = picked * scores
    weight = weight / (weight.sum(-1, keepdims=True) + 1e-9)
    h = jax.nn.silu(jnp.einsum("bd,edh->beh", x, params["experts"]["up"]))
    y = jnp.einsum("beh,ehd,be->bd", h, params["experts"]["down"], weight)
    y = y + jax.nn.silu(x @ params["shared"]["up"]) @ params["shared"]["down"]
    y = y / jnp.sqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)
    return y @ params["head"], picked.sum(0)


def loss_fn(params, x, y):
    logits, load = forward(params, x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), load


rng = np.random.default_rng(5)
centers = rng.normal(size=(6, D)) * 1.2
mixture = np.array([0.4, 0.25, 0.15, 0.1, 0.06, 0.04])
teachers = rng.normal(size=(6, D, CLASSES))


def sample(n):
    d = rng.choice(6, size=n, p=mixture)
    z = rng.normal(size=(n, D))
    label = np.einsum("nd,ndc->nc", z, teachers[d]).argmax(-1)
    return jnp.asarray(centers[d] + z, dtype=jnp.float32), jnp.asarray(label)


params = init(jax.random.PRNGKey(0))
opt = optax.adamw(4e-3, weight_decay=0.0)
opt_state = opt.init(params)


@jax.jit
def train_step(params, opt_state, x, y):
    (loss, load), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, x, y)
    updates, opt_state = opt.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    delta = BIAS_RATE * jnp.sign(load.mean() - load)
    params["router"]["bias"] = params["router"]["bias"] + delta - delta.mean()
    return params, opt_state, loss, load, grads


xv, yv = sample(4000)
print("val before", float(loss_fn(params, xv, yv)[0]))
for step in range(400):
    x, y = sample(512)
    params, opt_state, loss, load, grads = train_step(params, opt_state, x, y)
    if step % 50 == 0:
        share = np.asarray(load / load.sum()).round(2)
        print(f"step {step} loss {float(loss):.4f} load {share} bias {np.asarray(params['router']['bias']).round(3)}")
        print("   grad norms", {k: round(float(optax.global_norm(v)), 4) for k, v in grads["router"].items()})

print("FINAL", float(loss_fn(params, xv, yv)[0]))
