"""Density estimation of sensor readings with a masked-coupling flow (distrax + flax)."""
import distrax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

DIM, LAYERS = 8, 6


def readings(n, seed):
    """Highly correlated, small-scale sensor data on a curved 2-D manifold."""
    rng = np.random.default_rng(seed)
    u = rng.normal(size=(n, 2))
    k = np.arange(1, DIM + 1)
    clean = 0.05 * np.tanh(u[:, :1] * k / 4) + 0.03 * u[:, 1:] * np.cos(k) + 0.02 * (u[:, :1] * u[:, 1:])
    return jnp.asarray(clean + 0.004 * rng.normal(size=(n, DIM)), jnp.float32)


class Conditioner(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.relu(nn.Dense(64)(x * 10.0))
        h = nn.relu(nn.Dense(64)(h))
        out = nn.Dense(2 * DIM, kernel_init=nn.initializers.zeros, bias_init=nn.initializers.zeros)(h)
        return out.reshape(*x.shape[:-1], DIM, 2)


net = Conditioner()


def make_flow(params):
    layers = []
    mask = jnp.arange(DIM) % 2 == 0
    for p in params["coupling"]:
        bijector_fn = lambda q: distrax.ScalarAffine(shift=q[..., 0], log_scale=2.0 * jnp.tanh(q[..., 1] / 2.0))
        layers.append(distrax.MaskedCoupling(
            mask=mask, bijector=bijector_fn, conditioner=lambda x, p=p: net.apply(p, x)))
        mask = jnp.logical_not(mask)
    scale = distrax.Block(distrax.ScalarAffine(shift=params["shift"], log_scale=params["log_scale"]), 1)
    flow = distrax.Inverse(distrax.Chain(layers + [scale]))
    base = distrax.MultivariateNormalDiag(jnp.zeros(DIM), jnp.ones(DIM))
    return distrax.Transformed(base, flow)


def loss_fn(params, x):
    return -jnp.mean(make_flow(params).log_prob(x))


keys = jax.random.split(jax.random.PRNGKey(0), LAYERS)
params = {
    "coupling": [net.init(k, jnp.zeros((1, DIM))) for k in keys],
    "shift": jnp.zeros(DIM), "log_scale": jnp.zeros(DIM),
}
tx = optax.chain(optax.clip_by_global_norm(20.0), optax.adam(optax.cosine_decay_schedule(5e-3, 400)))
state = tx.init(params)


@jax.jit
def update(params, state, x):
    loss, g = jax.value_and_grad(loss_fn)(params, x)
    up, state = tx.update(g, state)
    return optax.apply_updates(params, up), state, loss


train, valid = readings(10000, 0), readings(2000, 1)
valid_loss = jax.jit(loss_fn)
rng = np.random.default_rng(5)
for step in range(400):
    x = train[rng.integers(0, len(train), 256)]
    params, state, loss = update(params, state, x)
    if step % 40 == 0:
        print(f"STEP: {step}; loss: {float(loss):.3f}; validation loss: {float(valid_loss(params, valid)):.3f}")

print("FINAL", float(valid_loss(params, valid)))
