"""Small convolutional classifier with a pooled embedding."""
import jax, optax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits


class Backbone(nn.Module):
    @nn.compact
    def __call__(self, img):
        for width in (8, 12):
            img = nn.Conv(width, (3, 3))(img)
            img = nn.relu(img)
        img = nn.max_pool(img, (2, 2), strides=(2, 2))
        img = nn.Conv(12, (3, 3))(img)
        return nn.relu(img).mean(axis=(1, 2))


class Classifier(nn.Module):
    n_out: int

    def setup(self):
        self.backbone = Backbone()
        self.head = nn.Dense(self.n_out)

    def embed(self, img):
        return jax.lax.stop_gradient(self.backbone(img))

    def __call__(self, img):
        return self.head(self.embed(img))


@jax.jit
def step(state, img, label):
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, img)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()
        return loss, (logits.argmax(-1) == label).mean()

    (loss, acc), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads), loss, acc


def main(epochs=5, bs=64):
    d = load_digits()
    img = jnp.asarray(d.images[..., None] / 16.0, jnp.float32)
    lab = jnp.asarray(d.target)
    model = Classifier(10)
    variables = model.init(jax.random.PRNGKey(1), img[:1])
    state = TrainState.create(apply_fn=model.apply, params=variables["params"], tx=optax.adam(1e-2))
    rng = np.random.default_rng(1)
    for ep in range(epochs):
        perm = rng.permutation(len(lab))
        ls, ac = [], []
        for s in range(0, len(lab) - bs + 1, bs):
            ix = perm[s:s + bs]
            state, loss, acc = step(state, img[ix], lab[ix])
            ls.append(float(loss)), ac.append(float(acc))
        print(f"epoch {ep} loss {np.mean(ls):.4f} acc {np.mean(ac):.3f}")


main()
