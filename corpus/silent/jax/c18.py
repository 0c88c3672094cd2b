"""Regression with an ensemble-of-branches network (each branch is a small tanh MLP)."""
import jax
import jax.numpy as jnp
import numpy as np
import optax


class BranchNet:
    def __init__(self, n_in, branches=32, width=2):
        self.n_in, self.branches, self.width = n_in, branches, width

    def init_branch(self, key):
        k1, k2, k3 = jax.random.split(key, 3)
        return {
            "w": jax.random.normal(k1, (self.n_in, self.width)),
            "b": jax.random.normal(k2, (self.width,)),
            "a": jax.random.normal(k3, (self.width,)) / np.sqrt(self.branches),
        }

    def init(self, key):
        keys = jnp.stack([key for _ in range(self.branches)])
        return {"branch": jax.vmap(self.init_branch)(keys), "offset": jnp.zeros(())}

    def apply(self, params, x):
        def one(p):
            return jnp.tanh(x @ p["w"] + p["b"]) @ p["a"]

        return jax.vmap(one)(params["branch"]).sum(0) + params["offset"]


def f(x):
    return np.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2] + np.cos(1.5 * x[:, 1])


if __name__ == "__main__":
    rng = np.random.default_rng(4)
    x = rng.uniform(-2, 2, (1000, 3)).astype(np.float32)
    y = f(x).astype(np.float32)
    net = BranchNet(3)
    params = net.init(jax.random.PRNGKey(42))
    opt = optax.adam(1e-2)
    state = opt.init(params)

    @jax.jit
    def step(params, state, xb, yb):
        def mse(p):
            return jnp.mean((net.apply(p, xb) - yb) ** 2)

        val, g = jax.value_and_grad(mse)(params)
        up, state = opt.update(g, state)
        return optax.apply_updates(params, up), state, val

    for i in range(300):
        j = rng.integers(0, 800, 100)
        params, state, val = step(params, state, x[j], y[j])
        if i % 60 == 0 or i == 299:
            print(f"{i:4d} mse {val:.4f}")
    print("val mse %.4f (variance %.3f)" % (np.mean((net.apply(params, x[800:]) - y[800:]) ** 2), y[800:].var()))
