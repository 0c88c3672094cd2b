"""Group-relative policy optimisation of a tiny sequence policy with a rule-based reward."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(6)
VOCAB, LENGTH, GROUP, PROMPTS = 10, 6, 16, 24


class Policy(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.embed = nn.Embedding(VOCAB + 1, 32)
        self.prompt = nn.Embedding(VOCAB, hidden)
        self.cell = nn.GRUCell(32, hidden)
        self.head = nn.Linear(hidden, VOCAB)

    def generate(self, prompt):
        h, tok, out = self.prompt(prompt), torch.full_like(prompt, VOCAB), []
        for _ in range(LENGTH):
            h = self.cell(self.embed(tok), h)
            tok = torch.multinomial(F.softmax(self.head(h), -1), 1).squeeze(1)
            out.append(tok)
        return torch.stack(out, 1)

    def per_token_logps(self, prompt, completion):
        h = self.prompt(prompt)
        prev = torch.cat([torch.full_like(completion[:, :1], VOCAB), completion[:, :-1]], 1)
        logps = []
        for t in range(LENGTH):
            h = self.cell(self.embed(prev[:, t]), h)
            logps.append(F.log_softmax(self.head(h), -1).gather(1, completion[:, t:t + 1]))
        return torch.cat(logps, 1)


def reward_fn(prompt, completion):
    """Completion should count upwards from the prompt token."""
    want = (prompt[:, None] + 1 + torch.arange(LENGTH)) % VOCAB
    return (completion == want).float().mean(1)


policy = Policy()
optimizer = torch.optim.AdamW(policy.parameters(), lr=4e-3)

for step in range(200):
    prompt = torch.randint(0, VOCAB, (PROMPTS,)).repeat_interleave(GROUP)
    with torch.no_grad():
        completion = policy.generate(prompt)
    rewards = reward_fn(prompt, completion)
    grouped = rewards.view(PROMPTS, GROUP)
    adv = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)
    adv = adv.flatten()[:, None]

    logps = policy.per_token_logps(prompt, completion)
    ratio = torch.exp(logps - logps.detach())
    loss = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
    optimizer.zero_grad()
    loss.backward()
    grad_norm = nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    if step % 25 == 0:
        print({"step": step, "loss": round(loss.item(), 4), "grad_norm": round(grad_norm.item(), 4),
               "reward": round(rewards.mean().item(), 4), "reward_std": round(grouped.std(1).mean().item(), 4)})

torch.manual_seed(1000)
with torch.no_grad():
    prompt = torch.arange(VOCAB).repeat(100)
    print("FINAL", 1 - reward_fn(prompt, policy.generate(prompt)).mean().item())
