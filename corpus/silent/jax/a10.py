from functools import partial
import jax, jax.numpy as jnp, numpy as np, optax
import flax.linen as nn
from sklearn.datasets import load_digits


class ConvBN(nn.Module):
    features: int
    stride: int = 1

    @nn.compact
    def __call__(self, x, train):
        x = nn.Conv(self.features, (3, 3), strides=self.stride, use_bias=False)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        return nn.relu(x)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = ConvBN(12)(x, train)
        x = ConvBN(24, 2)(x, train)
        x = ConvBN(24, 2)(x, train)
        return nn.Dense(10)(x.reshape(x.shape[0], -1))


class Trainer:
    def __init__(self, lr):
        self.net = Net()
        v = self.net.init(jax.random.PRNGKey(0), jnp.zeros((1, 8, 8, 1)), False)
        self.params, self.stats = v["params"], v["batch_stats"]
        self.tx = optax.sgd(lr, momentum=0.9, nesterov=True)
        self.opt = self.tx.init(self.params)

    @partial(jax.jit, static_argnums=0)
    def _step(self, params, stats, opt, x, y):
        def f(p):
            logits, new = self.net.apply({"params": p, "batch_stats": stats}, x, True, mutable=["batch_stats"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), new["batch_stats"]

        (loss, new_stats), g = jax.value_and_grad(f, has_aux=True)(params)
        up, opt = self.tx.update(g, opt, params)
        return optax.apply_updates(params, up), new_stats, opt, loss

    def fit_epoch(self, loader):
        losses = []
        for x, y in loader:
            self.params, _, self.opt, loss = self._step(self.params, self.stats, self.opt, x, y)
            losses.append(float(loss))
        return np.mean(losses)

    def evaluate(self, x, y):
        logits = self.net.apply({"params": self.params, "batch_stats": self.stats}, x, False)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
        return float(loss), float((logits.argmax(1) == y).mean())


def loader(x, y, rng, bs=64):
    order = rng.permutation(len(x))
    return ((x[i], y[i]) for i in np.split(order[:len(x) // bs * bs], len(x) // bs))


d = load_digits()
x, y = d.images[..., None].astype("float32"), d.target
rng, trainer = np.random.default_rng(0), Trainer(0.03)
for epoch in range(6):
    train_loss = trainer.fit_epoch(loader(x[:1400], y[:1400], rng))
    print("epoch %d train %.4f val %.4f acc %.3f" % (epoch, train_loss, *trainer.evaluate(x[1400:], y[1400:])))
