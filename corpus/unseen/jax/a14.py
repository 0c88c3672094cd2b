"""House-price style regression; a corrupted upload in the stream is tolerated via apply_if_finite."""
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from sklearn.datasets import load_diabetes


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        for w in (64, 32):
            x = nn.relu(nn.Dense(w)(x))
            x = nn.Dropout(0.1, deterministic=not train)(x)
        return nn.Dense(1)(x)[:, 0]


def stream(seed, steps):
    X, y = load_diabetes(return_X_y=True)
    X = (X / X.std(0)).astype(np.float32)
    y = ((y - y.mean()) / y.std()).astype(np.float32)
    rng = np.random.default_rng(seed)
    for i in range(steps):
        sel = rng.integers(0, len(y), 64)
        xb, yb = X[sel].copy(), y[sel].copy()
        if i == 37:
            xb[5, 2] = np.inf
        yield xb, yb


@jax.jit
def train_step(state, x, y, key):
    def loss_fn(p):
        pred = state.apply_fn({"params": p}, x, train=True, rngs={"dropout": key})
        return optax.huber_loss(pred, y).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


model = MLP()
key = jax.random.PRNGKey(0)
params = jax.jit(lambda k: model.init(k, jnp.zeros((1, 10)), train=False)["params"])(key)
tx = optax.apply_if_finite(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(2e-3)),
                           max_consecutive_errors=5)
state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
history = []
for i, (xb, yb) in enumerate(stream(0, 150)):
    key, sub = jax.random.split(key)
    state, loss = train_step(state, xb, yb, sub)
    if np.isfinite(loss):
        history.append(float(loss))
    if i % 25 == 0:
        print(i, float(loss))
print("rejected updates:", int(state.opt_state.total_notfinite))
print("first 10:", np.mean(history[:10]), " last 10:", np.mean(history[-10:]))
assert all(bool(jnp.all(jnp.isfinite(p))) for p in jax.tree.leaves(state.params))
