"""Which digit comes next on the slot machine? A neural contextual bandit on the digits data with UCB and closing arms."""
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

ARMS, ROUNDS, BATCH = 10, 700, 32


class Scorer(nnx.Module):
    def __init__(self, rngs):
        self.a = nnx.Linear(64, 48, rngs=rngs)
        self.b = nnx.Linear(48, ARMS, rngs=rngs)

    def __call__(self, x):
        return self.b(nnx.relu(self.a(x)))


class ArmStats:
    """pull counts and payouts; an arm that was never pulled has no mean"""

    def __init__(self):
        self.n = np.zeros(ARMS)
        self.total = np.zeros(ARMS)

    def add(self, arm, r):
        self.n[arm] += 1
        self.total[arm] += r

    def mean(self):
        with np.errstate(invalid="ignore"):
            return self.total / self.n

    def bonus(self, t, c=0.3):
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self.n > 0, c * np.sqrt(np.log(t + 1.0) / self.n), np.inf)


@nnx.jit
def score(model, x):
    return jax.nn.sigmoid(model(x))


@nnx.jit
def train(model, opt, x, arm, r):
    def loss_fn(m):
        z = jnp.take_along_axis(m(x), arm[:, None], 1)[:, 0]
        return optax.sigmoid_binary_cross_entropy(z, r).mean()
    loss, g = nnx.value_and_grad(loss_fn)(model)
    opt.update(model, g)
    return loss


@nnx.jit
def closed_policy(model, x, open_arms):
    logits = jnp.where(open_arms, 6.0 * model(x), -jnp.inf)
    p = jax.nn.softmax(logits, -1)
    safe = jnp.where(open_arms, jax.nn.log_softmax(logits, -1), 0.0)
    return p, -jnp.sum(p * safe, -1)


X, y = load_digits(return_X_y=True)
X = (X / 16.0).astype(np.float32)
rng = np.random.default_rng(9)
order = rng.permutation(len(X))
model = Scorer(nnx.Rngs(2))
opt = nnx.Optimizer(model, optax.adam(4e-3), wrt=nnx.Param)
stats = ArmStats()
log_x, log_a, log_r = [], [], []
best, loss = -np.inf, float("nan")

for t in range(ROUNDS):
    i = order[t % len(order)]
    open_arms = np.ones(ARMS, bool)
    open_arms[rng.choice(np.delete(np.arange(ARMS), y[i]), 3, replace=False)] = False
    open_arms[9] &= t >= 150
    value = np.asarray(score(model, X[i])) + stats.bonus(t)
    value = np.where(open_arms, value, -np.inf)
    arm = int(rng.choice(np.flatnonzero(value == value.max())))
    r = float(arm == y[i])
    stats.add(arm, r)
    log_x.append(X[i]); log_a.append(arm); log_r.append(r)
    if t >= BATCH:
        for _ in range(2):
            pick = rng.integers(0, len(log_x), BATCH)
            loss = float(train(model, opt, np.stack([log_x[k] for k in pick]),
                               np.array([log_a[k] for k in pick]), np.array([log_r[k] for k in pick], np.float32)))
    if t % 100 == 0:
        recent = float(np.mean(log_r[-100:]))
        best = max(best, recent if t else -np.inf)
        p, ent = closed_policy(model, X[i], open_arms)
        print(f"t {t:4d} loss {loss:.3f} recent {recent:.2f} best {best:.2f} entropy {float(ent):.3f}", np.round(stats.mean(), 2))

acc = float((np.asarray(score(model, X)).argmax(1) == y).mean())
print(f"final: reward rate {np.mean(log_r[-200:]):.2f}, accuracy of the greedy choice {acc:.3f}")
