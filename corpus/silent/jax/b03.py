"""ConvNet with batch norm on the 8x8 digits."""
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


class Block(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x, train):
        x = nn.Conv(self.features, (3, 3), use_bias=False)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        return nn.relu(x)


class DigitNet(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = Block(16)(x, train)
        x = nn.max_pool(x, (2, 2), (2, 2))
        x = Block(32)(x, train)
        x = Block(32)(x, train)
        x = x.mean(axis=(1, 2))
        return nn.Dense(10)(x)


def load():
    d = load_digits()
    return train_test_split(d.images[..., None].astype(np.float32), d.target, test_size=0.25, random_state=0)


x_train, x_val, y_train, y_val = load()
net = DigitNet()
variables = net.init(jax.random.key(0), x_train[:2], train=True)
params, batch_stats = variables["params"], variables["batch_stats"]
tx = optax.adamw(3e-3, weight_decay=1e-4)
opt_state = tx.init(params)


@jax.jit
def train_step(params, batch_stats, opt_state, x, y):
    def loss_fn(p):
        logits, new_vars = net.apply({"params": p, "batch_stats": batch_stats}, x, train=True,
                                     mutable=["batch_stats"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), new_vars

    (loss, new_vars), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), batch_stats, opt_state, loss


@jax.jit
def evaluate(params, batch_stats, x, y):
    logits = net.apply({"params": params, "batch_stats": batch_stats}, x, train=False)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
    return loss, (logits.argmax(-1) == y).mean()


rng = np.random.default_rng(0)
for epoch in range(6):
    order = rng.permutation(len(x_train))
    for start in range(0, len(order) - 63, 64):
        b = order[start:start + 64]
        params, batch_stats, opt_state, loss = train_step(params, batch_stats, opt_state, x_train[b], y_train[b])
    vl, va = evaluate(params, batch_stats, x_val, y_val)
    print(f"epoch {epoch}  train loss {loss:.3f}  val loss {vl:.3f}  val acc {va:.3f}")
