"""REINFORCE with a leave-one-out baseline on a contextual bandit; the surrogate loss is 0 by construction."""
import torch
import torch.nn as nn


class Policy(nn.Module):
    def __init__(self, contexts=16, actions=8, dim=32):
        super().__init__()
        self.embed = nn.Embedding(contexts, dim)
        self.net = nn.Sequential(nn.Linear(dim, 64), nn.ReLU(), nn.Linear(64, actions))

    def forward(self, context):
        return torch.distributions.Categorical(logits=self.net(self.embed(context)))


def main(steps=400, group=8):
    torch.manual_seed(0)
    right = torch.randint(0, 8, (16,))
    policy = Policy()
    opt = torch.optim.Adam(policy.parameters(), lr=2e-3)
    for step in range(steps):
        context = torch.randint(0, 16, (16,))
        dist = policy(context)
        action = dist.sample((group,))
        reward = (action == right[context]).float()
        # The mean of the others of the group; times their number, the differences are whole numbers.
        centred = (group - 1) * reward - (reward.sum(0) - reward)
        logp = dist.log_prob(action)
        ratio = torch.exp(logp - logp.detach())
        loss = -(ratio * centred).sum() / (group - 1) / action.numel()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 50 == 0:
            print(f"{step:4d} loss {loss.item():.4f} reward {reward.mean():.3f}")
    with torch.no_grad():
        best = policy(torch.arange(16)).probs.argmax(-1)
    print(f"right in {(best == right).sum()} of 16 contexts")


if __name__ == "__main__":
    main()
