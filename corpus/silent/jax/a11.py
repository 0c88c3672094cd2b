"""MLP on digits with flax nnx, cosine schedule, low memory weights."""
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

DTYPE = jnp.bfloat16


class Mlp(nnx.Module):
    def __init__(self, rngs):
        kw = dict(param_dtype=DTYPE, dtype=DTYPE, rngs=rngs)
        self.inp = nnx.Linear(64, 128, **kw)
        self.mid = nnx.Linear(128, 128, **kw)
        self.out = nnx.Linear(128, 10, **kw)

    def __call__(self, x):
        x = nnx.silu(self.inp(x))
        x = x + nnx.silu(self.mid(x))
        return self.out(x).astype(jnp.float32)


def criterion(model, x, y):
    logits = model(x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


@nnx.jit
def update(model, opt, x, y):
    loss, grads = nnx.value_and_grad(criterion)(model, x, y)
    opt.update(model, grads)
    return loss


def main(steps=300, batch=128):
    data = load_digits()
    x = ((data.data - data.data.mean()) / data.data.std()).astype("float32")
    y = data.target.astype("int32")
    model = Mlp(nnx.Rngs(5))
    schedule = optax.cosine_decay_schedule(5e-5, steps, alpha=0.2)
    opt = nnx.Optimizer(model, optax.adam(schedule), wrt=nnx.Param)
    gen = np.random.default_rng(5)
    history = []
    for step in range(steps):
        pick = gen.integers(0, 1500, batch)
        history.append(float(update(model, opt, x[pick], y[pick])))
        if (step + 1) % 30 == 0:
            print(f"step {step + 1}: loss {np.mean(history[-30:]):.4f}")
    correct = np.asarray(model(x[1500:]).argmax(-1)) == y[1500:]
    print("test accuracy", correct.mean().round(3))


if __name__ == "__main__":
    main()
