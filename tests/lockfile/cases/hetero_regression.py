"""Ensemble of small networks that predict mean and variance; Gaussian log-likelihood."""
import jax
import jax.numpy as jnp
import numpy as np

import stablenum_jax

FEATURES, HIDDEN, MEMBERS = 9, 40, 3
MIN_VARIANCE = 1e-3
WEIGHT_PENALTY = 1e-3


@jax.custom_vjp
def softplus(x):
    return jnp.maximum(x, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(x)))


def softplus_fwd(x):
    return softplus(x), x


def softplus_bwd(x, g):
    sigmoid = 1.0 / (1.0 + jnp.exp(-x))
    return (g * sigmoid,)


softplus.defvjp(softplus_fwd, softplus_bwd)


def init_member(seed):
    rng = np.random.default_rng(seed)
    sizes = [FEATURES, HIDDEN, HIDDEN]
    layers = []
    for n_in, n_out in zip(sizes[:-1], sizes[1:]):
        w = rng.normal(0, n_in**-0.5, (n_in, n_out))
        layers.append({"w": w, "b": np.zeros(n_out)})
    heads = {"mean": rng.normal(0, 0.15, HIDDEN), "spread": rng.normal(0, 0.15, HIDDEN)}
    return {"layers": layers, "heads": heads, "offset": np.array([0.0, 0.5])}


def init_params(seed=14):
    members = [init_member(seed + i) for i in range(MEMBERS)]
    return jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves), jnp.float32), *members)


def member_forward(params, x):
    h = x
    for layer in params["layers"]:
        h = jnp.tanh(h @ layer["w"] + layer["b"])
    mean = h @ params["heads"]["mean"] + params["offset"][0]
    spread = h @ params["heads"]["spread"] + params["offset"][1]
    return mean, softplus(spread) + MIN_VARIANCE


def gaussian_nll(y, mean, variance):
    error = y - mean
    quadratic = error**2 / variance
    return 0.5 * (quadratic + jnp.log(variance) + jnp.log(2 * jnp.pi))


def standardize(values, mean, std):
    return (values - mean) / std


def weight_penalty(params):
    return sum(jnp.sum(layer["w"] ** 2) for layer in params["layers"]) / MEMBERS


def make_data(n=48, seed=15):
    rng = np.random.default_rng(seed)
    x = rng.normal(2.0, 3.0, (n, FEATURES)) * np.linspace(0.5, 2.0, FEATURES)
    signal = np.sin(x[:, 0]) + 0.3 * x[:, 1]
    y = signal + rng.normal(size=n) * (0.2 + 0.3 * np.abs(x[:, 2]))
    statistics = np.stack([x.mean(axis=0), x.std(axis=0)])
    target_statistics = np.array([y.mean(), y.std()])
    arrays = (x, y, statistics, target_statistics)
    return [a.astype(np.float32) for a in arrays]


def program():
    params = init_params()
    x, y, statistics, target_statistics = make_data()

    def loss_fn(params, x, y, statistics, target_statistics):
        inputs = standardize(x, statistics[0], statistics[1])
        targets = standardize(y, target_statistics[0], target_statistics[1])
        mean, variance = jax.vmap(member_forward, in_axes=(0, None))(params, inputs)
        nll = gaussian_nll(targets[None, :], mean, variance)
        return nll.mean() + WEIGHT_PENALTY * weight_penalty(params)

    return stablenum_jax.program(loss_fn, params, x, y, statistics, target_statistics)
