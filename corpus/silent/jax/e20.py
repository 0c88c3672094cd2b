import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits


class AdaptedMLP(nnx.Module):
    def __init__(self, rank, rngs):
        self.l1 = nnx.Linear(64, 128, rngs=rngs)
        self.l2 = nnx.Linear(128, 128, rngs=rngs)
        self.l3 = nnx.Linear(128, 10, rngs=rngs)
        self.a1 = nnx.LoRA(64, rank, 128, rngs=rngs)
        self.a2 = nnx.LoRA(128, rank, 128, rngs=rngs)
        self.a3 = nnx.LoRA(128, rank, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.l1(x) + self.a1(x))
        x = nnx.relu(self.l2(x) + self.a2(x))
        return self.l3(x) + self.a3(x)


def make_step(kind):
    @nnx.jit
    def step(model, opt, x, y):
        def loss_fn(m):
            return optax.softmax_cross_entropy_with_integer_labels(m(x), y).mean()
        loss, grads = nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, kind))(model)
        opt.update(model, grads)
        return loss
    return step


class Phase:
    def __init__(self, model, kind, lr):
        self.model = model
        self.opt = nnx.Optimizer(model, optax.adam(lr), wrt=kind)
        self.step = make_step(kind)

    def run(self, x, y, steps, rng, name):
        for i in range(steps):
            s = rng.integers(0, len(x), 96)
            loss = self.step(self.model, self.opt, x[s], y[s])
            if i % 50 == 0 or i == steps - 1:
                print(f"{name:8s} step {i:3d} loss {float(loss):.4f}")


def accuracy(model, x, y):
    return float((model(x).argmax(-1) == y).mean())


def main():
    x, y = load_digits(return_X_y=True)
    x = ((x - x.mean()) / x.std()).astype(np.float32)
    mirrored = x.reshape(-1, 8, 8)[:, :, ::-1].reshape(-1, 64).copy()
    rng = np.random.default_rng(0)
    order = rng.permutation(len(x))
    tr, te = order[:1400], order[1400:]

    model = AdaptedMLP(rank=8, rngs=nnx.Rngs(0))
    is_base = nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam))
    Phase(model, is_base, 1e-3).run(x[tr], y[tr], 150, rng, "base")
    print("before adaptation", accuracy(model, mirrored[te], y[te]))
    Phase(model, nnx.LoRAParam, 2e-3).run(mirrored[tr], y[tr], 250, rng, "adapters")
    print("after adaptation", accuracy(model, mirrored[te], y[te]))


main()
