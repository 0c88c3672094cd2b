import torch
from torch import nn
from torch.distributions import Normal

torch.manual_seed(11)
NUM_ENVS, HORIZON, GAMMA, LAM = 32, 24, 0.9, 0.95

class ReachEnv:
    """Batched 2-D reach task: move the tip to a goal that is part of the observation."""

    def __init__(self, n, seed, p_end=0.04):
        self.n, self.p_end = n, p_end
        self.g = torch.Generator().manual_seed(seed)
        self.reset()

    def reset(self):
        self.pos = torch.rand(self.n, 2, generator=self.g) * 4 - 2
        self.goal = torch.rand(self.n, 2, generator=self.g) * 4 - 2
        return self.obs()

    def obs(self):
        return torch.cat([self.pos, self.goal], dim=-1)

    def step(self, action):
        self.pos = self.pos + 0.3 * action.clamp(-1, 1)
        dist = (self.pos - self.goal).norm(dim=-1, keepdim=True)
        reward = 1.0 - dist
        done = (torch.rand(self.n, 1, generator=self.g) < self.p_end).float()
        redo = done.squeeze(-1).bool()
        fresh = torch.rand(self.n, 4, generator=self.g) * 4 - 2
        self.pos = torch.where(redo[:, None], fresh[:, :2], self.pos)
        self.goal = torch.where(redo[:, None], fresh[:, 2:], self.goal)
        return self.obs(), reward, done

class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
        self.log_std = nn.Parameter(torch.full((2,), -0.5))
        self.value_head = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def policy(self, obs):
        return Normal(self.actor(obs), self.log_std.exp())

    def get_value(self, obs):
        return self.value_head(obs)

    def evaluate(self, obs, action):
        dist = self.policy(obs)
        logp = dist.log_prob(action).sum(-1, keepdim=True)
        value = self.value_head(obs)
        return logp, value

@torch.no_grad()
def collect(env, model, obs):
    buf = {k: [] for k in ("obs", "act", "logp", "rew", "done", "val")}
    for _ in range(HORIZON):
        d = model.policy(obs)
        a = d.sample()
        nobs, r, done = env.step(a)
        for k, v in zip(buf, (obs, a, d.log_prob(a).sum(-1, keepdim=True), r, done, model.get_value(obs))):
            buf[k].append(v)
        obs = nobs
    buf = {k: torch.stack(v) for k, v in buf.items()}
    nextv, adv, run = model.get_value(obs), [], torch.zeros(env.n, 1)
    for t in reversed(range(HORIZON)):
        nonterm = 1 - buf["done"][t]
        delta = buf["rew"][t] + GAMMA * nextv * nonterm - buf["val"][t]
        run = delta + GAMMA * LAM * nonterm * run
        adv.append(run)
        nextv = buf["val"][t]
    buf["adv"] = torch.stack(adv[::-1])
    buf["ret"] = buf["adv"] + buf["val"]
    return {k: v.flatten(0, 1) for k, v in buf.items()}, obs

env, model = ReachEnv(NUM_ENVS, 5), ActorCritic()
optim = torch.optim.Adam(model.parameters(), lr=2e-3)
obs = env.reset()
for it in range(50):
    data, obs = collect(env, model, obs)
    data["adv"] = (data["adv"] - data["adv"].mean()) / (data["adv"].std() + 1e-8)
    for mb in torch.randperm(len(data["obs"])).split(192) * 2:
        logp, values = model.evaluate(data["obs"][mb], data["act"][mb])
        ratio = (logp - data["logp"][mb]).exp()
        surr = torch.min(ratio * data["adv"][mb], ratio.clamp(0.8, 1.2) * data["adv"][mb])
        returns, prev = data["ret"][mb], data["val"][mb]
        clipped = prev + (values - prev).clamp(-5.0, 5.0)
        critic_loss = 0.5 * torch.max((returns - values) ** 2, (returns - clipped) ** 2).mean()
        loss = -surr.mean() + 0.5 * critic_loss
        optim.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
    if it % 5 == 0:
        print(f"iter {it:3d} policy {-surr.mean().item():+.4f} critic {critic_loss.item():.4f} "
              f"reward {data['rew'].mean().item():+.3f}")

test_env = ReachEnv(256, 99, p_end=0.0)
with torch.no_grad():
    o0 = o = test_env.reset()
    total = torch.zeros(256, 1)
    for t in range(120):
        o, r, d = test_env.step(model.policy(o).sample())
        total += (GAMMA * 0.96) ** t * r

    err = (model.get_value(o0) - total).pow(2).mean() / total.var()
print("FINAL", err.item())
