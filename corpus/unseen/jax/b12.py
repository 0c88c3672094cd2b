"""Second-stage model: combine the raw features with the log-odds of a forest."""
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.scipy.special import logit
from sklearn.datasets import make_classification
from sklearn.ensemble import RandomForestClassifier
from sklearn.model_selection import train_test_split


class Stacker(eqx.Module):
    inp: eqx.nn.Linear
    out: eqx.nn.Linear
    alpha: jax.Array

    def __init__(self, d, key):
        a, b = jax.random.split(key)
        self.inp = eqx.nn.Linear(d, 24, key=a)
        self.out = eqx.nn.Linear(24, "scalar", key=b)
        self.alpha = jnp.array(1.0)

    def __call__(self, x, base):
        return self.out(jax.nn.silu(self.inp(x))) + self.alpha * base


def build():
    X, y = make_classification(1200, 16, n_informative=8, class_sep=1.4, random_state=2)
    Xa, Xb, ya, yb = train_test_split(X, y, test_size=0.5, random_state=0)
    forest = RandomForestClassifier(n_estimators=25, random_state=0).fit(Xa, ya)
    proba = forest.predict_proba(Xb)[:, 1]
    print("forest accuracy %.3f" % forest.score(Xb, yb))
    return Xb.astype(np.float32), proba.astype(np.float32), yb.astype(np.float32)


def loss_fn(model, x, base, y):
    z = jax.vmap(model)(x, base)
    return optax.sigmoid_binary_cross_entropy(z, y).mean()


@eqx.filter_jit
def make_step(model, opt_state, x, base, y):
    loss, grads = eqx.filter_value_and_grad(loss_fn)(model, x, base, y)
    updates, opt_state = optim.update(grads, opt_state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), opt_state, loss


X, proba, y = build()
base = logit(jnp.asarray(proba))
X = jnp.asarray((X - X.mean(0)) / X.std(0))
y = jnp.asarray(y)

model = Stacker(X.shape[1], jax.random.PRNGKey(0))
optim = optax.adam(1e-2)
opt_state = optim.init(eqx.filter(model, eqx.is_array))
rs = np.random.RandomState(0)
for step in range(80):
    idx = rs.randint(0, len(y), 32)
    model, opt_state, loss = make_step(model, opt_state, X[idx], base[idx], y[idx])
    if step % 8 == 0:
        print("step", step, "loss", float(loss), "alpha", float(model.alpha))
