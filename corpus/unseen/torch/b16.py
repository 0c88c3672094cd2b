import torch
from torch import nn

torch.manual_seed(101)
TAGS = ["O", "B-LOC", "I-LOC", "B-PER", "I-PER"]
NEG = float("-inf")


def forbidden():
    bad = torch.zeros(len(TAGS), len(TAGS), dtype=torch.bool)
    for j, to in enumerate(TAGS):
        if to.startswith("I-"):
            for i, frm in enumerate(TAGS):
                bad[i, j] = frm[2:] != to[2:]
    start_bad = torch.tensor([t.startswith("I-") for t in TAGS])
    return bad, start_bad


class LinearCRF(nn.Module):
    def __init__(self, k):
        super().__init__()
        self.trans = nn.Parameter(0.01 * torch.randn(k, k))
        self.start = nn.Parameter(torch.zeros(k))
        bad, sbad = forbidden()
        self.register_buffer("bad", bad)
        self.register_buffer("sbad", sbad)

    def scores(self):
        return self.trans.masked_fill(self.bad, NEG), self.start.masked_fill(self.sbad, NEG)

    def nll(self, em, tags):
        trans, start = self.scores()
        alpha = start + em[:, 0]
        gold = start[tags[:, 0]] + em[:, 0].gather(1, tags[:, :1]).squeeze(1)
        for t in range(1, em.shape[1]):
            alpha = torch.logsumexp(alpha.unsqueeze(2) + trans, dim=1) + em[:, t]
            gold = gold + trans[tags[:, t - 1], tags[:, t]] + em[:, t].gather(1, tags[:, t:t + 1]).squeeze(1)
        return (torch.logsumexp(alpha, 1) - gold).mean()

    @torch.no_grad()
    def decode(self, em):
        trans, start = self.scores()
        v, back = start + em[:, 0], []
        for t in range(1, em.shape[1]):
            m, arg = (v.unsqueeze(2) + trans).max(1)
            back.append(arg)
            v = m + em[:, t]
        path = [v.argmax(1)]
        for arg in reversed(back):
            path.append(arg.gather(1, path[-1][:, None]).squeeze(1))
        return torch.stack(path[::-1], 1)


def batch(n, length=12, vocab=40):
    tags = torch.zeros(n, length, dtype=torch.long)
    for b in range(n):
        t = 0
        while t < length:
            if torch.rand(()) < 0.3:
                kind = int(torch.randint(0, 2, ()))
                span = min(int(torch.randint(1, 4, ())), length - t)
                tags[b, t] = 1 + 2 * kind
                tags[b, t + 1:t + span] = 2 + 2 * kind
                t += span
            else:
                t += 1
    words = (tags + 1) // 2 * 12 + torch.randint(0, 14, tags.shape)
    return words.clamp(max=vocab - 1), tags


emb, lstm = nn.Embedding(40, 16), nn.LSTM(16, 24, bidirectional=True, batch_first=True)
proj, crf = nn.Linear(48, len(TAGS)), LinearCRF(len(TAGS))
params = [p for m in (emb, lstm, proj, crf) for p in m.parameters()]
opt = torch.optim.Adam(params, lr=1e-2)
for step in range(80):
    words, tags = batch(16)
    em = proj(lstm(emb(words))[0])
    loss = crf.nll(em, tags)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0:
        print(step, f"nll {loss.item():.3f}", f"acc {(crf.decode(em) == tags).float().mean().item():.3f}")
print("allowed transitions", crf.scores()[0].isfinite().sum().item())
