"""DPO: a small language model is pretrained, then preferences move it away from a frozen copy."""
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB, LENGTH = 12, 8


class LM(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.embed = nn.Embedding(VOCAB + 1, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, VOCAB)

    def forward(self, tokens):
        start = torch.full_like(tokens[:, :1], VOCAB)
        return self.out(self.rnn(self.embed(torch.cat([start, tokens[:, :-1]], 1)))[0])


def sequences(n):
    """Each token is near the one before it."""
    first = torch.randint(0, VOCAB, (n, 1))
    moves = torch.randint(-1, 2, (n, LENGTH - 1))
    return torch.cat([first, first + moves.cumsum(1)], 1) % VOCAB


def log_prob(model, tokens):
    logp = model(tokens).log_softmax(-1)
    return logp.gather(-1, tokens[..., None])[..., 0].sum(-1)


@torch.no_grad()
def sample(model, n):
    tokens = torch.zeros(n, LENGTH, dtype=torch.long)
    for t in range(LENGTH):
        tokens[:, t] = torch.multinomial(model(tokens)[:, t].softmax(-1), 1)[:, 0]
    return tokens


def score(tokens):
    return (tokens % 2 == 0).float().mean(1)


def main(pretraining=300, steps=300, beta=0.2):
    torch.manual_seed(0)
    policy = LM()
    opt = torch.optim.Adam(policy.parameters(), lr=3e-3)
    for step in range(pretraining):
        x = sequences(128)
        loss = F.cross_entropy(policy(x).flatten(0, 1), x.flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(f"pretrained, loss {loss.item():.3f}, score {score(sample(policy, 500)).mean():.3f}")
    reference = copy.deepcopy(policy).requires_grad_(False).eval()
    pairs = sample(reference, 2048).view(2, 1024, LENGTH)
    better = score(pairs[0]) > score(pairs[1])
    differ = score(pairs[0]) != score(pairs[1])
    chosen = torch.where(better[:, None], pairs[0], pairs[1])[differ]
    rejected = torch.where(better[:, None], pairs[1], pairs[0])[differ]
    opt = torch.optim.Adam(policy.parameters(), lr=2e-4)
    for step in range(steps):
        pick = torch.randint(0, len(chosen), (64,))
        w, l = chosen[pick], rejected[pick]
        with torch.no_grad():
            base = log_prob(reference, w) - log_prob(reference, l)
        margin = beta * (log_prob(policy, w) - log_prob(policy, l) - base)
        loss = -F.logsigmoid(margin).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 50 == 0:
            print(f"{step:4d} loss {loss.item():.4f} right {(margin > 0).float().mean():.3f}")
    print(f"score {score(sample(policy, 500)).mean():.3f}")


if __name__ == "__main__":
    main()
