"""Mean teacher on the digits: 120 labelled images, the rest unlabelled. The teacher is a moving average."""
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

DECAY = 0.97


class MLP(nnx.Module):
    def __init__(self, rngs):
        self.fc1 = nnx.Linear(64, 128, rngs=rngs)
        self.fc2 = nnx.Linear(128, 128, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.fc1(x))
        x = self.drop(nnx.relu(self.fc2(x)))
        return self.out(x)


def student_loss(student, teacher, xl, yl, xu, weight):
    supervised = optax.softmax_cross_entropy_with_integer_labels(student(xl), yl).mean()
    target = jax.lax.stop_gradient(jax.nn.softmax(teacher(xu)))
    consistency = jnp.mean((jax.nn.softmax(student(xu)) - target) ** 2)
    return supervised + weight * consistency, consistency


@nnx.jit
def train_step(student, teacher, optimizer, xl, yl, xu, weight):
    (loss, cons), grads = nnx.value_and_grad(student_loss, has_aux=True)(student, teacher, xl, yl, xu, weight)
    optimizer.update(student, grads)
    new = jax.tree.map(lambda t, s: DECAY * t + (1 - DECAY) * s,
                       nnx.state(teacher, nnx.Param), nnx.state(student, nnx.Param))
    nnx.update(teacher, new)
    return loss, cons


@nnx.jit
def accuracy(model, x, y):
    return (model(x).argmax(-1) == y).mean()


rng = np.random.default_rng(0)
x, y = load_digits(return_X_y=True)
x = (x / 16).astype(np.float32)
labelled, unlabelled, test = np.arange(120), np.arange(120, 1400), np.arange(1400, 1797)

student = MLP(nnx.Rngs(0, dropout=1))
teacher = MLP(nnx.Rngs(0, dropout=2))
teacher.eval()
optimizer = nnx.Optimizer(student, optax.adam(2e-3), wrt=nnx.Param)

for step in range(240):
    li, ui = rng.choice(labelled, 32), rng.choice(unlabelled, 96)
    noisy = x[ui] + 0.1 * rng.normal(size=(96, 64)).astype(np.float32)
    weight = jnp.float32(20.0 * min(1.0, step / 100))
    loss, cons = train_step(student, teacher, optimizer, x[li], y[li], noisy, weight)
    if step % 30 == 29:
        print(f"step {step + 1:3d} loss {loss:.3f} consistency {cons:.5f} teacher acc {accuracy(teacher, x[test], y[test]):.3f}")
student.eval()
print(f"student acc {accuracy(student, x[test], y[test]):.3f}, teacher acc {accuracy(teacher, x[test], y[test]):.3f}")
