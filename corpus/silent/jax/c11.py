"""Fourier-feature regression of a 2-D field. The random frequencies stay fixed."""
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import path_aware_map


class Field(nn.Module):
    width: int = 64

    @nn.compact
    def __call__(self, xy):
        B = self.param("proj_freq", nn.initializers.normal(2.0), (2, self.width))
        f = jnp.concatenate([jnp.sin(xy @ B), jnp.cos(xy @ B)], -1)
        h = nn.silu(nn.Dense(self.width, name="proj_in")(f))
        h = nn.silu(nn.Dense(self.width, name="proj_mid")(h))
        out = nn.Dense(1, use_bias=False, name="proj_out")(h)
        scale = self.param("scale", nn.initializers.ones, (1,))
        shift = self.param("shift", nn.initializers.zeros, (1,))
        return (out * scale + shift)[:, 0]


def target(xy):
    return np.sin(3 * xy[:, 0]) * np.cos(2 * xy[:, 1]) + 0.5 * xy[:, 0]


model = Field()
params = model.init(jax.random.PRNGKey(0), jnp.zeros((1, 2)))["params"]

labels = path_aware_map(lambda path, _: "fixed" if path[0].startswith("proj") else "learn", params)
tx = optax.multi_transform({"learn": optax.adam(3e-3), "fixed": optax.set_to_zero()}, labels)
opt_state = tx.init(params)


@jax.jit
def train_step(params, opt_state, xy, t):
    def loss_fn(p):
        return jnp.mean((model.apply({"params": p}, xy) - t) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


rng = np.random.default_rng(0)
for step in range(300):
    xy = rng.uniform(-1.5, 1.5, (128, 2)).astype(np.float32)
    params, opt_state, loss = train_step(params, opt_state, xy, target(xy))
    if step % 50 == 0:
        print(f"step {step:4d} mse {loss:.5f}")

xy = rng.uniform(-1.5, 1.5, (2000, 2)).astype(np.float32)
err = float(jnp.mean((model.apply({"params": params}, xy) - target(xy)) ** 2))
print("test mse", err, "target variance", target(xy).var())
