import jax
import jax.numpy as jnp
import numpy as np
import optax
from functools import partial
from sklearn.datasets import load_digits

# deep equilibrium classifier, z* = tanh(W z* + U x), Anderson forward and backward

HID, MEM, ITERS = 24, 3, 7


def cell(p, x, z):
    return jnp.tanh(p["W"] @ z + p["U"] @ x)


def anderson(f, z0, m=MEM, iters=ITERS, beta=1.0):
    zs = [z0, f(z0)]
    fs = [zs[1], f(zs[1])]
    for k in range(2, iters):
        n = min(k, m)
        R = jnp.stack([fi - zi for fi, zi in zip(fs[-n:], zs[-n:])])
        A = jnp.zeros((n + 1, n + 1))
        A = A.at[0, 1:].set(1.0).at[1:, 0].set(1.0).at[1:, 1:].set(R @ R.T)
        rhs = jnp.zeros(n + 1).at[0].set(1.0)
        w = jnp.linalg.solve(A, rhs)[1:]
        z = beta * w @ jnp.stack(fs[-n:]) + (1 - beta) * w @ jnp.stack(zs[-n:])
        zs.append(z)
        fs.append(f(z))
    return fs[-1]


@partial(jax.custom_vjp)
def equilibrium(p, x):
    return anderson(lambda z: cell(p, x, z), jnp.zeros(HID))


def eq_fwd(p, x):
    z = equilibrium(p, x)
    return z, (p, x, z)


def eq_bwd(res, ct):
    p, x, z = res
    _, vjp_z = jax.vjp(lambda q: cell(p, x, q), z)
    u = anderson(lambda v: vjp_z(v)[0] + ct, ct)
    _, vjp_px = jax.vjp(lambda pp, xx: cell(pp, xx, z), p, x)
    return vjp_px(u)


equilibrium.defvjp(eq_fwd, eq_bwd)


def init_params(key, d, c):
    ks = jax.random.split(key, 3)
    return {"W": 0.6 * jax.random.normal(ks[0], (HID, HID)) / np.sqrt(HID),
            "U": jax.random.normal(ks[1], (HID, d)) / np.sqrt(d),
            "V": jax.random.normal(ks[2], (c, HID)) / np.sqrt(HID)}


def logits_of(p, xb):
    cp = {k: p[k] for k in ("W", "U")}
    return jax.vmap(lambda x: p["V"] @ equilibrium(cp, x))(xb)


def loss_fn(p, xb, yb):
    lg = logits_of(p, xb)
    return optax.softmax_cross_entropy_with_integer_labels(lg, yb).mean()


digits = load_digits()
X = (digits.data / 16.0).astype(np.float32)
y = digits.target
# the forms also have boxes nobody wrote in: class 10 = empty
rs = np.random.RandomState(0)
X = np.concatenate([X, np.zeros((6, 64), np.float32)])
y = np.concatenate([y, np.full(6, 10)])
mix = rs.permutation(len(y))
X, y = X[mix], y[mix]
p = init_params(jax.random.PRNGKey(2), 64, 11)
tx = optax.adamw(5e-3, weight_decay=1e-2)
opt_state = tx.init(p)
vg = jax.jit(jax.value_and_grad(loss_fn))
for it in range(40):
    idx = rs.randint(0, 1500, 48)
    loss, g = vg(p, X[idx], y[idx])
    up, opt_state = tx.update(g, opt_state, p)
    p = optax.apply_updates(p, up)
    if it % 5 == 0:
        print("it %2d loss %.4f |g| %.4f |W|2 %.3f" % (it, loss, optax.global_norm(g), np.linalg.norm(p["W"])))
test = logits_of(p, X[1500:])
print("test accuracy", float((test.argmax(1) == y[1500:]).mean()))
