import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import random
from jax.nn import softplus

N_TRAIN, BATCH, EPOCHS = 2048, 128, 20


def rings(n, seed):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 3, n)
    r = 0.6 + 0.7 * y + 0.12 * rng.normal(size=n)
    th = rng.uniform(0, 2 * np.pi, n)
    x = np.stack([r * np.cos(th), r * np.sin(th)], 1)
    return jnp.asarray(x, jnp.float32), jnp.asarray(y)


x_train, y_train = rings(N_TRAIN, 0)
x_test, y_test = rings(1000, 1)


class BayesianDense:
    """Mean-field Gaussian weights, N(0, 1) prior."""

    def __init__(self, n_in, n_out):
        self.n_in, self.n_out = n_in, n_out

    def init(self, key):
        mu = random.normal(key, (self.n_in + 1, self.n_out)) * np.sqrt(2.0 / self.n_in)
        return {"mu": mu.at[-1].set(0.0), "rho": jnp.full_like(mu, -4.0)}

    def apply(self, p, key, x):
        sigma = softplus(p["rho"])
        w = p["mu"] + sigma * random.normal(key, p["mu"].shape)
        kl = jnp.sum(0.5 * (sigma ** 2 + p["mu"] ** 2 - 1.0) - jnp.log(sigma))
        return x @ w[:-1] + w[-1], kl


LAYERS = [BayesianDense(2, 48), BayesianDense(48, 48), BayesianDense(48, 3)]


def forward(params, key, x):
    kl_total = 0.0
    for i, (layer, p) in enumerate(zip(LAYERS, params)):
        x, kl = layer.apply(p, random.fold_in(key, i), x)
        kl_total += kl
        if i < len(LAYERS) - 1:
            x = jax.nn.relu(x)
    return x, kl_total


def elbo_loss(params, key, x, y):
    logits, kl = forward(params, key, x)
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
    return nll + kl / N_TRAIN, (nll, kl)


opt = optax.adam(5e-3)


@jax.jit
def update(params, state, key, x, y):
    grads, aux = jax.grad(elbo_loss, has_aux=True)(params, key, x, y)
    up, state = opt.update(grads, state)
    return optax.apply_updates(params, up), state, aux


params = [l.init(k) for l, k in zip(LAYERS, random.split(random.PRNGKey(0), 3))]
state, key, perm_rng = opt.init(params), random.PRNGKey(1), np.random.default_rng(3)
for epoch in range(EPOCHS):
    order = perm_rng.permutation(N_TRAIN)
    for i in range(0, N_TRAIN, BATCH):
        key, sub = random.split(key)
        b = order[i:i + BATCH]
        params, state, (nll, kl) = update(params, state, sub, x_train[b], y_train[b])
    if epoch % 2 == 0:
        print(f"epoch {epoch:2d}  nll {float(nll):.4f}  kl {float(kl):.2f}  elbo loss {float(nll + kl):.3f}")

probs = jnp.mean(jax.vmap(lambda k: jax.nn.softmax(forward(params, k, x_test)[0]))(random.split(random.PRNGKey(9), 30)), 0)
print("test error", float(jnp.mean(probs.argmax(-1) != y_test)))
print("FINAL", float(-jnp.mean(jnp.log(probs[jnp.arange(1000), y_test] + 1e-9))))
