import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state


class MixtureDensity(nn.Module):
    n_comp: int = 5
    hidden: int = 64

    @nn.compact
    def __call__(self, x):
        h = nn.tanh(nn.Dense(self.hidden)(x))
        h = nn.tanh(nn.Dense(self.hidden)(h))
        head = nn.Dense(3 * self.n_comp, name="head", kernel_init=nn.initializers.zeros)
        logit_pi, mu, log_sigma = jnp.split(head(h), 3, axis=-1)
        return jax.nn.log_softmax(logit_pi), mu, jnp.clip(log_sigma, -4.0, 3.0)


def mixture_nll(out, y):
    log_pi, mu, log_sigma = out
    z = (y - mu) / jnp.exp(log_sigma)
    comp = log_pi - 0.5 * z ** 2 - log_sigma - 0.5 * jnp.log(2 * jnp.pi)
    return -jax.nn.logsumexp(comp, axis=-1).mean()


def inverse_sine(n, rng):
    y = rng.uniform(-1.0, 1.0, (n, 1))
    x = y + 0.35 * np.sin(2 * np.pi * y) + 0.04 * rng.normal(size=(n, 1))
    return (x * 1.5).astype(np.float32), (y * 1.7).astype(np.float32)


@jax.jit
def train_step(state, x, y):
    def loss_fn(p):
        return mixture_nll(state.apply_fn({"params": p}, x), y)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


@jax.jit
def spread(state, x):
    _, mu, _ = state.apply_fn({"params": state.params}, x)
    return mu.std(axis=-1).mean()


def main():
    rng = np.random.default_rng(7)
    xs, ys = inverse_sine(4000, rng)
    model = MixtureDensity()
    params = model.init(jax.random.PRNGKey(0), xs[:1])["params"]
    tx = optax.chain(optax.clip_by_global_norm(5.0), optax.adam(5e-3))
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    for it in range(400):
        j = rng.integers(0, len(xs), 256)
        state, loss = train_step(state, xs[j], ys[j])
        if (it + 1) % 50 == 0:
            print(f"{it + 1:4d} nll {float(loss):.4f} component spread {float(spread(state, xs[:512])):.4f}")


if __name__ == "__main__":
    main()
