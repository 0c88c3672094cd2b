# GRPO on a toy "count up from the prompt" task, verifiable reward, no KL term
import torch
import torch.nn as nn

torch.manual_seed(3)
VOCAB, LENGTH, NUM_GENERATIONS, PROMPTS = 12, 5, 16, 24


class Policy(nn.Module):
    def __init__(self, d=64):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, d)
        self.cell = nn.GRUCell(d, d)
        self.head = nn.Linear(d, VOCAB)

    @torch.no_grad()
    def generate(self, prompt, greedy=False):
        h, tok, out = torch.zeros(len(prompt), 64), prompt, []
        for _ in range(LENGTH):
            h = self.cell(self.emb(tok), h)
            logits = self.head(h)
            tok = logits.argmax(-1) if greedy else torch.distributions.Categorical(logits=logits).sample()
            out.append(tok)
        return torch.stack(out, 1)

    def token_logps(self, prompt, completion):
        h, tok, lps = torch.zeros(len(prompt), 64), prompt, []
        for t in range(LENGTH):
            h = self.cell(self.emb(tok), h)
            lps.append(self.head(h).log_softmax(-1).gather(1, completion[:, t:t + 1]))
            tok = completion[:, t]
        return torch.cat(lps, 1)


def reward_fn(prompt, completion):
    target = (prompt[:, None] + torch.arange(1, LENGTH + 1)) % VOCAB
    return (completion == target).float().mean(1)


policy = Policy()
optimizer = torch.optim.AdamW(policy.parameters(), lr=4e-3)
epsilon = 0.2
for step in range(320):
    prompt = torch.randint(VOCAB, (PROMPTS,)).repeat_interleave(NUM_GENERATIONS)
    completion = policy.generate(prompt)
    rewards = reward_fn(prompt, completion)

    grouped = rewards.view(PROMPTS, NUM_GENERATIONS)
    advantages = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)
    advantages = advantages.view(-1, 1)

    per_token_logps = policy.token_logps(prompt, completion)
    old_per_token_logps = per_token_logps.detach()
    ratio = torch.exp(per_token_logps - old_per_token_logps)
    per_token_loss = -torch.min(ratio * advantages, ratio.clamp(1 - epsilon, 1 + epsilon) * advantages)
    loss = per_token_loss.mean()

    optimizer.zero_grad()
    loss.backward()
    grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    if step % 40 == 0:
        print(f"step {step} loss {loss.item():.6f} grad_norm {grad_norm.item():.4f} "
              f"reward {rewards.mean().item():.3f} reward_std {grouped.std(1).mean().item():.3f}")

test_prompt = torch.arange(VOCAB)
print("FINAL", 1.0 - reward_fn(test_prompt, policy.generate(test_prompt, greedy=True)).mean().item())
