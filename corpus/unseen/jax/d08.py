# DQN with Boltzmann exploration on a small ring world
import numpy as np
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from collections import deque
import random


class Ring:
    """12 cells, three moves (left, stay, right); goal pays 1, every episode has 25 moves."""
    n, goal = 12, 7

    def reset(self):
        self.pos, self.t = 0, 0
        return self.obs()

    def obs(self):
        a = 2 * np.pi * self.pos / self.n
        return np.array([np.sin(a), np.cos(a), np.sin(2 * a), np.cos(2 * a)], np.float32)

    def step(self, a):
        self.pos = (self.pos + a - 1) % self.n
        self.t += 1
        return self.obs(), float(self.pos == self.goal), self.t >= 25


class QNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(48)(x))
        x = nn.relu(nn.Dense(48)(x))
        return nn.Dense(3)(x)


class BoltzmannPolicy:
    def __init__(self, tau=1.0, decay=0.9, tau_min=0.01):
        self.tau, self.decay, self.tau_min = tau, decay, tau_min

    def select(self, q):
        e = np.exp(q / self.tau)
        probs = e / e.sum()
        return int(np.random.choice(len(q), p=probs))

    def anneal(self):
        self.tau = max(self.tau * self.decay, self.tau_min)


@jax.jit
def q_values(params, obs):
    return QNet().apply({"params": params}, obs)


@jax.jit
def learn(state, target, s, a, r, s2):
    def loss_fn(p):
        q = QNet().apply({"params": p}, s)[jnp.arange(len(a)), a]
        best = QNet().apply({"params": target}, s2).max(-1)
        return optax.huber_loss(q, r + 0.95 * best).mean()
    loss, g = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=g), loss


np.random.seed(0)
random.seed(0)
net = QNet()
params = net.init(jax.random.PRNGKey(0), jnp.zeros((1, 4)))["params"]
state = TrainState.create(apply_fn=net.apply, params=params, tx=optax.adam(3e-3))
target, memory, policy, env = state.params, deque(maxlen=2000), BoltzmannPolicy(), Ring()

for episode in range(45):
    s, done, total, loss = env.reset(), False, 0.0, 0.0
    while not done:
        a = policy.select(np.asarray(q_values(state.params, s)))
        s2, r, done = env.step(a)
        memory.append((s, a, r, s2))
        s, total = s2, total + r
        if len(memory) >= 64:
            batch = random.sample(memory, 64)
            bs, ba, br, bs2 = (np.stack(v) for v in zip(*batch))
            state, loss = learn(state, target, bs, ba, br.astype(np.float32), bs2)
    policy.anneal()
    if episode % 2 == 0:
        target = state.params
    if episode % 4 == 0:
        print(f"episode {episode:2d} return {total:4.0f} tau {policy.tau:.3f} loss {float(loss):.4f}")
