import torch
import torch.nn as nn

# Tiny line recogniser trained with our own CTC (we need per-state posteriors later on).
torch.manual_seed(8)
BLANK, CLASSES, T, L, B = 0, 7, 24, 5, 16
NEG = float("-inf")
glyphs = torch.randn(CLASSES, 12)


def make_batch():
    labels = torch.randint(1, CLASSES, (B, L))
    frames = 0.3 * torch.randn(B, T, 12)
    for b in range(B):
        starts = torch.sort(torch.randperm(T // 3)[:L]).values * 3
        for k in range(L):
            frames[b, starts[k]:starts[k] + 2] += glyphs[labels[b, k]]
    return frames, labels


def ctc_nll(log_probs, labels):
    """log_probs (B, T, C), labels (B, L), all sequences full length."""
    n_states = 2 * L + 1
    ext = torch.full((B, n_states), BLANK)
    ext[:, 1::2] = labels
    can_skip = torch.zeros(B, n_states, dtype=torch.bool)
    can_skip[:, 3::2] = labels[:, 1:] != labels[:, :-1]

    emit = log_probs.gather(2, ext[:, None, :].expand(B, T, n_states))
    alpha = torch.full((B, n_states), NEG)
    alpha = torch.cat([emit[:, 0, :2], alpha[:, 2:]], dim=1)
    pad = torch.full((B, 2), NEG)
    for t in range(1, T):
        stay = alpha
        move = torch.cat([pad[:, :1], alpha[:, :-1]], dim=1)
        skip = torch.cat([pad, alpha[:, :-2]], dim=1).masked_fill(~can_skip, NEG)
        paths = torch.stack([stay, move, skip])
        alpha = torch.logsumexp(paths, dim=0) + emit[:, t]
    return -torch.logsumexp(alpha[:, -2:], dim=1)


class Recogniser(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(12, 40, batch_first=True, bidirectional=True)
        self.out = nn.Linear(80, CLASSES)

    def forward(self, x):
        return self.out(self.rnn(x)[0]).log_softmax(-1)


model = Recogniser()
optim = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(120):
    frames, labels = make_batch()
    loss = ctc_nll(model(frames), labels).mean() / L
    optim.zero_grad()
    loss.backward()
    optim.step()
    if step % 10 == 0:
        print(step, f"{loss.item():.4f}")
