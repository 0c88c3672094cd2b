"""Equinox MLP on the digits with a warm-up + cosine schedule."""
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits


class Classifier(eqx.Module):
    layers: list
    norm: eqx.nn.LayerNorm

    def __init__(self, key):
        a, b, c = jax.random.split(key, 3)
        self.layers = [eqx.nn.Linear(64, 64, key=a), eqx.nn.Linear(64, 64, key=b),
                       eqx.nn.Linear(64, 10, key=c)]
        self.norm = eqx.nn.LayerNorm(64)

    def __call__(self, x):
        x = jax.nn.gelu(self.layers[0](x))
        x = self.norm(x)
        x = jax.nn.gelu(self.layers[1](x))
        return self.layers[2](x)


class Trainer:
    def __init__(self, model, total_steps):
        sched = optax.warmup_cosine_decay_schedule(1e-5, 3e-3, total_steps // 10, total_steps, 1e-5)
        self.optim = optax.adamw(sched, weight_decay=1e-3)
        self.model = model
        self.opt_state = self.optim.init(eqx.filter(model, eqx.is_array))
        self._grad = eqx.filter_jit(eqx.filter_value_and_grad(self.loss))
        self._apply = eqx.filter_jit(self.apply_grads)

    @staticmethod
    def loss(model, x, y):
        logits = jax.vmap(model)(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    def apply_grads(self, model, grads):
        params = eqx.filter(model, eqx.is_array)
        opt_state = self.optim.init(params)
        updates, opt_state = self.optim.update(grads, opt_state, params)
        return eqx.apply_updates(model, updates), opt_state

    def fit_batch(self, x, y):
        loss, grads = self._grad(self.model, x, y)
        self.model, self.opt_state = self._apply(self.model, grads)
        return float(loss)


def run():
    d = load_digits()
    x = ((d.data - d.data.mean()) / d.data.std()).astype(np.float32)
    y = d.target
    rng = np.random.default_rng(1)
    p = rng.permutation(len(x))
    x, y = x[p], y[p]
    steps = 200
    tr = Trainer(Classifier(jax.random.PRNGKey(0)), steps)
    for i in range(steps):
        j = rng.integers(0, 1400, 64)
        loss = tr.fit_batch(jnp.asarray(x[j]), jnp.asarray(y[j]))
        if i % 25 == 0 or i == steps - 1:
            print(f"[{i:03d}] loss {loss:.3f}")
    acc = np.mean(np.argmax(jax.vmap(tr.model)(x[1400:]), -1) == y[1400:])
    print(f"held-out accuracy {acc:.3f}")


run()
