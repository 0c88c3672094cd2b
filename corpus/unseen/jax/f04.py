"""REINFORCE with a value baseline on a cart-pole written from scratch (numpy env, flax policy)."""
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState


class Box:
    def __init__(self, low, high):
        self.low = np.asarray(low, np.float32)
        self.high = np.asarray(high, np.float32)


class CartPole:
    def __init__(self, seed=0):
        self.rng = np.random.default_rng(seed)
        lim = np.array([4.8, np.inf, 0.42, np.inf])
        self.observation_space = Box(-lim, lim)
        self.n_actions = 2

    def reset(self):
        self.s = self.rng.uniform(-0.05, 0.05, 4)
        self.t = 0
        return self.s.astype(np.float32)

    def step(self, a):
        x, xd, th, thd = self.s
        f = 10.0 if a == 1 else -10.0
        c, s = np.cos(th), np.sin(th)
        tmp = (f + 0.05 * thd ** 2 * s) / 1.1
        tha = (9.8 * s - c * tmp) / (0.5 * (4 / 3 - 0.1 * c * c / 1.1))
        xa = tmp - 0.05 * tha * c / 1.1
        self.s = self.s + 0.02 * np.array([xd, xa, thd, tha])
        self.t += 1
        done = abs(self.s[0]) > 2.4 or abs(self.s[2]) > 0.209 or self.t >= 200
        return self.s.astype(np.float32), 1.0, bool(done)


class RescaleObs:
    """map every observation into [-1, 1] using the bounds of the space"""

    def __init__(self, env):
        self.env = env
        self.lo, self.hi = env.observation_space.low, env.observation_space.high

    def _scale(self, o):
        frac = (o - self.lo) / (self.hi - self.lo)
        return 2.0 * frac - 1.0

    def reset(self):
        return self._scale(self.env.reset())

    def step(self, a):
        o, r, d = self.env.step(a)
        return self._scale(o), r, d


class ActorCritic(nn.Module):
    n_actions: int

    @nn.compact
    def __call__(self, o):
        h = nn.relu(nn.Dense(32)(o))
        h = nn.relu(nn.Dense(32)(h))
        return nn.Dense(self.n_actions)(h), nn.Dense(1)(h)[..., 0]


@jax.jit
def act(state, obs, key):
    logits, _ = state.apply_fn(state.params, obs)
    return jax.random.categorical(key, logits)


@jax.jit
def train_step(state, obs, actions, returns):
    def loss_fn(params):
        logits, v = state.apply_fn(params, obs)
        logp = jnp.take_along_axis(jax.nn.log_softmax(logits), actions[:, None], 1)[:, 0]
        adv = jax.lax.stop_gradient(returns - v)
        return -(logp * adv).mean() + 0.5 * jnp.square(returns - v).mean()
    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss, optax.global_norm(grads)


def rollout(env, state, key, gamma=0.98):
    obs, acts, rews = [], [], []
    o, done = env.reset(), False
    while not done:
        key, k = jax.random.split(key)
        a = int(act(state, o, k))
        obs.append(o)
        acts.append(a)
        o, r, done = env.step(a)
        rews.append(r)
    ret, g = np.zeros(len(rews), np.float32), 0.0
    for i in reversed(range(len(rews))):
        g = rews[i] + gamma * g
        ret[i] = g
    return np.array(obs), np.array(acts), ret / 10.0


env = RescaleObs(CartPole(seed=1))
net = ActorCritic(env.env.n_actions)
key = jax.random.PRNGKey(0)
state = TrainState.create(apply_fn=net.apply, params=net.init(key, jnp.zeros(4)), tx=optax.adam(1e-2))
for ep in range(40):
    key, k = jax.random.split(key)
    parts = [rollout(env, state, kk) for kk in jax.random.split(k, 3)]
    obs, acts, rets = (np.concatenate(c) for c in zip(*parts))
    n = 256 * int(np.ceil(len(obs) / 256))
    sel = np.resize(np.arange(len(obs)), n)
    state, loss, gnorm = train_step(state, obs[sel], acts[sel], rets[sel])
    if ep % 5 == 0:
        print(f"ep {ep} mean length {len(obs) / 3:.1f} loss {float(loss):.3f} |g| {float(gnorm):.3f}")
