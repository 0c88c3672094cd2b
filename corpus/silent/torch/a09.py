"""Word-level LSTM with tied input/output embedding, fixed-length truncated BPTT."""
import torch
from torch import nn

torch.manual_seed(9)
N_WORDS, BPTT, BATCH = 60, 20, 20

# a random, fairly sharp, second-order source
trans = torch.distributions.Dirichlet(torch.full((N_WORDS,), 0.03)).sample((N_WORDS,))


def generate(n):
    out, s = [], torch.zeros(BATCH, dtype=torch.long)
    for _ in range(n):
        s = torch.multinomial(trans[s], 1).squeeze(1)
        out.append(s)
    return torch.stack(out)


class TiedLM(nn.Module):
    def __init__(self, n, d):
        super().__init__()
        self.embed = nn.Embedding(n, d)
        self.lstm = nn.LSTM(d, d)
        self.decode = nn.Linear(d, n)
        self.decode.weight = self.embed.weight

    def forward(self, x, state):
        h, state = self.lstm(self.embed(x), state)
        return self.decode(h), state


def repackage(state):
    return None if state is None else tuple(s.detach() for s in state)


stream = generate(BPTT * 220 + 1)
model = TiedLM(N_WORDS, 64)
opt = torch.optim.SGD(model.parameters(), lr=2.0)
loss_fn = nn.CrossEntropyLoss()
state, clipped = None, 0
entropy = -(trans * trans.clamp_min(1e-30).log()).sum(1)[stream.flatten()].mean()
print(f"entropy of the source {entropy:.4f}")
for i in range(220):
    x = stream[i * BPTT:(i + 1) * BPTT]
    y = stream[i * BPTT + 1:(i + 1) * BPTT + 1]
    state = repackage(state)
    logits, state = model(x, state)
    loss = loss_fn(logits.reshape(-1, N_WORDS), y.reshape(-1))
    opt.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    clipped += int(norm > 0.5)
    opt.step()
    if (i + 1) % 20 == 0:
        print(f"{i + 1:4d}  loss {loss.item():.4f}  clipped {clipped}/20")
        clipped = 0
