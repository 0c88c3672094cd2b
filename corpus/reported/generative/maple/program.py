import itertools
import jax
import jax.numpy as jnp
import numpy as np
import optax
import flax.linen as nn
from flax.training import train_state

WIDTH, STEPS, T = 16, 400, 100


class Denoiser(nn.Module):
    @nn.compact
    def __call__(self, x, t):
        freqs = jnp.exp(jnp.linspace(0.0, jnp.log(200.0), 16))
        emb = jnp.concatenate([jnp.sin(t[:, None] * freqs), jnp.cos(t[:, None] * freqs)], -1)
        emb = nn.Dense(128)(nn.swish(nn.Dense(128)(emb)))
        h = nn.Dense(128)(x)
        for _ in range(3):
            r = nn.swish(nn.LayerNorm()(h) + emb)
            h = h + nn.Dense(128)(nn.swish(nn.Dense(128)(r)))
        return nn.Dense(x.shape[-1])(h)


def dataloader(batch_size, seed):
    """Short waveforms: sine with random phase and frequency, or a ramp."""
    rng = np.random.default_rng(seed)
    grid = np.linspace(0, 1, WIDTH)
    while True:
        phase = rng.uniform(0, 2 * np.pi, (batch_size, 1))
        freq = rng.uniform(1.0, 2.0, (batch_size, 1))
        wave = np.sin(2 * np.pi * freq * grid + phase)
        ramp = rng.uniform(-1, 1, (batch_size, 1)) * (2 * grid - 1)
        use = rng.uniform(size=(batch_size, 1)) < 0.7
        yield {"videos": np.where(use, wave, ramp).astype(np.float32)}


betas = jnp.linspace(1e-3, 0.1, T)
abar = jnp.cumprod(1.0 - betas)


def diffusion_loss(params, apply_fn, inputs):
    x0 = inputs["videos"]
    rng_t, rng_n = jax.random.split(inputs["rng"])
    t = jax.random.randint(rng_t, (x0.shape[0],), 0, T)
    noise = jax.random.normal(rng_n, x0.shape)
    a = abar[t][:, None]
    x_t = jnp.sqrt(a) * x0 + jnp.sqrt(1 - a) * noise
    pred = apply_fn({"params": params}, x_t, t / T)
    return jnp.mean((pred - noise) ** 2)


@jax.jit
def train_step(state, inputs):
    loss, grads = jax.value_and_grad(diffusion_loss)(state.params, state.apply_fn, inputs)
    return state.apply_gradients(grads=grads), loss


def main():
    rng = jax.random.PRNGKey(0)
    rng, init_rng = jax.random.split(rng)
    net = Denoiser()
    params = net.init(init_rng, jnp.zeros((1, WIDTH)), jnp.zeros((1,)))["params"]
    state = train_state.TrainState.create(apply_fn=net.apply, params=params, tx=optax.adamw(1e-3))
    rng, _rng = jax.random.split(rng)
    dataloader_train = (dict(elem, rng=_rng) for elem in dataloader(64, seed=1))
    for step, batch in enumerate(itertools.islice(dataloader_train, STEPS)):
        state, loss = train_step(state, batch)
        if step % 40 == 0:
            print(f"step {step:4d} loss {float(loss):.4f}")

    val_rng, losses = jax.random.PRNGKey(77), []
    for elem in itertools.islice(dataloader(256, seed=2), 8):
        val_rng, k = jax.random.split(val_rng)
        losses.append(float(diffusion_loss(state.params, state.apply_fn, dict(elem, rng=k))))
    print("FINAL", float(np.mean(losses)))


main()
