# Disease progression as a continuous-time Markov chain, rates fitted by maximum likelihood.
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.scipy.linalg import expm

STATES = ["healthy", "mild", "severe"]


class Cohort:
    """Panel data: (state at visit, state at next visit, days between)."""

    def __init__(self, n=180, seed=3):
        rng = np.random.default_rng(seed)
        q = np.array([[-0.030, 0.030, 0.0], [0.012, -0.030, 0.018], [0.0, 0.010, -0.010]])
        self.src, self.dst, self.gap = [], [], []
        for _ in range(n):
            s = rng.integers(3)
            dt = rng.uniform(10, 120)
            if rng.random() < 0.012:
                dt = dt * 86400.0
            w, v = np.linalg.eig(q * dt)
            P = np.real(v @ np.diag(np.exp(w)) @ np.linalg.inv(v)).clip(0)
            d = rng.choice(3, p=P[s] / P[s].sum())
            self.src.append(s)
            self.dst.append(d)
            self.gap.append(dt)
        order = np.random.default_rng(0).permutation(n)
        self.src = np.array(self.src)[order]
        self.dst = np.array(self.dst)[order]
        self.gap = np.array(self.gap, np.float32)[order]

    def batches(self, size):
        while True:
            for i in range(0, len(self.src), size):
                yield self.src[i:i + size], self.dst[i:i + size], self.gap[i:i + size]


def generator(theta):
    r = jax.nn.softplus(theta)
    Q = jnp.zeros((3, 3))
    Q = Q.at[0, 1].set(r[0]).at[1, 0].set(r[1]).at[1, 2].set(r[2]).at[2, 1].set(r[3])
    return Q - jnp.diag(Q.sum(axis=1))


def nll(theta, s, d, gap):
    Q = generator(theta)
    P = jax.vmap(lambda t: expm(Q * t))(gap)
    pr = P[jnp.arange(s.shape[0]), s, d]
    return -jnp.mean(jnp.log(jnp.maximum(pr, 1e-8)))


@jax.jit
def train_step(theta, opt_state, s, d, gap):
    loss, g = jax.value_and_grad(nll)(theta, s, d, gap)
    upd, opt_state = tx.update(g, opt_state)
    return optax.apply_updates(theta, upd), opt_state, loss


cohort = Cohort()
theta = jnp.full((4,), -3.0)
tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.15))
opt_state = tx.init(theta)
stream = cohort.batches(20)
print("visits:", len(cohort.src), "median gap:", float(np.median(cohort.gap)))
for step in range(45):
    s, d, gap = next(stream)
    theta, opt_state, loss = train_step(theta, opt_state, s, d, gap)
    if not np.isfinite(float(loss)):
        raise FloatingPointError(f"nll became {float(loss)} at step {step}")
    if step % 3 == 0:
        print(f"step {step:02d} nll {float(loss):.4f} rates {np.array(jax.nn.softplus(theta)).round(4)}")
Q = generator(theta)
print("mean sojourn (days):", np.array(-1.0 / jnp.diag(Q)).round(1))
