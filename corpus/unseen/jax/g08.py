"""Rain nowcasting from a barometer and a few other station channels."""
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state


class InputNorm(nn.Module):
    """One-pass batch statistics with a learned scale and offset."""
    eps: float = 1e-5

    @nn.compact
    def __call__(self, x):
        gamma = self.param("gamma", nn.initializers.ones, (x.shape[-1],))
        beta = self.param("beta", nn.initializers.zeros, (x.shape[-1],))
        mean = jnp.mean(x, axis=0)
        var = jnp.mean(x * x, axis=0) - mean * mean
        return gamma * (x - mean) * jax.lax.rsqrt(var + self.eps) + beta


class Nowcaster(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = InputNorm()(x)
        x = nn.gelu(nn.Dense(24)(x))
        x = nn.gelu(nn.Dense(24)(x))
        return nn.Dense(1)(x)[..., 0]


def load_station(n=1500, seed=2):
    r = np.random.default_rng(seed)
    pressure = 1013.25 + 0.02 * r.normal(size=n)         # hPa, one calm week
    temperature = 15.0 + 4.0 * r.normal(size=n)          # deg C
    humidity = np.clip(0.6 + 0.2 * r.normal(size=n), 0, 1)
    wind = r.gamma(2.0, 2.0, size=n)
    score = -40 * (pressure - 1013.25) + 5 * (humidity - 0.6)
    rain = (score + 0.3 * r.normal(size=n) > 0).astype(np.float32)
    x = np.stack([pressure, temperature, humidity, wind], 1)
    return x.astype(np.float32), rain


x, rain = load_station()
model = Nowcaster()
state = train_state.TrainState.create(
    apply_fn=model.apply,
    params=model.init(jax.random.PRNGKey(1), x[:8])["params"],
    tx=optax.adamw(3e-3),
)


@jax.jit
def train_step(state, xb, yb):
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, xb)
        return optax.sigmoid_binary_cross_entropy(logits, yb).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


gen = np.random.default_rng(0)
for epoch in range(8):
    losses = []
    for batch in np.array_split(gen.permutation(len(x)), 25):
        state, loss = train_step(state, x[batch], rain[batch])
        losses.append(float(loss))
    print(f"epoch {epoch}  bce {np.mean(losses):.4f}")
