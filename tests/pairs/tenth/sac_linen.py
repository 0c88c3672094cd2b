"""One SAC update (both critics, actor and temperature in one step): PyTorch, and flax.linen."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn.functional as F

import stablenum_jax
import stablenum_torch

OBS, ACT, HIDDEN, BATCH = 6, 2, 20, 16
GAMMA, TARGET_ENTROPY = 0.99, -float(ACT)
LOG_STD_MIN, LOG_STD_MAX = -5.0, 2.0
LR, DECAY = 1e-3, 1e-2


def make_batch():
    rng = np.random.default_rng(2)
    obs = rng.normal(size=(BATCH, OBS))
    actions = np.tanh(rng.normal(size=(BATCH, ACT)))
    rewards = rng.normal(size=BATCH)
    next_obs = obs + 0.3 * rng.normal(size=(BATCH, OBS))
    dones = rng.random(BATCH) < 0.25
    noise = rng.normal(size=(2, BATCH, ACT))
    arrays = (obs, actions, rewards, next_obs, dones, noise[0], noise[1])
    return [a.astype(np.float32) for a in arrays]


def make_targets():
    rng = np.random.default_rng(77)
    sizes = ((OBS + ACT, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, 1))
    layer = lambda i, o: (
        (rng.normal(size=(i, o)) / np.sqrt(i)).astype(np.float32),
        (0.1 * rng.normal(size=o)).astype(np.float32),
    )
    return [[layer(i, o) for i, o in sizes] for _ in range(2)]


# ----------------------------------------------------------------- PyTorch


class SoftQNetwork(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = torch.nn.Linear(OBS + ACT, HIDDEN)
        self.fc2 = torch.nn.Linear(HIDDEN, HIDDEN)
        self.fc3 = torch.nn.Linear(HIDDEN, 1)

    def forward(self, x, a):
        x = torch.cat([x, a], 1)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x)


class Actor(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = torch.nn.Linear(OBS, HIDDEN)
        self.fc2 = torch.nn.Linear(HIDDEN, HIDDEN)
        self.fc_mean = torch.nn.Linear(HIDDEN, ACT)
        self.fc_logstd = torch.nn.Linear(HIDDEN, ACT)

    def forward(self, x):
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        log_std = torch.tanh(self.fc_logstd(x))
        log_std = LOG_STD_MIN + 0.5 * (LOG_STD_MAX - LOG_STD_MIN) * (log_std + 1)
        return self.fc_mean(x), log_std

    def get_action(self, x, eps):
        mean, log_std = self(x)
        normal = torch.distributions.Normal(mean, log_std.exp())
        u = mean + log_std.exp() * eps
        log_prob = normal.log_prob(u).sum(1, keepdim=True)
        log_prob -= (2 * (math.log(2) - u - F.softplus(-2 * u))).sum(1, keepdim=True)
        return torch.tanh(u), log_prob


class SAC(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = Actor()
        self.qf1 = SoftQNetwork()
        self.qf2 = SoftQNetwork()
        self.log_alpha = torch.nn.Parameter(torch.tensor(-1.2))

    def critic_loss(self, obs, actions, rewards, next_obs, dones, next_eps, target1, target2):
        with torch.no_grad():
            next_actions, next_log_pi = self.actor.get_action(next_obs, next_eps)
            qf1_next = torch.func.functional_call(self.qf1, target1, (next_obs, next_actions))
            qf2_next = torch.func.functional_call(self.qf2, target2, (next_obs, next_actions))
            min_qf_next = torch.min(qf1_next, qf2_next) - self.log_alpha.exp() * next_log_pi
            next_q = rewards + (1 - dones) * GAMMA * min_qf_next.view(-1)
        qf1_loss = F.mse_loss(self.qf1(obs, actions).view(-1), next_q)
        qf2_loss = F.mse_loss(self.qf2(obs, actions).view(-1), next_q)
        return qf1_loss + qf2_loss

    def actor_and_alpha_loss(self, obs, eps):
        pi, log_pi = self.actor.get_action(obs, eps)
        critics = [*self.qf1.parameters(), *self.qf2.parameters()]
        for p in critics:
            p.requires_grad_(False)
        min_qf_pi = torch.min(self.qf1(obs, pi), self.qf2(obs, pi))
        for p in critics:
            p.requires_grad_(True)
        alpha = self.log_alpha.exp()
        actor_loss = (alpha.detach() * log_pi - min_qf_pi).mean()
        alpha_loss = (-alpha * (log_pi.detach() + TARGET_ENTROPY)).mean()
        return actor_loss + alpha_loss


# ----------------------------------------------------------------- JAX


class Critic(nn.Module):
    @nn.compact
    def __call__(self, observations, actions):
        x = jnp.concatenate([observations, actions], axis=-1)
        for size in (HIDDEN, HIDDEN):
            x = nn.relu(nn.Dense(size)(x))
        return nn.Dense(1)(x).squeeze(-1)


class DoubleCritic(nn.Module):
    def setup(self):
        self.q1 = Critic()
        self.q2 = Critic()

    def __call__(self, observations, actions):
        return self.q1(observations, actions), self.q2(observations, actions)


class Policy(nn.Module):
    @nn.compact
    def __call__(self, observations):
        x = observations
        for size in (HIDDEN, HIDDEN):
            x = nn.relu(nn.Dense(size)(x))
        mean = nn.Dense(ACT, name="mean")(x)
        squashed = jnp.tanh(nn.Dense(ACT, name="log_std")(x))
        middle, half = (LOG_STD_MAX + LOG_STD_MIN) / 2, (LOG_STD_MAX - LOG_STD_MIN) / 2
        return mean, middle + half * squashed


def sample(policy_params, observations, noise):
    mean, log_std = Policy().apply({"params": policy_params}, observations)
    pre_tanh = mean + jnp.exp(log_std) * noise
    gaussian = -0.5 * noise**2 - log_std - 0.5 * np.log(2 * np.pi)
    squash = 2 * np.log(2.0) + jax.nn.log_sigmoid(2 * pre_tanh) + jax.nn.log_sigmoid(-2 * pre_tanh)
    return jnp.tanh(pre_tanh), jnp.sum(gaussian - squash, axis=-1)


def q_values(critic_params, observations, actions):
    return DoubleCritic().apply({"params": critic_params}, observations, actions)


def td_targets(params, target_params, rewards, next_obs, dones, noise):
    next_actions, next_logp = sample(params["actor"], next_obs, noise)
    q1, q2 = q_values(target_params, next_obs, next_actions)
    value = jnp.minimum(q1, q2) - jnp.exp(params["log_alpha"]) * next_logp
    return jax.lax.stop_gradient(rewards + GAMMA * (1.0 - dones) * value)


def sac_loss(params, obs, actions, rewards, next_obs, dones, noise, next_noise, target_params):
    # critics
    y = td_targets(params, target_params, rewards, next_obs, dones, next_noise)
    q1, q2 = q_values(params["critic"], obs, actions)
    critic_loss = jnp.mean((q1 - y) ** 2 + (q2 - y) ** 2)

    # actor
    frozen = jax.lax.stop_gradient(params["critic"])
    new_actions, logp = sample(params["actor"], obs, noise)
    q1_pi, q2_pi = q_values(frozen, obs, new_actions)
    alpha = jnp.exp(params["log_alpha"])
    actor_loss = jnp.mean(jax.lax.stop_gradient(alpha) * logp - jnp.minimum(q1_pi, q2_pi))

    # temperature
    gap = jax.lax.stop_gradient(logp + TARGET_ENTROPY)
    alpha_loss = -jnp.mean(alpha * gap)
    return critic_loss + actor_loss + alpha_loss


def decay_mask(params):
    mask = jax.tree.map(lambda _: True, params)
    return {**mask, "log_alpha": False}


# ----------------------------------------------------------------- the pair


def left():
    torch.manual_seed(0)
    agent = SAC()
    nets = [p for name, p in agent.named_parameters() if name != "log_alpha"]
    optimizer = torch.optim.AdamW(
        [{"params": nets}, {"params": [agent.log_alpha], "weight_decay": 0.0}], lr=LR, weight_decay=DECAY
    )

    def loss_fn(obs, actions, rewards, next_obs, dones, eps, next_eps, target1, target2):
        qf_loss = agent.critic_loss(obs, actions, rewards, next_obs, dones, next_eps, target1, target2)
        return qf_loss + agent.actor_and_alpha_loss(obs, eps)

    targets = [
        {
            name: tensor
            for i, (w, b) in enumerate(layers, 1)
            for name, tensor in ((f"fc{i}.weight", torch.tensor(w.T.copy())), (f"fc{i}.bias", torch.tensor(b)))
        }
        for layers in make_targets()
    ]
    batch = [torch.tensor(a) for a in make_batch()]
    return stablenum_torch.program(loss_fn, *batch, *targets, model=agent, optimizer=optimizer)


def right():
    k1, k2 = jax.random.split(jax.random.key(5))
    batch = [jnp.asarray(a) for a in make_batch()]
    params = {
        "actor": Policy().init(k1, batch[0])["params"],
        "critic": DoubleCritic().init(k2, batch[0], batch[1])["params"],
        "log_alpha": jnp.array(-1.2),
    }
    target_params = {
        f"q{i}": {
            f"Dense_{j}": {"kernel": jnp.asarray(w), "bias": jnp.asarray(b)} for j, (w, b) in enumerate(layers)
        }
        for i, layers in enumerate(make_targets(), 1)
    }
    optimizer = optax.adamw(LR, weight_decay=DECAY, mask=decay_mask)
    return stablenum_jax.program(sac_loss, params, *batch, target_params, optimizer=optimizer)
