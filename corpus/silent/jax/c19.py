"""Transfer learning: backbone pretrained on digits 0-4, frozen, new head for digits 5-9."""
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits


class Backbone(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(128)(x))
        return nn.relu(nn.Dense(128)(x))


class Model(nn.Module):
    def setup(self):
        self.backbone = Backbone()
        self.head = nn.Dense(5)

    def __call__(self, x):
        return self.head(self.backbone(x))


@jax.jit
def train_step(state, x, y):
    def loss_fn(p):
        return optax.softmax_cross_entropy_with_integer_labels(state.apply_fn({"params": p}, x), y).mean()

    loss, g = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=g), loss


def train(state, x, y, steps, tag, rng):
    for i in range(steps):
        j = rng.integers(0, len(x), 64)
        state, loss = train_step(state, x[j], y[j])
        if i % 30 == 0 or i == steps - 1:
            print(tag, i, f"{loss:.4f}")
    return state


def main():
    rng = np.random.default_rng(0)
    d = load_digits()
    x = (d.data / 16).astype(np.float32)
    low, high = d.target < 5, d.target >= 5
    model = Model()
    params = model.init(jax.random.PRNGKey(0), x[:1])["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(2e-3))
    state = train(state, x[low], d.target[low], 100, "pretrain", rng)

    params = dict(state.params)
    params["head"] = model.init(jax.random.PRNGKey(1), x[:1])["params"]["head"]
    labels = {k: jax.tree.map(lambda _: "frozen" if k == "backbone" else "train", v) for k, v in params.items()}
    tx = optax.multi_transform({"train": optax.adam(2e-2), "frozen": optax.set_to_zero()}, labels)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    xh, yh = x[high], d.target[high] - 5
    state = train(state, xh[:700], yh[:700], 200, "finetune", rng)
    acc = (state.apply_fn({"params": state.params}, xh[700:]).argmax(-1) == yh[700:]).mean()
    print("accuracy on new classes", float(acc))


if __name__ == "__main__":
    main()
