"""Digits with an MLP and a hand-written LARS optimizer."""
import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

digits = load_digits()
X = jnp.asarray(digits.data / 16.0, jnp.float32)
Y = jnp.asarray(digits.target)


def make_params(key, sizes):
    params = []
    for n_in, n_out in zip(sizes[:-1], sizes[1:]):
        key, sub = jax.random.split(key)
        params.append({
            "w": jax.random.normal(sub, (n_in, n_out)) * jnp.sqrt(2.0 / n_in),
            "b": jnp.zeros(n_out),
            "shift": jnp.zeros(n_out),      # reserved for fine-tuning, unused
        })
    return params


def forward(params, x):
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def cross_entropy(params, x, y):
    logp = jax.nn.log_softmax(forward(params, x))
    return -jnp.mean(jnp.take_along_axis(logp, y[:, None], axis=1))


def lars(p, g, m, lr=0.05, trust=0.05, mu=0.9):
    p_norm, g_norm = jnp.linalg.norm(p), jnp.linalg.norm(g)
    ratio = trust * p_norm / g_norm
    ratio = jnp.where((p_norm > 0) & (g_norm > 0), ratio, 1.0)
    m = mu * m + ratio * g
    return p - lr * m, m


@jax.jit
def step(params, mom, x, y):
    loss, grads = jax.value_and_grad(cross_entropy)(params, x, y)
    flat_p, tree = jax.tree_util.tree_flatten(params)
    flat_g, flat_m = map(jax.tree_util.tree_leaves, (grads, mom))
    new = [lars(p, g, m) for p, g, m in zip(flat_p, flat_g, flat_m)]
    params = tree.unflatten([a for a, _ in new])
    mom = tree.unflatten([b for _, b in new])
    return params, mom, loss


params = make_params(jax.random.PRNGKey(0), (64, 48, 10))
mom = jax.tree_util.tree_map(jnp.zeros_like, params)
order = np.random.default_rng(0)
for it in range(400):
    idx = order.integers(0, len(X), 128)
    params, mom, loss = step(params, mom, X[idx], Y[idx])
    if it % 50 == 0:
        print(f"it {it} loss {loss:.4f}")
print("accuracy", float((forward(params, X).argmax(1) == Y).mean()))
