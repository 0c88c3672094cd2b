"""multi-instance learning on words: a message is an alarm if at least one of its words is one (noisy-or)"""
import random
import torch
import torch.nn as nn

random.seed(4)
torch.manual_seed(4)

CALM = "meeting lunch report printer coffee monday invoice garden weather parking train ticket garage music".split()
ALARM = "fire leak smoke outage intruder flood".split()
PAD = "<pad>"
VOCAB = {w: i for i, w in enumerate([PAD] + CALM + ALARM)}


def make_message():
    n = random.randint(3, 9)
    words = [random.choice(CALM) for _ in range(n)]
    label = random.random() < 0.5
    if label:
        for k in random.sample(range(n), random.choice([1, 1, 2, 3])):
            words[k] = random.choice(ALARM)
    return words, float(label)


def collate(batch):
    longest = max(len(w) for w, _ in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    for r, (words, _) in enumerate(batch):
        ids[r, :len(words)] = torch.tensor([VOCAB[w] for w in words])
    return ids, torch.tensor([y for _, y in batch])


class WordScorer(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.emb = nn.Embedding(len(VOCAB), dim, padding_idx=0)
        self.conv = nn.Conv1d(dim, dim, 3, padding=1)
        self.score = nn.Linear(dim, 1)

    def forward(self, ids):
        e = self.emb(ids)
        h = torch.tanh(e + 0.3 * self.conv(e.transpose(1, 2)).transpose(1, 2))
        return torch.sigmoid(self.score(h).squeeze(-1))


class NoisyOr(nn.Module):
    """P(any) = 1 - prod(1 - p)"""

    def __init__(self, eps=1e-6):
        super().__init__()
        self.eps = eps

    def forward(self, p, mask):
        p = p.clamp(self.eps, 1.0 - self.eps)
        log_none = (torch.log1p(-p) * mask).sum(1)
        return 1.0 - torch.exp(log_none)


def bag_loss(prob, y, eps=1e-4):
    prob = prob.float() * (1 - 2 * eps) + eps
    return -(y * prob.log() + (1 - y) * (1 - prob).log()).mean()


def main():
    data = [make_message() for _ in range(1200)]
    valid = [make_message() for _ in range(300)]
    net = WordScorer().to(torch.bfloat16)
    pool = NoisyOr()
    opt = torch.optim.AdamW(net.parameters(), lr=2e-2, weight_decay=0.0)
    vx, vy = collate(valid)
    accum, step = 2, 0
    for epoch in range(3):
        random.shuffle(data)
        for b in range(0, len(data), 32 * accum):
            opt.zero_grad()
            shown = 0.0
            for a in range(accum):
                chunk = data[b + 32 * a: b + 32 * (a + 1)]
                if not chunk:
                    continue
                ids, y = collate(chunk)
                mask = (ids != 0).to(torch.bfloat16)
                loss = bag_loss(pool(net(ids), mask), y) / accum
                loss.backward()
                shown += loss.item()
            opt.step()
            step += 1
            if step % 4 == 0:
                with torch.no_grad():
                    hit = ((pool(net(vx), (vx != 0).to(torch.bfloat16)) > 0.5).float() == vy).float().mean()
                print(f"epoch {epoch} step {step} loss {shown:.4f} valid acc {hit.item():.3f}")


if __name__ == "__main__":
    main()
