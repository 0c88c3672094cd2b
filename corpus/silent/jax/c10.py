"""Matrix factorisation for a small rating table, low-memory parameters."""
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax


@dataclass
class Config:
    users: int = 80
    items: int = 60
    rank: int = 24
    steps: int = 300
    lr: float = 1.2e-3
    param_dtype: type = jnp.bfloat16


def ratings(cfg, seed=0):
    r = np.random.default_rng(seed)
    u = r.normal(size=(cfg.users, 3))
    v = r.normal(size=(cfg.items, 3))
    return (u @ v.T / np.sqrt(3)).astype(np.float32)


def setup(cfg, key):
    ku, kv = jax.random.split(key)
    mag = lambda k, s: (0.5 + jax.random.uniform(k, s)) * jax.random.rademacher(
        jax.random.fold_in(k, 1), s, dtype=jnp.float32)
    return {
        "user": mag(ku, (cfg.users, cfg.rank)).astype(cfg.param_dtype),
        "item": mag(kv, (cfg.items, cfg.rank)).astype(cfg.param_dtype),
        "bias": jnp.zeros((cfg.items,), cfg.param_dtype),
    }


def predict(params):
    u = params["user"].astype(jnp.float32)
    v = params["item"].astype(jnp.float32)
    return u @ v.T / np.sqrt(u.shape[1]) + params["bias"].astype(jnp.float32)


def main(cfg=Config()):
    R = jnp.asarray(ratings(cfg))
    params = setup(cfg, jax.random.PRNGKey(0))
    opt = optax.adam(cfg.lr)
    opt_state = opt.init(params)

    @jax.jit
    def step(params, opt_state):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((predict(p) - R) ** 2))(params)
        updates, opt_state = opt.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    for i in range(cfg.steps):
        params, opt_state, loss = step(params, opt_state)
        if i % 50 == 0 or i == cfg.steps - 1:
            print(f"step {i:3d} mse {loss:.4f}")


if __name__ == "__main__":
    main()
