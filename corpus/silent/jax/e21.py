import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits


class ConvNet(nnx.Module):
    def __init__(self, width, rngs, dtype=jnp.bfloat16):
        kw = dict(rngs=rngs, dtype=dtype, param_dtype=dtype)
        self.c1 = nnx.Conv(1, width, (3, 3), **kw)
        self.c2 = nnx.Conv(width, 2 * width, (3, 3), strides=2, **kw)
        self.c3 = nnx.Conv(2 * width, 2 * width, (3, 3), strides=2, **kw)
        self.fc = nnx.Linear(8 * width, 10, **kw)

    def __call__(self, x):
        x = nnx.relu(self.c1(x))
        x = nnx.relu(self.c2(x))
        x = nnx.relu(self.c3(x))
        return self.fc(x.reshape(x.shape[0], -1)).astype(jnp.float32)


class Trainer:
    def __init__(self, seed=0, lr=1e-4, batch=100):
        x, y = load_digits(return_X_y=True)
        x = (x.reshape(-1, 8, 8, 1) - 4.9) / 6.0
        self.rng = np.random.default_rng(seed)
        order = self.rng.permutation(len(x))
        self.x, self.y = x[order].astype(np.float32), y[order]
        self.n_train = 1500
        self.batch = batch
        self.model = ConvNet(12, nnx.Rngs(seed))
        self.opt = nnx.Optimizer(self.model, optax.adam(lr), wrt=nnx.Param)

    @staticmethod
    @nnx.jit
    def step(model, opt, x, y):
        def objective(m):
            return optax.softmax_cross_entropy_with_integer_labels(m(x), y).mean()
        loss, grads = nnx.value_and_grad(objective)(model)
        opt.update(model, grads)
        return loss

    def epoch(self):
        order = self.rng.permutation(self.n_train)
        losses = []
        for s in range(0, self.n_train, self.batch):
            i = order[s:s + self.batch]
            losses.append(float(self.step(self.model, self.opt, self.x[i], self.y[i])))
        return np.mean(losses)

    def evaluate(self):
        logits = self.model(jnp.asarray(self.x[self.n_train:]))
        return float((logits.argmax(-1) == self.y[self.n_train:]).mean())


trainer = Trainer()
for e in range(20):
    loss = trainer.epoch()
    if e % 3 == 0:
        print(f"epoch {e:02d} loss {loss:.4f} val acc {trainer.evaluate():.3f}")
print("final", trainer.evaluate())
