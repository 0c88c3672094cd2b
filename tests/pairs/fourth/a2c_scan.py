"""Actor-critic with a target network and micro-batches: PyTorch against plain JAX with lax.scan."""
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn as nn
import torch.nn.functional as F

import stablenum_jax
import stablenum_torch

OBS, ACTIONS, HIDDEN = 6, 4, 24
BATCH, MICRO_BATCHES = 8, 4
GAMMA, BETA = 0.97, 0.5
VALUE_COEF, ENTROPY_COEF = 0.5, 0.02
LR, MAX_GRAD_NORM = 7e-3, 0.5


def make_batch():
    rng = np.random.default_rng(31)
    return {
        "obs": rng.normal(size=(BATCH, OBS)).astype(np.float32),
        "action": rng.integers(0, ACTIONS, size=(BATCH,)),
        "reward": (1.5 * rng.normal(size=(BATCH,))).astype(np.float32),
        "next_obs": rng.normal(size=(BATCH, OBS)).astype(np.float32),
        "done": np.array([0, 0, 1, 0, 0, 1, 0, 0], dtype=np.float32),
        "valid": np.array([1, 1, 1, 0, 1, 1, 1, 0], dtype=np.float32),
    }


# ---------------------------------------------------------------- PyTorch


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(OBS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh()
        )
        self.actor = nn.Linear(HIDDEN, ACTIONS)
        self.critic = nn.Linear(HIDDEN, 1)

    def forward(self, obs):
        features = self.body(obs)
        return self.actor(features), self.critic(features).squeeze(-1)


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.online = ActorCritic()
        self.target = ActorCritic()  # an older copy of the network
        self.target.requires_grad_(False)

    def loss(self, obs, action, reward, next_obs, done, valid):
        logits, value = self.online(obs)
        with torch.no_grad():
            _, next_value = self.target(next_obs)
            returns = reward + GAMMA * (1.0 - done) * next_value
        advantage = (returns - value).detach()
        log_probs = F.log_softmax(logits, dim=-1)
        chosen = log_probs.gather(1, action.unsqueeze(1)).squeeze(1)
        policy_loss = -chosen * advantage
        value_loss = F.smooth_l1_loss(value, returns, beta=BETA, reduction="none")
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        per_step = policy_loss + VALUE_COEF * value_loss - ENTROPY_COEF * entropy
        return (per_step * valid).sum()


class ClippedRMSprop(torch.optim.RMSprop):
    def __init__(self, params, max_grad_norm, **kwargs):
        super().__init__(params, **kwargs)
        self.max_grad_norm = max_grad_norm

    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(params, self.max_grad_norm)
        return super().step(closure)


def left():
    torch.manual_seed(0)
    agent = Agent()
    optimizer = ClippedRMSprop(
        agent.online.parameters(), MAX_GRAD_NORM, lr=LR, alpha=0.99, eps=0.01
    )
    batch = make_batch()

    def loss_fn(*batch):
        valid_steps = batch[-1].sum()
        total = 0.0
        for micro in zip(*(column.chunk(MICRO_BATCHES) for column in batch)):
            total = total + agent.loss(*micro) / valid_steps
        return total

    columns = [torch.tensor(column) for column in batch.values()]
    return stablenum_torch.program(loss_fn, *columns, model=agent, optimizer=optimizer)


# ---------------------------------------------------------------- JAX


def linear_init(key, n_in, n_out):
    return {"w": jax.random.normal(key, (n_in, n_out)) / np.sqrt(n_in), "b": jnp.zeros((n_out,))}


def net_init(key):
    k = jax.random.split(key, 4)
    return {
        "l0": linear_init(k[0], OBS, HIDDEN),
        "l1": linear_init(k[1], HIDDEN, HIDDEN),
        "pi": linear_init(k[2], HIDDEN, ACTIONS),
        "v": linear_init(k[3], HIDDEN, 1),
    }


def net(p, obs):
    h = jnp.tanh(jnp.dot(obs, p["l0"]["w"]) + p["l0"]["b"])
    h = jnp.tanh(jnp.dot(h, p["l1"]["w"]) + p["l1"]["b"])
    logits = jnp.dot(h, p["pi"]["w"]) + p["pi"]["b"]
    value = jnp.einsum("bh,ho->b", h, p["v"]["w"]) + p["v"]["b"][0]
    return logits, value


def step_losses(params, obs, action, reward, next_obs, done):
    logits, value = net(params["online"], obs)
    _, bootstrap = net(params["target"], next_obs)
    returns = jax.lax.stop_gradient(reward + jnp.where(done > 0, 0.0, GAMMA * bootstrap))
    log_pi = logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    log_pi_a = jnp.sum(jax.nn.one_hot(action, ACTIONS) * log_pi, axis=-1)
    actor = -log_pi_a * jax.lax.stop_gradient(returns - value)
    critic = optax.huber_loss(value, returns, delta=BETA) / BETA
    neg_entropy = jnp.sum(jnp.exp(log_pi) * log_pi, axis=-1)
    return actor + VALUE_COEF * critic + ENTROPY_COEF * neg_entropy


def clip_grads(max_norm, eps=1e-6):
    """torch.nn.utils.clip_grad_norm_, as an optax transformation"""

    def update(grads, state, params=None):
        norm = optax.global_norm(grads)
        factor = jnp.minimum(1.0, max_norm / (norm + eps))
        return jax.tree.map(lambda g: g * factor, grads), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def right():
    k_online, k_target = jax.random.split(jax.random.key(7))
    params = {"online": net_init(k_online), "target": net_init(k_target)}
    batch = make_batch()

    def loss_fn(params, *batch):
        valid_steps = jnp.sum(batch[-1])
        micro = jax.tree.map(lambda a: a.reshape(MICRO_BATCHES, -1, *a.shape[1:]), batch)

        def accumulate(total, columns):
            *inputs, valid = columns
            losses = step_losses(params, *inputs)
            return total + jnp.sum(losses * valid) / valid_steps, None

        total, _ = jax.lax.scan(accumulate, jnp.zeros(()), micro)
        return total

    optimizer = optax.chain(
        clip_grads(MAX_GRAD_NORM),
        optax.rmsprop(LR, decay=0.99, eps=0.01, eps_in_sqrt=False),
    )
    return stablenum_jax.program(loss_fn, params, *batch.values(), optimizer=optimizer)
