"""Tiny VQ-VAE on digits."""
import jax
import jax.numpy as jnp
import numpy as np
import optax
import flax.linen as nn
from sklearn.datasets import load_digits


class VQVAE(nn.Module):
    codes: int = 32
    groups: int = 4
    dim: int = 8

    def setup(self):
        self.enc = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(self.groups * self.dim)])
        self.dec = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(64)])
        self.codebook = self.param("codebook", nn.initializers.normal(0.5), (self.codes, self.dim))

    def __call__(self, x):
        z = self.enc(x).reshape(-1, self.groups, self.dim)
        d2 = jnp.sum((z[:, :, None, :] - self.codebook) ** 2, -1)
        idx = jnp.argmin(d2, -1)
        q = self.codebook[idx]
        st = z + jax.lax.stop_gradient(q - z)
        recon = self.dec(st.reshape(x.shape[0], -1))
        vq = jnp.mean((jax.lax.stop_gradient(z) - q) ** 2)
        commit = jnp.mean((z - jax.lax.stop_gradient(q)) ** 2)
        return recon, vq, commit, idx


X = (load_digits().data / 8.0 - 1.0).astype(np.float32)
model = VQVAE()
params = model.init(jax.random.PRNGKey(0), X[:2])
tx = optax.adam(3e-3)
opt_state = tx.init(params)


def loss_fn(params, x):
    recon, vq, commit, idx = model.apply(params, x)
    rec = jnp.mean((recon - x) ** 2)
    return rec + vq + 0.25 * commit, (rec, idx)


@jax.jit
def step(params, opt_state, x):
    (loss, (rec, idx)), g = jax.value_and_grad(loss_fn, has_aux=True)(params, x)
    u, opt_state = tx.update(g, opt_state)
    return optax.apply_updates(params, u), opt_state, loss, rec, idx


rng = np.random.default_rng(0)
for i in range(300):
    params, opt_state, loss, rec, idx = step(params, opt_state, X[rng.integers(0, len(X), 128)])
    if i % 50 == 0 or i == 299:
        print(f"{i}: loss {loss:.4f} recon {rec:.4f} codes used {len(np.unique(idx))}")
print("pixel variance", X.var())
