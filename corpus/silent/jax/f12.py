import pickle
import tempfile
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits


class DenoisingAE(nn.Module):
    code: int = 24

    @nn.compact
    def __call__(self, x):
        h = nn.gelu(nn.Dense(160)(x))
        z = nn.Dense(self.code)(h)
        h = nn.gelu(nn.Dense(160)(z))
        return nn.Dense(64)(h)


MODEL = DenoisingAE()
TX = optax.adam(1e-3)


def corrupt(rng, x, p):
    return x * (rng.random(x.shape) > p)


def make_step(reduce):
    @jax.jit
    def step(params, opt_state, noisy, clean):
        def f(p):
            return reduce((MODEL.apply(p, noisy) - clean) ** 2)
        loss, grads = jax.value_and_grad(f)(params)
        updates, opt_state = TX.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss
    return step


def save(path, params, opt_state):
    Path(path).write_bytes(pickle.dumps(jax.device_get((params, opt_state))))


def restore(path):
    return pickle.loads(Path(path).read_bytes())


def run(step, params, opt_state, x, iters, drop, rng, tag):
    for i in range(iters):
        xb = x[rng.integers(0, len(x), 128)]
        params, opt_state, loss = step(params, opt_state, corrupt(rng, xb, drop), xb)
        if i % 50 == 0 or i == iters - 1:
            print(f"{tag} {i:3d} loss {float(loss):.5f}")
    return params, opt_state


def mse(params, x):
    return float(jnp.mean((MODEL.apply(params, x) - x) ** 2))


def main():
    x = load_digits().data.astype(np.float32)
    x = (x - x.mean()) / x.std()
    rng = np.random.default_rng(0)
    ckpt = Path(tempfile.mkdtemp()) / "stage1.pkl"

    params = MODEL.init(jax.random.PRNGKey(0), x[:1])
    params, opt_state = run(make_step(jnp.sum), params, TX.init(params), x, 40, 0.4, rng, "stage1")
    save(ckpt, params, opt_state)
    print("after stage 1:", mse(params, x))

    params, opt_state = restore(ckpt)
    params, opt_state = run(make_step(jnp.mean), params, opt_state, x, 350, 0.05, rng, "stage2")
    print("after stage 2:", mse(params, x))


if __name__ == "__main__":
    main()
