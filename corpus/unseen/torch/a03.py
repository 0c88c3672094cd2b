# Maximum-likelihood training of a left-to-right HMM by gradient descent on the
# forward algorithm. Forbidden jumps have log-probability -inf.
import torch

torch.manual_seed(0)
S, V, T, N = 4, 6, 25, 64
NEG_INF = float("-inf")

allowed = torch.zeros(S, S, dtype=torch.bool)
for i in range(S):
    allowed[i, i] = True
    if i + 1 < S:
        allowed[i, i + 1] = True


def sample(n):
    emit = torch.softmax(4.0 * torch.randn(S, V, generator=g), dim=-1)
    out = torch.zeros(n, T, dtype=torch.long)
    for k in range(n):
        s = 0
        for t in range(T):
            out[k, t] = torch.multinomial(emit[s], 1, generator=g)
            if s < S - 1 and torch.rand(1, generator=g).item() < 0.15:
                s += 1
    return out


g = torch.Generator().manual_seed(42)
data = sample(N)

trans_logits = torch.zeros(S, S, requires_grad=True)
emit_logits = (0.1 * torch.randn(S, V)).requires_grad_()


def log_likelihood(obs):
    log_A = trans_logits.masked_fill(~allowed, NEG_INF).log_softmax(-1)
    log_B = emit_logits.log_softmax(-1)
    # last state has only itself to go to, so every column keeps one finite entry
    log_pi = torch.full((S,), -12.0)
    log_pi[0] = 0.0
    alpha = log_pi.log_softmax(-1) + log_B[:, obs[:, 0]].T
    for t in range(1, obs.shape[1]):
        alpha = torch.logsumexp(alpha.unsqueeze(2) + log_A.unsqueeze(0), dim=1)
        alpha = alpha + log_B[:, obs[:, t]].T
    return torch.logsumexp(alpha, dim=1)


@torch.no_grad()
def viterbi_score(obs):
    log_A = trans_logits.masked_fill(~allowed, NEG_INF).log_softmax(-1)
    log_B = emit_logits.log_softmax(-1)
    delta = torch.full((obs.shape[0], S), NEG_INF)
    delta[:, 0] = log_B[0, obs[:, 0]]
    for t in range(1, obs.shape[1]):
        delta = (delta.unsqueeze(2) + log_A.unsqueeze(0)).amax(1) + log_B[:, obs[:, t]].T
    return delta.amax(1).mean().item()


opt = torch.optim.Adam([trans_logits, emit_logits], lr=0.08)
history = []
for it in range(60):
    opt.zero_grad()
    nll = -log_likelihood(data).mean() / T
    nll.backward()
    opt.step()
    history.append(nll.item())
    if it % 10 == 0:
        print(f"iter {it:3d}  nll/token {nll.item():.4f}  viterbi {viterbi_score(data):.2f}")

print("final", history[-1])
print((trans_logits.masked_fill(~allowed, NEG_INF).softmax(-1)).detach())
assert history[-1] < history[0]
assert torch.isfinite(trans_logits).all() and torch.isfinite(emit_logits).all()
