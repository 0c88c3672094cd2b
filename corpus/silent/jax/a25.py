"""Fit an image with a sinusoidal network (omega = 30) from pixel coordinates."""
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

OMEGA = 30.0


class Sine(nnx.Module):
    def __init__(self, n_in, n_out, *, first=False, rngs):
        bound = 1.0 / n_in if first else np.sqrt(6.0 / n_in) / OMEGA
        init = lambda key, shape, dtype, *_a, **_k: jax.random.uniform(key, shape, dtype, -bound, bound)
        self.linear = nnx.Linear(n_in, n_out, kernel_init=init, rngs=rngs)

    def __call__(self, x):
        return jnp.sin(OMEGA * self.linear(x))


class Siren(nnx.Module):
    def __init__(self, hidden, rngs):
        self.l1 = Sine(2, hidden, first=True, rngs=rngs)
        self.l2 = Sine(hidden, hidden, rngs=rngs)
        self.l3 = Sine(hidden, hidden, rngs=rngs)
        self.out = nnx.Linear(hidden, 1, rngs=rngs)

    def __call__(self, xy):
        return self.out(self.l3(self.l2(self.l1(xy))))[..., 0]


def picture(n=28):
    g = np.linspace(-1, 1, n)
    xx, yy = np.meshgrid(g, g)
    img = np.cos(14 * np.hypot(xx - 0.2, yy + 0.1)) * np.exp(-xx ** 2) + (np.abs(xx + yy) < 0.3) * 0.5
    return np.stack([xx.ravel(), yy.ravel()], 1).astype("float32"), img.ravel().astype("float32")


coords, values = picture()
net = Siren(64, nnx.Rngs(0))
opt = nnx.Optimizer(net, optax.adam(2e-4), wrt=nnx.Param)


@nnx.jit
def step(net, opt, coords, values):
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(coords) - values) ** 2))(net)
    opt.update(net, grads)
    return loss


for it in range(250):
    loss = step(net, opt, coords, values)
    if it % 25 == 0 or it == 249:
        print(f"iter {it:3d} mse {float(loss):.5f} psnr {-10 * np.log10(float(loss)):.2f} dB")
