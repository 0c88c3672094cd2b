# learnable prototypes on raw digits, annealed soft assignment with an entropy penalty
import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import xlogy
from sklearn.cluster import KMeans
from sklearn.datasets import load_digits

N_PROTO, N_CLASS = 20, 10


@jax.custom_vjp
def assign_entropy(scores):
    p = jax.nn.softmax(scores, axis=-1)
    return -xlogy(p, p).sum(-1)


def _ent_fwd(scores):
    p = jax.nn.softmax(scores, axis=-1)
    h = -xlogy(p, p).sum(-1)
    return h, (p, h)


def _ent_bwd(res, ct):
    p, h = res
    return (-ct[:, None] * p * (jnp.log(p) + h[:, None]),)


assign_entropy.defvjp(_ent_fwd, _ent_bwd)


def sq_dist(a, b):
    return (a ** 2).sum(1)[:, None] - 2 * a @ b.T + (b ** 2).sum(1)[None]


def forward(params, x, temp):
    scores = -sq_dist(x, params["proto"]) / temp
    q = jax.nn.softmax(scores, axis=-1)
    cls = jax.nn.log_softmax(params["cls"], axis=-1)
    return jax.nn.logsumexp(jnp.log(q + 1e-9)[:, :, None] + cls[None], axis=1), scores


def objective(params, x, y, temp, gamma=0.02):
    logp, scores = forward(params, x, temp)
    nll = -jnp.take_along_axis(logp, y[:, None], 1).mean()
    return nll + gamma * assign_entropy(scores).mean(), nll


@jax.jit
def sgd_step(params, vel, x, y, temp, lr):
    (_, nll), g = jax.value_and_grad(objective, has_aux=True)(params, x, y, temp)
    vel = jax.tree.map(lambda v, d: 0.8 * v + d, vel, g)
    new = {"proto": params["proto"] - 40 * lr * vel["proto"], "cls": params["cls"] - 4 * lr * vel["cls"]}
    return new, vel, nll


X, y = load_digits(return_X_y=True)
X = X.astype(np.float32)
rng = np.random.RandomState(0)
perm = rng.permutation(len(X))
tr, te = perm[:1200], perm[1200:]
km = KMeans(N_PROTO, n_init=1, random_state=0).fit(X[tr[:300]])
params = {"proto": jnp.asarray(km.cluster_centers_, jnp.float32),
          "cls": 0.01 * jax.random.normal(jax.random.PRNGKey(1), (N_PROTO, N_CLASS))}
vel = jax.tree.map(jnp.zeros_like, params)

total = 60
for it in range(total):
    temp = 200.0 * (4.0 / 200.0) ** (it / (total - 1))
    idx = rng.choice(tr, 64, replace=False)
    params, vel, nll = sgd_step(params, vel, X[idx], y[idx], temp, 0.5)
    if it % 6 == 0:
        lp, _ = forward(params, X[te], temp)
        print(f"it {it:2d} T {temp:7.2f} nll {float(nll):.4f} test acc {float((lp.argmax(1) == y[te]).mean()):.3f}")
    if not np.isfinite(nll):
        print("nll is", nll, "at iteration", it)
        break
else:
    print("finished")
if np.isnan(np.asarray(params["proto"])).any():
    raise SystemExit("prototypes are nan")
