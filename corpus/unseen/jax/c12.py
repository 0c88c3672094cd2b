"""Deep equilibrium classifier on iris with Anderson acceleration in the forward pass."""
import functools
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_iris

HID, M, BETA = 16, 4, 1.0


def cell(params, z, x):
    return jnp.tanh(z @ params["W"] + x @ params["U"] + params["b"])


def anderson(f, z0, n_iter=16, lam=0.0):
    """z0: (d,) one sample"""
    d = z0.shape[0]
    Z = jnp.zeros((M, d)).at[0].set(z0)
    F = jnp.zeros((M, d)).at[0].set(f(z0))
    Z = Z.at[1].set(F[0])
    F = F.at[1].set(f(F[0]))
    for k in range(2, M):
        Z = Z.at[k].set(F[k - 1])
        F = F.at[k].set(f(Z[k]))

    def body(k, carry):
        Z, F = carry
        G = F - Z
        H = jnp.zeros((M + 1, M + 1)).at[0, 1:].set(1.0).at[1:, 0].set(1.0)
        H = H.at[1:, 1:].set(G @ G.T + lam * jnp.eye(M))
        rhs = jnp.zeros(M + 1).at[0].set(1.0)
        alpha = jnp.linalg.solve(H, rhs)[1:]
        z_new = BETA * alpha @ F + (1.0 - BETA) * alpha @ Z
        return Z.at[k % M].set(z_new), F.at[k % M].set(f(z_new))

    Z, F = jax.lax.fori_loop(M, n_iter, body, (Z, F))
    return F[(n_iter - 1) % M]


def equilibrium(params, x):
    def solve_one(xi):
        return anderson(lambda z: cell(params, z, xi), jnp.zeros(HID))
    z_star = jax.lax.stop_gradient(jax.vmap(solve_one)(x))
    for _ in range(3):
        z_star = cell(params, z_star, x)
    return z_star


def picard(params, x, n=40):
    z = jnp.zeros((len(x), HID))
    for _ in range(n):
        z = cell(params, z, x)
    return z


def loss_fn(params, x, y):
    z = equilibrium(params, x)
    logits = z @ params["V"] + params["c"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def init(key):
    a, b, c = jax.random.split(key, 3)
    return {"W": 0.5 * jax.random.normal(a, (HID, HID)) / np.sqrt(HID), "U": jax.random.normal(b, (4, HID)) / 2,
            "b": jnp.zeros(HID), "V": jax.random.normal(c, (HID, 3)) / 4, "c": jnp.zeros(3)}


tx = optax.adamw(1e-2, weight_decay=0.1)


@functools.partial(jax.jit)
def update(params, opt, x, y):
    loss, g = jax.value_and_grad(loss_fn)(params, x, y)
    u, opt = tx.update(g, opt, params)
    return optax.apply_updates(params, u), opt, loss


def main():
    X, y = load_iris(return_X_y=True)
    X = ((X - X.mean(0)) / X.std(0)).astype(np.float32)
    rng = np.random.RandomState(0)
    p = rng.permutation(150)
    tr, te = p[:110], p[110:]
    params = init(jax.random.PRNGKey(3))
    opt = tx.init(params)
    for i in range(60):
        b = rng.choice(tr, 32, replace=False)
        params, opt, loss = update(params, opt, X[b], y[b])
        if i % 6 == 0:
            z = picard(params, X[te])
            acc = ((z @ params["V"] + params["c"]).argmax(1) == y[te]).mean()
            res = jnp.abs(cell(params, z, X[te]) - z).max()
            print(f"{i:2d} loss {float(loss):.4f} acc {float(acc):.3f} residual {float(res):.2e}")
        if jnp.isnan(loss):
            raise FloatingPointError(f"loss became nan at update {i}")


if __name__ == "__main__":
    main()
