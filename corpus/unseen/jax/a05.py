"""2-D toy diffusion with the rescaled (zero terminal SNR) beta schedule, flax.nnx."""
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import make_moons

T = 200
GAMMA = 5.0


def rescaled_alpha_bar():
    betas = jnp.linspace(1e-4, 0.05, T)
    root = jnp.sqrt(jnp.cumprod(1.0 - betas))
    first, last = root[0], root[-1]
    root = (root - last) * first / (first - last)
    return root ** 2


class Denoiser(nnx.Module):
    def __init__(self, rngs):
        self.inp = nnx.Linear(2 + 16, 64, rngs=rngs)
        self.mid = nnx.Linear(64, 64, rngs=rngs)
        self.out = nnx.Linear(64, 2, rngs=rngs)

    def __call__(self, x, t):
        freqs = 2.0 ** jnp.arange(8)
        ang = (t / T)[:, None] * freqs
        emb = jnp.concatenate([jnp.sin(ang), jnp.cos(ang)], -1)
        h = nnx.silu(self.inp(jnp.concatenate([x, emb], -1)))
        h = h + nnx.silu(self.mid(h))
        return self.out(h)


alpha_bar = rescaled_alpha_bar()


def min_snr_weight(t):
    ab = alpha_bar[t]
    snr = ab / (1.0 - ab)
    return jnp.minimum(snr, GAMMA) / snr


def diffusion_loss(model, x0, key):
    kt, ke = jax.random.split(key)
    t = jax.random.randint(kt, (x0.shape[0],), 0, T)
    eps = jax.random.normal(ke, x0.shape)
    ab = alpha_bar[t][:, None]
    xt = jnp.sqrt(ab) * x0 + jnp.sqrt(1.0 - ab) * eps
    err = jnp.mean((model(xt, t) - eps) ** 2, axis=-1)
    return jnp.mean(min_snr_weight(t) * err)


@nnx.jit
def train_step(model, opt, x0, key):
    loss, grads = nnx.value_and_grad(diffusion_loss)(model, x0, key)
    opt.update(model, grads)
    return loss


X, _ = make_moons(2000, noise=0.05, random_state=0)
X = jnp.asarray((X - X.mean(0)) / X.std(0), jnp.float32)
model = Denoiser(nnx.Rngs(1))
opt = nnx.Optimizer(model, optax.adam(2e-3), wrt=nnx.Param)
key = jax.random.PRNGKey(42)
rng = np.random.default_rng(0)
for it in range(150):
    key, sub = jax.random.split(key)
    batch = X[rng.integers(0, len(X), 8)]
    loss = train_step(model, opt, batch, sub)
    if it % 5 == 0:
        print(it, float(loss))
