# Rating model: user and item embeddings over the full catalogue, of which this sample touches little.
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

N_USERS, N_ITEMS, DIM = 3000, 8000, 12


class RatingNet(nn.Module):
    @nn.compact
    def __call__(self, user, item):
        u = nn.Embed(N_USERS, DIM, name="users")(user)
        v = nn.Embed(N_ITEMS, DIM, name="items")(item)
        h = nn.relu(nn.Dense(32)(jnp.concatenate([u, v, u * v], axis=-1)))
        bias = nn.Embed(N_ITEMS, 1, embedding_init=nn.initializers.zeros, name="item_bias")(item)
        return nn.Dense(1)(h)[..., 0] + bias[..., 0]


def sample_ratings(rng, n):
    active_users = rng.choice(N_USERS, 60, replace=False)
    active_items = rng.choice(N_ITEMS, 80, replace=False)
    taste, style = rng.normal(size=(60, 2)), rng.normal(size=(80, 2))
    quality = rng.normal(size=80)
    ui = rng.integers(0, 60, n)
    ii = np.minimum(rng.geometric(0.05, n) - 1, 79)
    r = (taste[ui] * style[ii]).sum(1) * 0.7 + quality[ii] + 0.2 * rng.normal(size=n)
    return active_users[ui], active_items[ii], r.astype(np.float32)


@jax.jit
def train_step(state, u, i, r):
    def loss_fn(params):
        return jnp.mean((state.apply_fn(params, u, i) - r) ** 2)
    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


rng = np.random.default_rng(7)
users, items, ratings = sample_ratings(rng, 12000)
split = 10000
model = RatingNet()
params = model.init(jax.random.key(1), users[:2], items[:2])
state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-2))

for it in range(280):
    sel = rng.integers(0, split, 128)
    state, loss = train_step(state, users[sel], items[sel], ratings[sel])
    if it % 40 == 0:
        print(f"it {it:03d} batch mse {loss:.3f}")

pred = state.apply_fn(state.params, users[split:], items[split:])
print("held-out mse %.3f, variance of ratings %.3f" % (np.mean((pred - ratings[split:]) ** 2), ratings[split:].var()))
