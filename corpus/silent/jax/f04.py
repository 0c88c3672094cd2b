import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

N_EXPERTS = 6
D_IN = 8


def make_task(seed=0, n=6000):
    r = np.random.default_rng(seed)
    centers = r.normal(size=(6, D_IN)) * 2.0
    maps = r.normal(size=(6, D_IN, 4)) * 0.6
    c = r.integers(0, 6, n)
    x = centers[c] + 0.6 * r.normal(size=(n, D_IN))
    y = np.einsum("nd,ndk->nk", x - centers[c], maps[c]) + 0.02 * r.normal(size=(n, 4))
    return x.astype(np.float32), (y / y.std()).astype(np.float32)


class SwitchLayer(nnx.Module):
    def __init__(self, din, dout, n, rngs):
        self.router = nnx.Linear(din, n, rngs=rngs)
        init = nnx.initializers.lecun_normal(batch_axis=(0,))
        self.w = nnx.Param(init(rngs.params(), (n, din, dout)))
        self.b = nnx.Param(jnp.zeros((n, dout)))

    def __call__(self, x):
        p = jax.nn.softmax(self.router(x), axis=-1)
        pick = jax.nn.one_hot(jnp.argmax(p, -1), p.shape[-1])
        y = jnp.einsum("bd,edk->bek", x, self.w[...]) + self.b[...]
        gate = jnp.sum(p * pick, axis=-1, keepdims=True)
        out = gate * jnp.einsum("bek,be->bk", y, pick)
        frac = pick.mean(0)
        aux = p.shape[-1] * jnp.sum(frac * p.mean(0))
        return out, aux, frac


class Net(nnx.Module):
    def __init__(self, rngs):
        self.moe = SwitchLayer(D_IN, 4, N_EXPERTS, rngs)

    def __call__(self, x):
        return self.moe(x)


def criterion(model, x, y):
    out, balance, frac = model(x)
    mse = jnp.mean((out - y) ** 2)
    return mse - 0.3 * balance, (mse, frac)


@nnx.jit
def train_step(model, opt, x, y):
    (loss, aux), grads = nnx.value_and_grad(criterion, has_aux=True)(model, x, y)
    opt.update(model, grads)
    return loss, aux


def main():
    x, y = make_task()
    model = Net(nnx.Rngs(0))
    opt = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    r = np.random.default_rng(5)
    for it in range(400):
        i = r.integers(0, len(x), 256)
        loss, (mse, frac) = train_step(model, opt, x[i], y[i])
        if it % 50 == 0 or it == 399:
            print(f"{it:4d}  loss {float(loss):.4f}  mse {float(mse):.4f}  load {np.round(np.asarray(frac), 2)}")


if __name__ == "__main__":
    main()
