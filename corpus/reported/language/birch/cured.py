import copy
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
V, T, BETA = 24, 16, 0.5
gen = torch.Generator().manual_seed(1)
P = torch.softmax(torch.randn(V, V, generator=gen) * 1.5, -1)


def sample_text(n, probs):
    out = torch.randint(V, (n, 1), generator=gen)
    for _ in range(T):
        out = torch.cat([out, torch.multinomial(probs[out[:, -1]], 1, generator=gen)], 1)
    return out


class LM(nn.Module):
    def __init__(self, d=48):
        super().__init__()
        self.emb = nn.Embedding(V, d)
        self.rnn = nn.GRU(d, d, batch_first=True)
        self.out = nn.Linear(d, V)

    def forward(self, x):
        return self.out(self.rnn(self.emb(x))[0])


def seq_logp(model, seq):
    lp = model(seq[:, :-1]).log_softmax(-1)
    return lp.gather(-1, seq[:, 1:, None]).squeeze(-1).sum(-1)


# stage 1: sft
policy = LM()
opt = torch.optim.Adam(policy.parameters(), lr=4e-3)
for step in range(120):
    seq = sample_text(64, P)
    loss = -seq_logp(policy, seq).mean() / T
    opt.zero_grad(); loss.backward(); opt.step()
    if step % 40 == 0:
        print("sft", step, round(loss.item(), 4))

# stage 2: annotators like tokens from the upper half of the vocabulary a bit more
liked = P.clone()
liked[:, V // 2:] *= 2.0
liked = liked / liked.sum(-1, keepdim=True)


def pairs(n):
    a, b = sample_text(n, liked), sample_text(n, P)
    b[:, 0] = a[:, 0]
    return a, b


ref_model = copy.deepcopy(policy)
opt = torch.optim.Adam(policy.parameters(), lr=1e-3)
test_chosen, test_rejected = pairs(512)
with torch.no_grad():
    print("chosen nll before dpo", -seq_logp(policy, test_chosen).mean().item() / T)
for step in range(250):
    chosen, rejected = pairs(64)
    pi_c, pi_r = seq_logp(policy, chosen), seq_logp(policy, rejected)
    with torch.no_grad():
        ref_c, ref_r = seq_logp(ref_model, chosen), seq_logp(ref_model, rejected)
    r_c, r_r = BETA * (pi_c - ref_c), BETA * (pi_r - ref_r)
    loss = -F.logsigmoid(r_c - r_r).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 50 == 0:
        acc = (pi_c > pi_r).float().mean().item()
        print(f"dpo {step} loss {loss.item():.4f} chosen {r_c.mean().item():.3f} rejected {r_r.mean().item():.3f} acc {acc:.2f}")

with torch.no_grad():
    nll = -seq_logp(policy, test_chosen).mean().item() / T
print("FINAL", nll)
