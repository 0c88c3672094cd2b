import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state

VOCAB, SEQ, DIM = 60, 16, 64


class Encoder(nn.Module):
    @nn.compact
    def __call__(self, tokens, train: bool):
        x = nn.Embed(VOCAB, DIM)(tokens)
        x = x + self.param("pos", nn.initializers.normal(0.02), (SEQ, DIM))
        for _ in range(1):
            h = nn.LayerNorm()(x)
            h = nn.SelfAttention(num_heads=4)(h)
            x = x + nn.Dropout(0.5, broadcast_dims=(0, 1), deterministic=not train)(h)
            h = nn.Dense(2 * DIM)(nn.LayerNorm()(x))
            h = nn.Dropout(0.5, broadcast_dims=(0, 1), deterministic=not train)(nn.gelu(h))
            x = x + nn.Dense(DIM)(h)
        x = nn.LayerNorm()(x).mean(axis=1)
        x = nn.gelu(nn.Dense(4 * DIM)(x))
        x = nn.Dropout(0.6, broadcast_dims=(0,), deterministic=not train)(x)
        return nn.Dense(6)(x)


class TrainState(train_state.TrainState):
    key: jax.Array


rng = np.random.default_rng(0)
topic = rng.dirichlet(np.ones(VOCAB) * 0.6, size=6)
cum = topic.cumsum(-1)


def corpus(n):
    y = rng.integers(0, 6, n)
    t = (rng.random((n, SEQ, 1)) > cum[y][:, None, :]).sum(-1).clip(0, VOCAB - 1)
    noise = rng.random((n, SEQ)) < 0.35
    t = np.where(noise, rng.integers(0, VOCAB, (n, SEQ)), t)
    return jnp.asarray(t), jnp.asarray(y)


x_train, y_train = corpus(12000)
x_test, y_test = corpus(1000)

root_key = jax.random.PRNGKey(seed=0)
main_key, params_key, dropout_key = jax.random.split(key=root_key, num=3)
model = Encoder()
variables = model.init(params_key, x_train[:2], train=False)
state = TrainState.create(apply_fn=model.apply, params=variables["params"], key=dropout_key, tx=optax.adamw(2e-3))


@jax.jit
def train_step(state: TrainState, x, y):
    dropout_train_key = jax.random.fold_in(key=state.key, data=state.step)

    def loss_fn(params):
        logits = state.apply_fn({"params": params}, x, train=True, rngs={"dropout": dropout_train_key})
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


@jax.jit
def evaluate(state, x, y):
    logits = state.apply_fn({"params": state.params}, x, train=False)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


for step in range(240):
    idx = rng.integers(0, len(y_train), 64)
    state, loss = train_step(state, x_train[idx], y_train[idx])
    if step % 50 == 0 or step == 239:
        print(f"step {step} train loss {float(loss):.4f} test loss {float(evaluate(state, x_test, y_test)):.4f}")
print("FINAL", float(evaluate(state, x_test, y_test)))
