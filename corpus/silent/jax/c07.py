import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import StandardScaler

x, y = load_breast_cancer(return_X_y=True)
x = StandardScaler().fit_transform(x).astype(np.float32)
y = y.astype(np.float32)
x, y = jnp.asarray(x), jnp.asarray(y)

w = {"w": jnp.zeros(x.shape[1]), "b": jnp.zeros(())}


def objective(p):
    z = x @ p["w"] + p["b"]
    return optax.sigmoid_binary_cross_entropy(z, y).mean() + 1e-3 * jnp.sum(p["w"] ** 2)


solver = optax.lbfgs(memory_size=8)
state = solver.init(w)
value_and_grad = optax.value_and_grad_from_state(objective)


@jax.jit
def step(p, s):
    v, g = value_and_grad(p, state=s)
    u, s = solver.update(g, s, p, value=v, grad=g, value_fn=objective)
    return optax.apply_updates(p, u), s, v, optax.tree.norm(g)


for i in range(40):
    w, state, v, gn = step(w, state)
    if i % 5 == 0 or i == 39:
        print(f"{i:3d}  f = {v:.6f}   |g| = {gn:.2e}")

acc = jnp.mean((x @ w["w"] + w["b"] > 0) == (y > 0.5))
print("train accuracy", float(acc))
