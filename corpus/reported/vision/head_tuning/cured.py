import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState


class Backbone(nn.Module):
    @nn.compact
    def __call__(self, x):
        for c in (8, 16):
            x = nn.Conv(c, (3, 3))(x)
            x = nn.GroupNorm(num_groups=4)(x)
            x = nn.relu(x)
            x = nn.max_pool(x, (2, 2), (2, 2))
        return x.mean((1, 2))


class Classifier(nn.Module):
    classes: int

    @nn.compact
    def __call__(self, x):
        x = Backbone(name="backbone")(x)
        return nn.Dense(self.classes, name="head")(x)


def textures(n, freqs, seed):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, len(freqs), n)
    f = np.asarray(freqs)[y]
    yy, xx = np.mgrid[0:12, 0:12]
    ph = rng.uniform(0, 6.28, (n, 1, 1))
    arg = f[:, 0, None, None] * xx + f[:, 1, None, None] * yy + ph
    img = np.sin(arg)[..., None] + 0.7 * rng.normal(size=(n, 12, 12, 1))
    return jnp.asarray(img, jnp.float32), jnp.asarray(y)


def ce(params, apply_fn, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(apply_fn({"params": params}, x), y).mean()


@jax.jit
def train_step(state, x, y):
    loss, grads = jax.value_and_grad(ce)(state.params, state.apply_fn, x, y)
    return state.apply_gradients(grads=grads), loss


def fit(state, x, y, steps, tag):
    rng = np.random.default_rng(0)
    for i in range(steps):
        idx = rng.integers(0, len(y), 32)
        state, loss = train_step(state, x[idx], y[idx])
        if i % 30 == 0:
            print(tag, i, float(loss))
    return state


upstream = [(0.4, 0.0), (0.0, 0.4), (1.2, 0.0), (0.0, 1.2), (0.8, 0.8), (0.8, -0.8), (2.0, 0.5), (0.5, 2.0)]
downstream = [(0.7, 0.2), (0.2, 0.7), (1.5, 0.4), (1.2, -1.2)]
x0, y0 = textures(3000, upstream, 0)
x1, y1 = textures(600, downstream, 1)
xv, yv = textures(600, downstream, 2)

pre = Classifier(len(upstream))
p = pre.init(jax.random.PRNGKey(0), x0[:1])["params"]
state = fit(TrainState.create(apply_fn=pre.apply, params=p, tx=optax.adam(8e-3)), x0, y0, 120, "pretrain")

model = Classifier(len(downstream))
params = model.init(jax.random.PRNGKey(1), x1[:1])["params"]
params = {**params, "backbone": state.params["backbone"]}
trainable = {k: jax.tree_util.tree_map(lambda _: k == "head", v) for k, v in params.items()}
frozen = jax.tree_util.tree_map(lambda t: not t, trainable)
tx = optax.chain(optax.clip_by_global_norm(1.0), optax.masked(optax.adam(1e-2), trainable),
                 optax.masked(optax.set_to_zero(), frozen))
state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
state = fit(state, x1, y1, 120, "finetune")
logits = model.apply({"params": state.params}, xv)
print("val acc", float((logits.argmax(-1) == yv).mean()))
print("FINAL", float(ce(state.params, model.apply, xv, yv)))
