"""Mean teacher: 150 labelled digits, the others only through a consistency term."""
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

N_LAB, STEPS, DECAY = 150, 200, 0.97


class Net(nnx.Module):
    def __init__(self, rngs):
        self.c1 = nnx.Conv(1, 12, (3, 3), rngs=rngs)
        self.c2 = nnx.Conv(12, 16, (3, 3), strides=2, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.fc = nnx.Linear(256, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.c2(nnx.relu(self.c1(x))))
        return self.fc(self.drop(x.reshape(x.shape[0], -1)))


student, teacher = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
teacher.eval()
optimizer = nnx.Optimizer(student, optax.adam(3e-3), wrt=nnx.Param)


@nnx.jit
def step(student, teacher, optimizer, xl, yl, xu, noise, weight):
    target = nnx.softmax(teacher(xu))

    def loss_fn(net):
        ce = optax.softmax_cross_entropy_with_integer_labels(net(xl), yl).mean()
        consistency = ((nnx.softmax(net(xu + noise)) - target) ** 2).sum(-1).mean()
        return ce + weight * consistency, (ce, consistency)

    (_, parts), grads = nnx.value_and_grad(loss_fn, has_aux=True)(student)
    optimizer.update(student, grads)
    old, new = nnx.state(teacher, nnx.Param), nnx.state(student, nnx.Param)
    nnx.update(teacher, jax.tree.map(lambda a, b: DECAY * a + (1 - DECAY) * b, old, new))
    return parts


d = load_digits()
x, y = (d.images[..., None] / 16).astype("float32"), d.target
rng = np.random.default_rng(0)
perm = rng.permutation(len(x))
lab, unl, test = perm[:N_LAB], perm[N_LAB:1400], perm[1400:]
for t in range(STEPS):
    i, j = rng.choice(lab, 32), rng.choice(unl, 64)
    noise = 0.15 * rng.normal(size=(64, 8, 8, 1)).astype("float32")
    ce, cons = step(student, teacher, optimizer, x[i], y[i], x[j], noise, jnp.float32(min(1.0, t / 80)))
    if t % 20 == 0 or t == STEPS - 1:
        acc = float((teacher(jnp.asarray(x[test])).argmax(-1) == y[test]).mean())
        print(f"{t:3d} ce {float(ce):.4f} consistency {float(cons):.4f} teacher acc {acc:.3f}")
