import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import random
from sklearn.datasets import load_digits

layer_sizes = [64] + [80] * 8 + [10]


def layer(key, n_in, n_out):
    return random.normal(key, (n_in, n_out)) / n_in, jnp.zeros((n_out,))


def network(key, sizes):
    keys = random.split(key, len(sizes))
    return [layer(k, m, n) for k, m, n in zip(keys, sizes[:-1], sizes[1:])]


def predict(params, image):
    a = image
    for w, b in params[:-1]:
        a = jax.nn.relu(jnp.dot(a, w) + b)
    w, b = params[-1]
    logits = jnp.dot(a, w) + b
    return logits - jax.nn.logsumexp(logits)


batched_predict = jax.vmap(predict, in_axes=(None, 0))


def loss(params, images, targets):
    return -jnp.mean(jnp.sum(batched_predict(params, images) * targets, axis=1))


def accuracy(params, images, labels):
    return jnp.mean(jnp.argmax(batched_predict(params, images), axis=1) == labels)


opt = optax.sgd(0.05, momentum=0.9)


@jax.jit
def update(params, opt_state, images, targets):
    value, grads = jax.value_and_grad(loss)(params, images, targets)
    delta, opt_state = opt.update(grads, opt_state)
    return optax.apply_updates(params, delta), opt_state, value


digits = load_digits()
images = jnp.asarray((digits.data - 4.88) / 6.02, jnp.float32)
labels = jnp.asarray(digits.target)
onehot = jax.nn.one_hot(labels, 10)
params = network(random.PRNGKey(0), layer_sizes)
opt_state = opt.init(params)
rng = np.random.RandomState(0)
for epoch in range(10):
    order = rng.permutation(1536)
    for chunk in order.reshape(-1, 64):
        params, opt_state, value = update(params, opt_state, images[chunk], onehot[chunk])
    print(f"epoch {epoch} loss {float(value):.4f} held-out acc {float(accuracy(params, images[1536:], labels[1536:])):.3f}")
