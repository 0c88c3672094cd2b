"""Learning-rate population: 8 copies of the same net are trained in one vmap. The fast ones blow up,
stay in the population as NaN rows, get score -inf and are replaced by copies of survivors."""
import numpy as np
import jax
import jax.numpy as jnp
from sklearn.datasets import load_breast_cancer

POP, ROUNDS, STEPS = 8, 5, 30


def init(key):
    a, b = jax.random.split(key)
    return {"w1": jax.random.normal(a, (30, 16)) / 30 ** 0.5, "b1": jnp.zeros(16),
            "w2": jax.random.normal(b, (16, 1)) / 4.0, "b2": jnp.zeros(1)}


def net(p, x):
    h = jnp.square(jax.nn.relu(x @ p["w1"] + p["b1"]))
    return (h @ p["w2"] + p["b2"])[:, 0]


def loss_fn(p, x, y):
    return jnp.mean((net(p, x) - (2.0 * y - 1.0)) ** 2)


def sgd_member(p, lr, xs, ys):
    def body(p, xy):
        loss, g = jax.value_and_grad(loss_fn)(p, *xy)
        return jax.tree.map(lambda a, b: a - lr * b, p, g), loss
    return jax.lax.scan(body, p, (xs, ys))


train_population = jax.jit(jax.vmap(sgd_member, in_axes=(0, 0, None, None)))
scores = jax.jit(jax.vmap(lambda p, x, y: jnp.mean((net(p, x) > 0) == (y > 0.5))
                          + jnp.where(jnp.isfinite(loss_fn(p, x, y)), 0.0, -jnp.inf), in_axes=(0, None, None)))


def exploit(pop, lrs, score, rng):
    """dead members take weights and a perturbed rate from a member that is alive"""
    alive = np.flatnonzero(np.isfinite(score))
    source = np.arange(POP)
    lrs = lrs.copy()
    for i in range(POP):
        if not np.isfinite(score[i]):
            source[i] = rng.choice(alive)
            lrs[i] = lrs[source[i]] * rng.choice([0.6, 1.3])
    return jax.tree.map(lambda a: a[source], pop), lrs


def main():
    x, y = load_breast_cancer(return_X_y=True)
    x = ((x - x.mean(0)) / x.std(0)).astype(np.float32)
    rng = np.random.default_rng(0)
    perm = rng.permutation(len(y))
    tr, te = perm[:400], perm[400:]
    pop = jax.vmap(init)(jax.random.split(jax.random.PRNGKey(0), POP))
    lrs = np.logspace(-4, 0.5, POP).astype(np.float32)
    log = np.full((ROUNDS, POP), np.nan)
    for rnd in range(ROUNDS):
        idx = np.stack([rng.choice(tr, 40, replace=False) for _ in range(STEPS)])
        pop, losses = train_population(pop, lrs, x[idx], y[idx].astype(np.float32))
        score = np.asarray(scores(pop, x[te], y[te].astype(np.float32)))
        log[rnd] = np.asarray(losses)[:, -1]
        with np.printoptions(precision=3, suppress=True):
            print(f"round {rnd} rates {lrs}\n        last losses {log[rnd]}\n        scores {score}")
        if rnd + 1 < ROUNDS:
            pop, lrs = exploit(pop, lrs, score, rng)
    best = int(np.argmax(score))
    print(f"best rate {lrs[best]:.4f}, test accuracy {score[best]:.3f}, "
          f"{int(np.isneginf(score).sum())} members dead at the end, "
          f"{int((~np.isfinite(log)).sum())} deaths in all")
    assert score[best] > 0.9 and (~np.isfinite(log)).any()


if __name__ == "__main__":
    main()
