"""Alternating least squares for implicit feedback, one half-sweep per jit call."""
import numpy as np
import jax
import jax.numpy as jnp
from jax.scipy.linalg import cho_factor, cho_solve
from functools import partial


def toy_interactions(n_users=60, n_items=20, seed=11):
    rng = np.random.default_rng(seed)
    group = rng.integers(0, 4, n_users)
    shelf = rng.integers(0, 4, n_items)
    p = np.where(group[:, None] == shelf[None, :], 0.7, 0.08)
    counts = rng.poisson(3.0, size=p.shape) * (rng.random(p.shape) < p)
    return counts.astype(np.float32)


def confidence(counts, alpha):
    return 1.0 + alpha * jnp.asarray(counts)


class ImplicitALS:
    def __init__(self, factors=32, alpha=10.0, regularization=0.0, seed=0):
        self.factors = factors
        self.alpha = alpha
        self.reg = regularization
        self.key = jax.random.PRNGKey(seed)

    def fit(self, counts, sweeps=10, callback=None):
        n_users, n_items = counts.shape
        ku, ki = jax.random.split(self.key)
        self.U = 0.1 * jax.random.normal(ku, (n_users, self.factors))
        self.V = 0.1 * jax.random.normal(ki, (n_items, self.factors))
        C = confidence(counts, self.alpha)
        P = (jnp.asarray(counts) > 0).astype(jnp.float32)
        for sweep in range(sweeps):
            self.U = solve_side(self.V, C, P, self.reg)
            self.V = solve_side(self.U, C.T, P.T, self.reg)
            loss = objective(self.U, self.V, C, P, self.reg)
            if callback:
                callback(sweep, float(loss), self)
        return self


@partial(jax.jit, static_argnames="reg")
def solve_side(fixed, C, P, reg):
    k = fixed.shape[1]

    def one_row(c, p):
        A = (fixed * c[:, None]).T @ fixed + reg * jnp.eye(k)
        rhs = fixed.T @ (c * p)
        return cho_solve(cho_factor(A, lower=True), rhs)

    return jax.vmap(one_row)(C, P)


@jax.jit
def objective(U, V, C, P, reg):
    err = jnp.sum(C * (P - U @ V.T) ** 2)
    return (err + reg * (jnp.sum(U ** 2) + jnp.sum(V ** 2))) / P.size


def recall_at(model, held_out, seen, k=5):
    scores = np.array(model.U @ model.V.T)
    scores[seen > 0] = -np.inf
    top = np.argsort(-scores, axis=1)[:, :k]
    hits, total = 0, 0
    for u, items in held_out.items():
        hits += len(set(top[u]) & set(items))
        total += min(k, len(items))
    return hits / max(total, 1)


def main():
    counts = toy_interactions()
    rng = np.random.default_rng(5)
    train, held_out = counts.copy(), {}
    for u in range(len(counts)):
        pos = np.flatnonzero(counts[u])
        if len(pos) > 2:
            out = rng.choice(pos, 1)
            train[u, out] = 0
            held_out[u] = out.tolist()

    def report(sweep, loss, model):
        print(f"sweep {sweep} objective {loss:.5f} recall@5 {recall_at(model, held_out, train):.3f}")
        if not np.isfinite(loss):
            raise ValueError("ALS objective is not finite")

    ImplicitALS().fit(train, callback=report)


if __name__ == "__main__":
    main()
