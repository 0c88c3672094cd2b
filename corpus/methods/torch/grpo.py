"""GRPO on a toy task: the policy has to write the sorted order of three digits, and ends at full reward."""
import torch
import torch.nn as nn
import torch.nn.functional as F

DIGITS, LENGTH, GROUP, PROMPTS = 6, 3, 16, 12


class Policy(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.prompt = nn.Embedding(DIGITS, dim)
        self.token = nn.Embedding(DIGITS + 1, dim)
        self.place = nn.Embedding(LENGTH, dim)
        self.mlp = nn.Sequential(nn.Linear(3 * dim, 128), nn.GELU(), nn.Linear(128, DIGITS))

    def forward(self, prompt, written):
        """Logits of each position, given the tokens before it."""
        start = torch.full_like(written[:, :1], DIGITS)
        before = self.token(torch.cat([start, written[:, :-1]], 1))
        asked = self.prompt(prompt).sum(1, keepdim=True).expand_as(before)
        place = self.place.weight.expand_as(before)
        return self.mlp(torch.cat([asked, before, place], -1))


@torch.no_grad()
def sample(policy, prompt):
    written = torch.zeros_like(prompt)
    for t in range(LENGTH):
        p = policy(prompt, written)[:, t].softmax(-1)
        written[:, t] = torch.multinomial(p, 1)[:, 0]
    return written


def reward(prompt, written):
    return (written == prompt.sort(1).values).float().mean(1)


def log_prob(policy, prompt, written):
    logits = policy(prompt, written)
    return -F.cross_entropy(logits.flatten(0, 1), written.flatten(), reduction="none").view(written.shape)


def main(iterations=400, clip=0.2):
    torch.manual_seed(0)
    policy = Policy()
    opt = torch.optim.AdamW(policy.parameters(), lr=2e-3, weight_decay=0.0)
    tasks = torch.stack([torch.randperm(DIGITS)[:LENGTH] for _ in range(24)])
    for i in range(iterations):
        prompt = tasks[torch.randint(0, len(tasks), (PROMPTS,))].repeat_interleave(GROUP, 0)
        written = sample(policy, prompt)
        r = reward(prompt, written).view(PROMPTS, GROUP)
        advantage = (r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + 1e-4)
        advantage = advantage.view(-1, 1)
        with torch.no_grad():
            old = log_prob(policy, prompt, written)
        ratio = torch.exp(log_prob(policy, prompt, written) - old)
        loss = -torch.min(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage).mean()
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        opt.step()
        if i % 50 == 0:
            print(f"{i:4d} reward {r.mean():.3f} solved groups {(r.std(1) == 0).float().mean():.2f}")
    done = reward(tasks, sample(policy, tasks)).mean()
    print(f"final reward {done:.3f}")


if __name__ == "__main__":
    main()
