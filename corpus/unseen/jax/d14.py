# Which class pair to practise next? An upper-confidence bandit picks the curriculum for a digit classifier.
import jax
import jax.numpy as jnp
import numpy as np
import optax
import equinox as eqx
from sklearn.datasets import load_digits

digits = load_digits()
X = (digits.data / 16).astype(np.float32)
y = digits.target
rng = np.random.default_rng(4)
perm = rng.permutation(len(X))
X, y = X[perm], y[perm]
Xtr, ytr, Xte, yte = X[:1300], y[:1300], X[1300:], y[1300:]

ARMS = [(0, 6), (1, 8), (2, 3), (3, 5), (3, 9), (4, 7), (5, 9), (8, 9), (1, 2), (0, 5)]


class Bandit:
    def __init__(self, n, c=0.4):
        self.sums, self.pulls, self.c = jnp.zeros(n), jnp.zeros(n), c

    def scores(self):
        total = jnp.maximum(self.pulls.sum(), 1.0)
        seen = self.pulls > 0
        n = jnp.where(seen, self.pulls, 1.0)
        ucb = self.sums / n + self.c * jnp.sqrt(jnp.log(total) / n)
        return jnp.where(seen, ucb, jnp.inf)

    def pick(self):
        return int(jnp.argmax(self.scores()))

    def record(self, arm, reward):
        self.sums = self.sums.at[arm].add(reward)
        self.pulls = self.pulls.at[arm].add(1.0)

    def means(self):
        return np.asarray(self.sums / self.pulls)


net = eqx.nn.MLP(64, 10, 32, 1, key=jax.random.PRNGKey(1))
tx = optax.adam(5e-3)
opt_state = tx.init(eqx.filter(net, eqx.is_array))


@eqx.filter_jit
def step(net, opt_state, x, t, allowed):
    def loss_fn(m):
        lg = jnp.where(allowed, jax.vmap(m)(x), -jnp.inf)
        return -jnp.mean(jax.nn.log_softmax(lg)[jnp.arange(x.shape[0]), t])
    loss, g = eqx.filter_value_and_grad(loss_fn)(net)
    upd, opt_state = tx.update(g, opt_state)
    return eqx.apply_updates(net, upd), opt_state, loss


@eqx.filter_jit
def test_logits(net, x):
    return jax.vmap(net)(x)


bandit = Bandit(len(ARMS))
last = np.full(len(ARMS), np.nan)
for it in range(60):
    arm = bandit.pick()
    pair = ARMS[arm]
    rows = rng.choice(np.flatnonzero(np.isin(ytr, pair)), 32)
    allowed = jnp.isin(jnp.arange(10), jnp.array(pair))
    net, opt_state, loss = step(net, opt_state, Xtr[rows], ytr[rows], allowed)
    bandit.record(arm, float(loss))
    last[arm] = float(loss)
    if it in (4, 9) or it % 15 == 14:
        print(f"it {it:2d} arm {pair} loss {float(loss):.3f} max score {float(bandit.scores().max()):.3f}")
        print("   mean reward per arm", bandit.means().round(2))
pairs_ok = []
lg = np.asarray(test_logits(net, Xte))
for a, b in ARMS:
    m = np.isin(yte, (a, b))
    pairs_ok.append(np.mean(np.where(lg[m, a] > lg[m, b], a, b) == yte[m]))
print("pair accuracies", np.round(pairs_ok, 3), "mean", round(float(np.mean(pairs_ok)), 3))
print("mean of last losses", np.nanmean(last))
