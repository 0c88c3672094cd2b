"""Deep equilibrium classifier: fixed point by while_loop, implicit gradient through custom_vjp."""
from functools import partial
import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import lax
from sklearn.datasets import load_iris


def solve(f, z0, tol=1e-4, max_iter=60):
    def cond(c):
        _, res, it = c
        return (res > tol) & (it < max_iter)

    def body(c):
        z, _, it = c
        new = f(z)
        return new, jnp.linalg.norm(new - z) / (jnp.linalg.norm(new) + 1e-6), it + 1

    z, res, it = lax.while_loop(cond, body, (z0, jnp.inf, 0))
    return z


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def fixed_point(f, args, z0):
    return solve(lambda z: f(args, z), z0)


def fp_fwd(f, args, z0):
    z = fixed_point(f, args, z0)
    return z, (args, z)


def fp_bwd(f, saved, zbar):
    args, z = saved
    _, vjp_z = jax.vjp(lambda zz: f(args, zz), z)
    u = solve(lambda w: zbar + vjp_z(w)[0], zbar)
    _, vjp_a = jax.vjp(lambda a: f(a, z), args)
    return vjp_a(u)[0], jnp.zeros_like(z)


fixed_point.defvjp(fp_fwd, fp_bwd)


def cell(args, z):
    W, inj = args
    return jnp.tanh(z @ W + inj)


class DEQ(eqx.Module):
    W: jax.Array
    inp: eqx.nn.Linear
    out: eqx.nn.Linear

    def __init__(self, key, width=24):
        a, b, c = jax.random.split(key, 3)
        self.W = 0.3 * jax.random.normal(a, (width, width)) / jnp.sqrt(width)
        self.inp = eqx.nn.Linear(4, width, key=b)
        self.out = eqx.nn.Linear(width, 3, key=c)

    def __call__(self, x):
        inj = jax.vmap(self.inp)(x)
        return jax.vmap(self.out)(fixed_point(cell, (self.W, inj), jnp.zeros_like(inj)))


def loss_fn(m, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(m(x), y).mean()


@eqx.filter_jit
def train_step(m, s, x, y):
    loss, g = eqx.filter_value_and_grad(loss_fn)(m, x, y)
    u, s = tx.update(g, s, eqx.filter(m, eqx.is_inexact_array))
    return eqx.apply_updates(m, u), s, loss


X, Y = load_iris(return_X_y=True)
X = jnp.asarray((X - X.mean(0)) / X.std(0), jnp.float32)
perm = jax.random.permutation(jax.random.PRNGKey(1), 150)
tr, va = perm[:110], perm[110:]
model = DEQ(jax.random.PRNGKey(0))
tx = optax.adam(1e-2)
state = tx.init(eqx.filter(model, eqx.is_inexact_array))
evaluate = eqx.filter_jit(loss_fn)
best, best_model, patience = float("inf"), model, 0
for it in range(150):
    model, state, loss = train_step(model, state, X[tr], Y[tr])
    val = float(evaluate(model, X[va], Y[va]))
    if val < best:
        best, best_model, patience = val, model, 0
    else:
        patience += 1
        if patience > 25:
            print("early stop at", it)
            break
    if it % 20 == 0:
        print(it, "train", float(loss), "val", val)
print("best val", best, "acc", float(jnp.mean(best_model(X[va]).argmax(-1) == Y[va])))
