# linear / small-net SVM on iris, trained with sharpness aware minimisation
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from optax import contrib
from sklearn.datasets import load_iris


class SmallNet(nn.Module):
    width: int = 16

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(self.width)(x)
        x = nn.tanh(x)
        return nn.Dense(1)(x).squeeze(-1)


def hinge(params, x, t):
    out = model.apply(params, x)
    return jnp.mean(jnp.maximum(0.0, 1.0 - t * out))


def get_data():
    X, y = load_iris(return_X_y=True)
    X = (X - X.mean(0)) / X.std(0)
    t = np.where(y == 0, 1.0, -1.0)
    order = np.random.RandomState(2).permutation(len(X))
    X, t = X[order].astype(np.float32), t[order].astype(np.float32)
    return X[:110], t[:110], X[110:], t[110:]


xtr, ttr, xva, tva = get_data()
model = SmallNet()
params = model.init(jax.random.PRNGKey(8), xtr[:1])

base = optax.sgd(0.1, momentum=0.9)
ascent = optax.chain(contrib.normalize(), optax.sgd(0.05))
tx = contrib.sam(base, ascent, sync_period=2)
opt_state = tx.init(params)


@jax.jit
def update(params, opt_state, x, t):
    value, grads = jax.value_and_grad(hinge)(params, x, t)
    delta, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, delta), opt_state, value


@jax.jit
def val_accuracy(params):
    return jnp.mean(jnp.sign(model.apply(params, xva)) == tva)


rng = np.random.RandomState(0)
for epoch in range(10):
    idx = rng.permutation(len(xtr))
    losses = []
    for part in np.array_split(idx, 6):
        params, opt_state, value = update(params, opt_state, xtr[part], ttr[part])
        losses.append(float(value))
    norm = float(optax.global_norm(params))
    print(f"epoch {epoch} hinge {np.mean(losses):.5f} val acc {float(val_accuracy(params)):.3f} |params| {norm:.3f}")
