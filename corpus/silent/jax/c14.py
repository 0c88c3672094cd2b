"""Small conv net, micro-batches of 16 accumulated 4x, linear warm-up from zero."""
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(16, (3, 3))(x))
        x = nn.max_pool(x, (2, 2), (2, 2))
        x = nn.relu(nn.Conv(32, (3, 3))(x))
        x = nn.max_pool(x, (2, 2), (2, 2))
        x = x.reshape(x.shape[0], -1)
        return nn.Dense(10)(x)


def create_state(key, micro):
    schedule = optax.linear_schedule(0.0, 4e-3, transition_steps=15)
    tx = optax.MultiSteps(optax.adam(schedule), every_k_schedule=micro)
    net = CNN()
    return TrainState.create(apply_fn=net.apply, params=net.init(key, jnp.ones((1, 8, 8, 1)))["params"], tx=tx)


@jax.jit
def micro_step(state, x, y):
    def loss_fn(p):
        logits = state.apply_fn({"params": p}, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


d = load_digits()
X = (d.images[..., None] / 16).astype(np.float32)
Y = d.target
rng = np.random.default_rng(0)
perm = rng.permutation(len(X))
X, Y = X[perm], Y[perm]
state = create_state(jax.random.PRNGKey(0), 4)
running = []
for i in range(300):
    j = rng.integers(0, 1500, 16)
    state, loss = micro_step(state, X[j], Y[j])
    running.append(float(loss))
    if (i + 1) % 40 == 0:
        print(f"micro {i + 1}  loss {np.mean(running[-40:]):.4f}")
acc = (state.apply_fn({"params": state.params}, X[1500:]).argmax(-1) == Y[1500:]).mean()
print("test accuracy", float(acc))
