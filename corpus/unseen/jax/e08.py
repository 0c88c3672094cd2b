import numpy as np
import jax
import jax.numpy as jnp
import flax.linen as nn
from flax.training import train_state
from flax import serialization
import optax
from sklearn.datasets import load_digits

# int8 quantisation aware fine tuning of a float residual MLP on digits


def fake_quant(w, bits=8):
    """per output channel symmetric fake quantisation, straight through"""
    qmax = 2 ** (bits - 1) - 1
    scale = jnp.max(jnp.abs(w), axis=0, keepdims=True) / qmax
    scale = jax.lax.stop_gradient(scale)
    q = jnp.clip(jnp.round(w / scale), -qmax, qmax) * scale
    return w + jax.lax.stop_gradient(q - w)


class QDense(nn.Module):
    features: int
    quantize: bool = False
    kernel_init: nn.initializers.Initializer = nn.initializers.lecun_normal()

    @nn.compact
    def __call__(self, x):
        w = self.param("kernel", self.kernel_init, (x.shape[-1], self.features))
        b = self.param("bias", nn.initializers.zeros, (self.features,))
        if self.quantize:
            w = fake_quant(w)
        return x @ w + b


class Block(nn.Module):
    width: int
    quantize: bool

    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm()(x)
        h = nn.gelu(QDense(self.width, self.quantize)(h))
        h = QDense(x.shape[-1], self.quantize, kernel_init=nn.initializers.zeros)(h)
        return x + h


class ResMLP(nn.Module):
    depth: int = 2
    quantize: bool = False

    @nn.compact
    def __call__(self, x):
        x = QDense(32, self.quantize)(x)
        for _ in range(self.depth):
            x = Block(48, self.quantize)(x)
        return QDense(10, self.quantize)(nn.LayerNorm()(x))


def new_state(depth, quantize, lr, seed=0):
    model = ResMLP(depth, quantize)
    params = model.init(jax.random.PRNGKey(seed), jnp.zeros((1, 64)))["params"]
    return train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(lr))


@jax.jit
def train_step(state, x, y):
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def run(state, x, y, steps, rng, tag):
    for i in range(steps):
        idx = rng.choice(len(y), 64, replace=False)
        state, loss = train_step(state, x[idx], y[idx])
        if i % 10 == 0:
            print(f"[{tag}] step {i:3d} loss {float(loss):.4f}")
        if not np.isfinite(float(loss)):
            raise FloatingPointError(f"[{tag}] loss {float(loss)} at step {i}")
    return state


if __name__ == "__main__":
    digits = load_digits()
    x = ((digits.data - 8.0) / 8.0).astype(np.float32)
    y = digits.target
    rng = np.random.default_rng(0)

    float_state = run(new_state(1, False, 3e-3), x, y, 30, rng, "float")
    blob = serialization.to_bytes(float_state.params)

    # deeper quantised student: the float blocks are copied, the extra block starts as identity
    qat = new_state(2, True, 1e-3)
    loaded = serialization.msgpack_restore(blob)
    merged = {**qat.params, **loaded}
    qat = qat.replace(params=jax.tree.map(jnp.asarray, merged))
    qat = run(qat, x, y, 40, rng, "qat")
    acc = (np.asarray(qat.apply_fn({"params": qat.params}, x)).argmax(-1) == y).mean()
    print("final accuracy", acc)
