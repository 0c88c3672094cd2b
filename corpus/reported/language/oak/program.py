"""Memory efficient zeroth order fine-tuning of a small pretrained classifier (forward passes only)."""
import jax
import jax.numpy as jnp
import numpy as np
import optax

D, H, C = 16, 48, 5
ZO_EPS, ZO_LR, N_DIRECTIONS = 1e-3, 1e-2, 8


def init(key):
    k1, k2, k3 = jax.random.split(key, 3)
    he = lambda k, m, n: jax.random.normal(k, (m, n)) * jnp.sqrt(2.0 / m)
    return {"w1": he(k1, D, H), "b1": jnp.zeros(H), "w2": he(k2, H, H), "b2": jnp.zeros(H),
            "w3": he(k3, H, C) * 0.3, "b3": jnp.zeros(C)}


def apply(p, x):
    h = jax.nn.relu(x @ p["w1"] + p["b1"])
    h = jax.nn.relu(h @ p["w2"] + p["b2"])
    return h @ p["w3"] + p["b3"]


@jax.jit
def loss_fn(p, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(apply(p, x), y).mean()


rng = np.random.default_rng(0)
base_rule = rng.normal(size=(D, C))
new_rule = base_rule[:, [1, 0, 2, 4, 3]] + 0.4 * rng.normal(size=(D, C))


def make(n, rule):
    x = rng.normal(size=(n, D)).astype(np.float32)
    return jnp.asarray(x), jnp.asarray((x @ rule).argmax(-1))


# pretraining with ordinary backprop
params = init(jax.random.PRNGKey(0))
x0, y0 = make(6000, base_rule)
adam = optax.adam(3e-3)
opt_state = adam.init(params)


@jax.jit
def pretrain_step(p, s, x, y):
    loss, g = jax.value_and_grad(loss_fn)(p, x, y)
    u, s = adam.update(g, s)
    return optax.apply_updates(p, u), s, loss


for step in range(100):
    i = rng.integers(0, 6000, 128)
    params, opt_state, loss = pretrain_step(params, opt_state, x0[i], y0[i])
print("pretraining loss", float(loss))


def perturb(p, key, scale):
    leaves, tree = jax.tree_util.tree_flatten(p)
    keys = jax.random.split(key, len(leaves))
    return jax.tree_util.tree_unflatten(tree, [w + scale * jax.random.normal(k, w.shape) for w, k in zip(leaves, keys)])


@jax.jit
def mezo_step(p, key, lr, x, y):
    seeds = jax.random.split(key, N_DIRECTIONS)

    def probe(s):
        plus = loss_fn(perturb(p, s, ZO_EPS), x, y)
        minus = loss_fn(perturb(p, s, -ZO_EPS), x, y)
        return (plus - minus) / (2 * ZO_EPS), (plus + minus) / 2

    projected, losses = jax.lax.map(probe, seeds)
    update = lambda p, sg: (perturb(p, sg[0], -lr * sg[1] / N_DIRECTIONS), None)
    p, _ = jax.lax.scan(update, p, (seeds, projected))
    return p, losses.mean(), projected


x1, y1 = make(4000, new_rule)
xv, yv = make(3000, new_rule)
print("new task before fine-tuning", float(loss_fn(params, xv, yv)))
key = jax.random.PRNGKey(42)
for step in range(300):
    key, sub = jax.random.split(key)
    i = rng.integers(0, 4000, 128)
    lr = ZO_LR * (1 - step / 300)
    params, loss, pg = mezo_step(params, sub, lr, x1[i], y1[i])
    if step % 30 == 0:
        print(f"step {step} loss {float(loss):.4f} projected grad {np.asarray(pg)[:4].round(2)}")
print("FINAL", float(loss_fn(params, xv, yv)))
