import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

TEXT = (
    "the quick brown fox jumps over the lazy dog while the small grey cat sleeps near the warm stove. "
    "every morning the baker opens the shop and sells bread to the people of the village. "
    "in the evening the lights go out and the river carries the sound of the mill down the valley. "
) * 20
CHARS = sorted(set(TEXT))
IDS = np.array([CHARS.index(c) for c in TEXT])


class CharModel(nn.Module):
    hidden: int = 128
    context: int = 12
    dtype: jnp.dtype = jnp.bfloat16

    @nn.compact
    def __call__(self, tok):
        kw = dict(dtype=self.dtype, param_dtype=self.dtype)
        e = nn.Embed(len(CHARS), 24, embedding_init=nn.initializers.normal(1.0), **kw)(tok)
        windows = [jnp.pad(e, ((0, 0), (k, 0), (0, 0)))[:, : e.shape[1]] for k in range(self.context)]
        h = jnp.concatenate(windows, -1)
        h = nn.gelu(nn.Dense(2 * self.hidden, **kw)(h))
        h = h + nn.Dense(2 * self.hidden, **kw)(nn.gelu(nn.Dense(self.hidden, **kw)(h)))
        h = nn.LayerNorm(**kw)(h)
        return nn.Dense(len(CHARS), **kw)(h).astype(jnp.float32)


def sample(rng, n, length=48):
    s = rng.integers(0, len(IDS) - length - 1, n)
    idx = s[:, None] + np.arange(length + 1)
    block = IDS[idx]
    return block[:, :-1], block[:, 1:]


@jax.jit
def train_step(state, x, y):
    def loss_fn(p):
        logits = state.apply_fn(p, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def main(steps=400):
    rng = np.random.default_rng(0)
    model = CharModel()
    params = model.init(jax.random.PRNGKey(0), jnp.zeros((1, 48), int))
    tx = optax.adam(optax.linear_schedule(1e-4, 5e-5, steps))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    history = []
    for i in range(steps):
        x, y = sample(rng, 24)
        state, loss = train_step(state, x, y)
        history.append(float(loss))
        if (i + 1) % 50 == 0:
            print(f"step {i + 1} loss {np.mean(history[-50:]):.4f}")


if __name__ == "__main__":
    main()
