# wine cultivar classification
import numpy as np
import jax, jax.numpy as jnp
from jax import random, grad, jit
from sklearn.datasets import load_wine

wine = load_wine()
idx = np.random.RandomState(0).permutation(178)
x_train = jnp.array(wine.data[idx[:130]], dtype=jnp.float32)
y_train = jnp.array(wine.target[idx[:130]])
x_test = jnp.array(wine.data[idx[130:]], dtype=jnp.float32)
y_test = jnp.array(wine.target[idx[130:]])

sizes = [13, 24, 24, 3]
keys = random.split(random.PRNGKey(0), 3)
params = [(random.normal(k, (m, n)) / jnp.sqrt(m), jnp.zeros(n))
          for k, m, n in zip(keys, sizes[:-1], sizes[1:])]

def predict(params, x):
    for w, b in params[:-1]:
        x = jnp.tanh(x @ w + b)
    w, b = params[-1]
    return x @ w + b

def loss(params, x, y):
    logp = jax.nn.log_softmax(predict(params, x))
    return -jnp.mean(logp[jnp.arange(y.shape[0]), y])

@jit
def update(params, x, y, lr):
    g = grad(loss)(params, x, y)
    return [(w - lr * dw, b - lr * db) for (w, b), (dw, db) in zip(params, g)]

for epoch in range(200):
    params = update(params, x_train, y_train, 0.2)
    if epoch % 25 == 0 or epoch == 199:
        print('epoch', epoch, 'loss', float(loss(params, x_train, y_train)))

acc = jnp.mean(jnp.argmax(predict(params, x_test), 1) == y_test)
print('test accuracy', float(acc))
