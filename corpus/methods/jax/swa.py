"""Stochastic weight averaging, with the statistics of batch normalisation computed again at the end."""
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train, momentum=0.9):
        for width, stride in ((16, 1), (32, 2), (32, 1)):
            x = nn.Conv(width, (3, 3), strides=stride, use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=momentum)(x))
        return nn.Dense(10)(x.mean((1, 2)))


def main(epochs=14, swa_start=9, batch=64):
    d = load_digits()
    r = np.random.default_rng(0)
    order = r.permutation(len(d.images))
    x, y = d.images[order, ..., None].astype(np.float32) / 16, d.target[order]
    net = Net()
    variables = net.init(jax.random.key(0), x[:1], True)
    params, stats = variables["params"], variables["batch_stats"]
    per_epoch = 1400 // batch
    rate = optax.join_schedules(
        [optax.cosine_decay_schedule(0.1, epochs * per_epoch), optax.constant_schedule(0.05)], [swa_start * per_epoch])
    tx = optax.chain(optax.add_decayed_weights(5e-4), optax.sgd(rate, momentum=0.9, nesterov=True))
    state = tx.init(params)

    @jax.jit
    def step(params, stats, state, x, y):
        def loss_fn(params):
            logits, new = net.apply({"params": params, "batch_stats": stats}, x, True, mutable=["batch_stats"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), new["batch_stats"]

        (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), stats, state, loss

    @jax.jit
    def renew(params, stats, x, n):
        """The mean over the batches seen so far."""
        _, new = net.apply({"params": params, "batch_stats": stats}, x, True, 0.0, mutable=["batch_stats"])
        return jax.tree.map(lambda s, b: s + (b - s) / n, stats, new["batch_stats"])

    def accuracy(params, stats):
        logits = net.apply({"params": params, "batch_stats": stats}, x[1400:], False)
        return float((logits.argmax(1) == y[1400:]).mean())

    average, n = params, 0
    for epoch in range(epochs):
        order, total = r.permutation(1400), 0.0
        for i in range(per_epoch):
            pick = order[i * batch : (i + 1) * batch]
            params, stats, state, loss = step(params, stats, state, x[pick], y[pick])
            total += float(loss) / per_epoch
        if epoch >= swa_start:
            n += 1
            average = jax.tree.map(lambda a, p: a + (p - a) / n, average, params)
        if epoch % 3 == 0:
            print(f"epoch {epoch:2d} loss {total:.4f} test {accuracy(params, stats):.3f}")
    averaged_stats = stats
    for i in range(per_epoch):
        averaged_stats = renew(average, averaged_stats, x[i * batch : (i + 1) * batch], i + 1)
    print(f"test accuracy {accuracy(params, stats):.3f} averaged {accuracy(average, averaged_stats):.3f}")


if __name__ == "__main__":
    main()
