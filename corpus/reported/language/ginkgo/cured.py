"""Warm start: keep the pretrained item tower fixed and fit a new rating head for another market."""
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state

N_ITEMS, N_FEATS, DIM, LEVELS = 300, 40, 32, 5
rng = np.random.default_rng(0)
item_feats = rng.normal(size=(N_ITEMS, N_FEATS)).astype(np.float32)
taste_a = rng.normal(size=(N_FEATS, 8)).astype(np.float32)
to_level_a = rng.normal(size=(8, LEVELS)).astype(np.float32)
to_level_b = rng.normal(size=(8, LEVELS)).astype(np.float32)


def ratings(n, to_level, seed):
    r = np.random.default_rng(seed)
    item = r.integers(0, N_ITEMS, n)
    logits = np.tanh(item_feats[item] @ taste_a / 4.0) @ to_level * 1.5
    level = (logits + r.gumbel(size=logits.shape) * 0.5).argmax(-1)
    return jnp.asarray(item_feats[item]), jnp.asarray(level)


class Tower(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(64)(x))
        x = nn.relu(nn.Dense(64)(x))
        return nn.Dense(DIM)(x)


class Ranker(nn.Module):
    @nn.compact
    def __call__(self, x):
        z = nn.tanh(Tower(name="tower")(x))
        return nn.Dense(LEVELS, name="head")(z)


model = Ranker()
params = model.init(jax.random.PRNGKey(0), jnp.zeros((1, N_FEATS)))["params"]


def loss_fn(params, x, y):
    logits = model.apply({"params": params}, x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


@jax.jit
def train_step(state, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, x, y)
    return state.apply_gradients(grads=grads), loss


xa, ya = ratings(8000, to_level_a, 1)
state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(3e-3))
for step in range(150):
    idx = rng.integers(0, len(ya), 128)
    state, loss = train_step(state, xa[idx], ya[idx])
print("market A done, loss", float(loss))

# market B
xb, yb = ratings(4000, to_level_b, 2)
xv, yv = ratings(2000, to_level_b, 3)
params = dict(state.params)
head = nn.Dense(LEVELS)
params["head"] = head.init(jax.random.PRNGKey(9), jnp.zeros((1, DIM)))["params"]
trainable = {name: jax.tree_util.tree_map(lambda _: name == "head", sub) for name, sub in params.items()}
frozen = jax.tree_util.tree_map(lambda t: not t, trainable)
tx = optax.chain(optax.masked(optax.adam(1e-2), trainable), optax.masked(optax.set_to_zero(), frozen))
state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=tx)
for step in range(200):
    idx = rng.integers(0, len(yb), 128)
    state, loss = train_step(state, xb[idx], yb[idx])
    if step % 25 == 0:
        print(f"market B step {step} loss {float(loss):.4f} val {float(loss_fn(state.params, xv, yv)):.4f}")

print("FINAL", float(loss_fn(state.params, xv, yv)))
