"""Recurrent PPO with masks for illegal actions: the GRU of DreamerV3, GAE, torch.distributions / linen and distrax."""

import distrax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from torch.distributions import Categorical

import stablenum_jax
import stablenum_torch

STEPS, ENVS, OBS, ACTIONS = 6, 4, 10, 5
WIDTH, HIDDEN = 16, 12
GAMMA, LAM = 0.97, 0.9
CLIP_COEF, VALUE_RANGE, ENT_COEF, VF_COEF = 0.2, 0.3, 0.02, 0.5
LR, ADAM_EPS, MAX_NORM, UPDATES = 3e-3, 1e-5, 0.5, 200


def make_batch():
    rng = np.random.default_rng(31)
    obs = rng.normal(size=(STEPS + 1, ENVS, OBS)).astype(np.float32)
    legal = rng.random((STEPS, ENVS, ACTIONS)) < 0.7
    actions = rng.integers(0, ACTIONS, size=(STEPS, ENVS))
    np.put_along_axis(legal, actions[..., None], True, axis=-1)
    rewards = rng.normal(size=(STEPS, ENVS)).astype(np.float32)
    # dones[t] says that obs[t] is the first of an episode
    dones = np.zeros((STEPS + 1, ENVS), np.float32)
    dones[0, 1] = dones[2, 0] = dones[4, 1] = dones[5, 3] = 1.0
    old_logp = -np.log(legal.sum(-1)) + 0.3 * rng.normal(size=(STEPS, ENVS))
    old_values = 0.5 * rng.normal(size=(STEPS, ENVS))
    memory = 0.5 * rng.normal(size=(ENVS, HIDDEN))
    return obs, legal, actions, rewards, dones, *(a.astype(np.float32) for a in (old_logp, old_values, memory))


# ---------------------------------------------------------------- PyTorch


def layer_init(layer, gain=np.sqrt(2), bias=0.0):
    torch.nn.init.orthogonal_(layer.weight, gain)
    torch.nn.init.constant_(layer.bias, bias)
    return layer


class GRUCell(torch.nn.Module):
    def __init__(self, inp_size, size, update_bias=-1.0):
        super().__init__()
        self.layer = torch.nn.Linear(inp_size + size, 3 * size, bias=False)
        self.norm = torch.nn.LayerNorm(3 * size, eps=1e-3)
        self.update_bias = update_bias

    def forward(self, inputs, state):
        parts = self.norm(self.layer(torch.cat([inputs, state], -1)))
        reset, cand, update = parts.chunk(3, dim=-1)
        reset = torch.sigmoid(reset)
        cand = torch.tanh(reset * cand)
        update = torch.sigmoid(update + self.update_bias)
        return update * cand + (1 - update) * state


class Agent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.Sequential(
            layer_init(torch.nn.Linear(OBS, WIDTH)), torch.nn.LayerNorm(WIDTH), torch.nn.SiLU()
        )
        self.rnn = GRUCell(WIDTH, HIDDEN)
        self.actor = layer_init(torch.nn.Linear(HIDDEN, ACTIONS), gain=0.8)
        self.critic = torch.nn.Sequential(
            layer_init(torch.nn.Linear(HIDDEN, WIDTH)),
            torch.nn.Tanh(),
            layer_init(torch.nn.Linear(WIDTH, 1), gain=1.0),
        )

    def get_states(self, obs, dones, state):
        hidden = self.encoder(obs)
        states = []
        for h, d in zip(hidden, dones):
            state = self.rnn(h, (1.0 - d).unsqueeze(-1) * state)
            states.append(state)
        return torch.stack(states)


def compute_gae(rewards, values, dones):
    advantages = torch.zeros_like(rewards)
    lastgaelam = 0.0
    for t in reversed(range(STEPS)):
        nextnonterminal = 1.0 - dones[t + 1]
        delta = rewards[t] + GAMMA * values[t + 1] * nextnonterminal - values[t]
        advantages[t] = lastgaelam = delta + GAMMA * LAM * nextnonterminal * lastgaelam
    return advantages


# ---------------------------------------------------------------- JAX


class DreamerCell(nn.Module):
    size: int

    @nn.compact
    def __call__(self, state, step):
        x, first = step
        state = jnp.where(first[:, None] > 0, 0.0, state)
        gates = nn.Dense(3 * self.size, use_bias=False, name="dense")(jnp.concatenate([x, state], axis=-1))
        gates = nn.LayerNorm(epsilon=1e-3, name="norm")(gates)
        reset, candidate, update = jnp.split(gates, 3, axis=-1)
        candidate = jnp.tanh(nn.sigmoid(reset) * candidate)
        update = nn.sigmoid(update - 1.0)
        state = state + update * (candidate - state)
        return state, state


class PolicyValue(nn.Module):
    @nn.compact
    def __call__(self, obs, first, memory):
        x = nn.silu(nn.LayerNorm(epsilon=1e-5, name="embed_norm")(nn.Dense(WIDTH, name="embed")(obs)))
        scan = nn.scan(DreamerCell, variable_broadcast="params", split_rngs={"params": False})
        _, states = scan(HIDDEN, name="memory")(memory, (x, first))
        logits = nn.Dense(ACTIONS, name="policy")(states[:-1])
        v = nn.tanh(nn.Dense(WIDTH, name="value_hidden")(states))
        return logits, nn.Dense(1, name="value")(v)[..., 0]


def gae(rewards, values, dones):
    going = 1.0 - dones[1:]
    deltas = rewards + GAMMA * going * values[1:] - values[:-1]

    def backward(carry, inputs):
        delta, keep = inputs
        carry = delta + GAMMA * LAM * keep * carry
        return carry, carry

    return jax.lax.scan(backward, jnp.zeros_like(deltas[0]), (deltas, going), reverse=True)[1]


def ppo_terms(logits, values, legal, actions, rewards, dones, old_logp, old_values):
    policy = distrax.Categorical(logits=jnp.where(legal, logits, -1e8))
    advantages = gae(rewards, jax.lax.stop_gradient(values), dones)
    values = values[:-1]
    targets = jax.lax.stop_gradient(values) + advantages
    scaled = (advantages - advantages.mean()) / (advantages.std(ddof=1) + 1e-8)
    ratio = jnp.exp(policy.log_prob(actions) - old_logp)
    surrogate = jnp.minimum(ratio * scaled, jnp.clip(ratio, 1 - CLIP_COEF, 1 + CLIP_COEF) * scaled)
    near_old = old_values + jnp.clip(values - old_values, -VALUE_RANGE, VALUE_RANGE)
    value_error = jnp.maximum(jnp.square(values - targets), jnp.square(near_old - targets))
    return surrogate.mean(), 0.5 * value_error.mean(), policy.entropy().mean()


def clip_gradients(max_norm):
    def update(grads, _):
        norm = optax.global_norm(grads)
        return jax.tree.map(lambda g: g * jnp.minimum(1.0, max_norm / (norm + 1e-6)), grads)

    return optax.stateless(update)


# ---------------------------------------------------------------- the pair


def left():
    torch.manual_seed(3)
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=LR, eps=ADAM_EPS)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1.0 - update / UPDATES)

    def before_step(*_):
        torch.nn.utils.clip_grad_norm_(agent.parameters(), MAX_NORM)

    optimizer.register_step_pre_hook(before_step)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())

    def loss_fn(obs, legal, actions, rewards, dones, old_logp, old_values, memory):
        states = agent.get_states(obs, dones, memory)
        logits = agent.actor(states[:-1]).masked_fill(~legal, -1e8)
        probs = Categorical(logits=logits)
        all_values = agent.critic(states).squeeze(-1)
        newvalue = all_values[:-1]

        with torch.no_grad():
            advantages = compute_gae(rewards, all_values, dones)
            returns = advantages + newvalue
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)

        logratio = probs.log_prob(actions) - old_logp
        ratio = logratio.exp()
        pg_loss1 = -advantages * ratio
        pg_loss2 = -advantages * torch.clamp(ratio, 1 - CLIP_COEF, 1 + CLIP_COEF)
        pg_loss = torch.max(pg_loss1, pg_loss2).mean()

        v_loss_unclipped = (newvalue - returns) ** 2
        v_clipped = old_values + torch.clamp(newvalue - old_values, -VALUE_RANGE, VALUE_RANGE)
        v_loss_clipped = (v_clipped - returns) ** 2
        v_loss = 0.5 * torch.max(v_loss_unclipped, v_loss_clipped).mean()

        entropy_loss = probs.entropy().mean()
        return pg_loss - ENT_COEF * entropy_loss + v_loss * VF_COEF

    return stablenum_torch.program(
        loss_fn, *(torch.from_numpy(a) for a in make_batch()), model=agent, optimizer=optimizer
    )


def right():
    batch = tuple(jnp.asarray(a) for a in make_batch())
    network = PolicyValue()
    params = network.init(jax.random.key(8), batch[0], batch[4], batch[7])

    def loss_fn(params, obs, legal, actions, rewards, dones, old_logp, old_values, memory):
        logits, values = network.apply(params, obs, dones, memory)
        gain, value_loss, entropy = ppo_terms(
            logits, values, legal, actions, rewards, dones, old_logp, old_values
        )
        return VF_COEF * value_loss - gain - ENT_COEF * entropy

    tx = optax.chain(
        clip_gradients(MAX_NORM),
        optax.adam(optax.linear_schedule(LR, 0.0, UPDATES), eps=ADAM_EPS),
    )
    return stablenum_jax.program(loss_fn, params, *batch, optimizer=tx)
