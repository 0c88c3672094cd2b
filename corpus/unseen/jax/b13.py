"""Click-through proportions modelled with a Beta likelihood (flax nnx)."""
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.scipy.stats import beta as beta_dist


class BetaNet(nnx.Module):
    def __init__(self, din, rngs: nnx.Rngs):
        self.l1 = nnx.Linear(din, 32, rngs=rngs)
        self.l2 = nnx.Linear(32, 32, rngs=rngs)
        self.head = nnx.Linear(32, 2, rngs=rngs)

    def __call__(self, x):
        h = nnx.gelu(self.l1(x))
        h = nnx.gelu(self.l2(h))
        o = nnx.softplus(self.head(h)) + 0.05
        return 1.0 + 3.0 * o[:, 0], 1.0 + 3.0 * o[:, 1]


def make_campaigns(n=800, seed=12):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 6)).astype(np.float32)
    rate = 1 / (1 + np.exp(-(0.5 * x[:, 0] - 0.4 * x[:, 1])))
    impressions = rng.integers(6, 60, size=n)
    clicks = rng.binomial(impressions, rate)
    return x, (clicks / impressions).astype(np.float32)


def nll(model, x, y):
    a, b = model(x)
    return -jnp.mean(beta_dist.logpdf(y, a, b))


@nnx.jit
def train_step(model, optimizer, x, y):
    loss, grads = nnx.value_and_grad(nll)(model, x, y)
    optimizer.update(model, grads)
    return loss


x, y = make_campaigns()
model = BetaNet(6, nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(2e-3), wrt=nnx.Param)
rng = np.random.default_rng(3)
history = []
for step in range(150):
    idx = rng.choice(len(y), size=16, replace=False)
    loss = float(train_step(model, optimizer, x[idx], y[idx]))
    history.append(loss)
    if step % 10 == 0:
        a, b = model(x)
        mae = float(jnp.mean(jnp.abs(a / (a + b) - y)))
        print(f"step {step:3d}  nll {loss:+.4f}  mae {mae:.4f}")
print("mean nll of the last ten steps:", np.mean(history[-10:]))
