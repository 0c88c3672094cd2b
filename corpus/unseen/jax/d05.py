"""Natural policy gradient on a contextual bandit made out of iris (reward 1 for the right species)."""
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from sklearn.datasets import load_iris

X, y = load_iris(return_X_y=True)
X = ((X - X.mean(0)) / X.std(0)).astype(np.float32)
rng = np.random.RandomState(7)


class Policy:
    def __init__(self, key, d_in=4, hidden=8, n_actions=3):
        k1, k2 = jax.random.split(key)
        self.params = {
            "w1": jax.random.normal(k1, (d_in, hidden)) / np.sqrt(d_in),
            "b1": jnp.zeros(hidden),
            "w2": 0.1 * jax.random.normal(k2, (hidden, n_actions)),
            "b2": jnp.zeros(n_actions),
        }

    @staticmethod
    def logits(p, x):
        return jnp.tanh(x @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]


policy = Policy(jax.random.PRNGKey(0))
flat, unflatten = ravel_pytree(policy.params)


def surrogate(theta, x, a, adv):
    lp = jax.nn.log_softmax(Policy.logits(unflatten(theta), x))
    return jnp.mean(adv * jnp.take_along_axis(lp, a[:, None], 1)[:, 0])


def mean_kl(theta, theta_old, x):
    lp = jax.nn.log_softmax(Policy.logits(unflatten(theta), x))
    lq = jax.nn.log_softmax(Policy.logits(unflatten(theta_old), x))
    return jnp.mean(jnp.sum(jnp.exp(lq) * (lq - lp), -1))


def fisher_vp(theta, x, v, damping=0.05):
    grad_kl = lambda t: jax.grad(mean_kl)(t, theta, x)
    return jax.jvp(grad_kl, (theta,), (v,))[1] + damping * v


def conjugate_gradient(avp, b, iters=10):
    def body(_, carry):
        sol, r, p, rr = carry
        ap = avp(p)
        alpha = rr / jnp.vdot(p, ap)
        sol = sol + alpha * p
        r = r - alpha * ap
        rr_new = jnp.vdot(r, r)
        return sol, r, r + (rr_new / rr) * p, rr_new
    init = (jnp.zeros_like(b), b, b, jnp.vdot(b, b))
    return jax.lax.fori_loop(0, iters, body, init)[0]


@jax.jit
def npg_update(theta, x, a, adv, delta=0.15):
    g = jax.grad(surrogate)(theta, x, a, adv)
    avp = lambda v: fisher_vp(theta, x, v)
    direction = conjugate_gradient(avp, g)
    step = jnp.sqrt(2 * delta / jnp.vdot(direction, avp(direction)))
    return theta + step * direction


@jax.jit
def act(theta, x, key):
    return jax.random.categorical(key, Policy.logits(unflatten(theta), x))


theta, key = flat, jax.random.PRNGKey(5)
for it in range(60):
    idx = rng.choice(len(X), 48, replace=False)
    key, k = jax.random.split(key)
    a = act(theta, X[idx], k)
    reward = (np.asarray(a) == y[idx]).astype(np.float32)
    adv = reward - reward.mean()
    theta = npg_update(theta, X[idx], a, adv)
    if it % 4 == 0:
        greedy = np.asarray(Policy.logits(unflatten(theta), X)).argmax(1)
        print(f"iter {it:2d} reward {reward.mean():.3f} greedy acc {(greedy == y).mean():.3f} |theta| {float(jnp.linalg.norm(theta)):.3f}")
