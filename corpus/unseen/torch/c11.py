"""next-character model with a scalar-memory cell (exponential gates), written after the xLSTM paper"""
import torch
import torch.nn as nn
import torch.nn.functional as F

POEM = (
    "the rain in spain stays mainly in the plain . "
    "how much wood would a woodchuck chuck if a woodchuck could chuck wood . "
    "she sells sea shells by the sea shore . "
    "peter piper picked a peck of pickled peppers . "
) * 3

torch.manual_seed(42)


class CharData:
    def __init__(self, text):
        self.itos = sorted(set(text))
        self.stoi = {c: i for i, c in enumerate(self.itos)}
        self.ids = torch.tensor([self.stoi[c] for c in text])

    def batch(self, n, T):
        p = torch.randint(0, len(self.ids) - T - 1, (n,))
        x = torch.stack([self.ids[i:i + T] for i in p])
        y = torch.stack([self.ids[i + 1:i + T + 1] for i in p])
        return x, y


class SLSTMCell(nn.Module):
    def __init__(self, d_in, d):
        super().__init__()
        self.d = d
        self.wx = nn.Linear(d_in, 4 * d)
        self.wh = nn.Linear(d, 4 * d, bias=False)
        with torch.no_grad():
            self.wx.bias.zero_()
            self.wx.bias[d:2 * d] = torch.linspace(0.5, 2.5, d)

    def init_state(self, n):
        z = torch.zeros(n, self.d)
        return z, z.clone(), z.clone()

    def forward(self, x, state):
        h, c, n = state
        i, f, z, o = (self.wx(x) + self.wh(h)).chunk(4, dim=-1)
        i = torch.exp(i)
        f = torch.exp(f)
        c = f * c + i * torch.tanh(z)
        n = f * n + i
        h = torch.sigmoid(o) * c / n
        return h, (h, c, n)


class CharRNN(nn.Module):
    def __init__(self, vocab, d_emb=16, d=32):
        super().__init__()
        self.emb = nn.Embedding(vocab, d_emb)
        self.cell = SLSTMCell(d_emb, d)
        self.out = nn.Linear(d, vocab)

    def forward(self, x, state=None):
        e = self.emb(x)
        state = state or self.cell.init_state(len(x))
        hs = []
        for t in range(x.size(1)):
            h, state = self.cell(e[:, t], state)
            hs.append(h)
        return self.out(torch.stack(hs, 1)), state


def train():
    data = CharData(POEM)
    model = CharRNN(len(data.itos))
    opt = torch.optim.RMSprop(model.parameters(), lr=4e-3)
    for step in range(60):
        T = min(16 + step, 48)
        x, y = data.batch(16, T)
        logits, _ = model(x)
        loss = F.cross_entropy(logits.reshape(-1, logits.size(-1)), y.reshape(-1))
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        if step % 5 == 0:
            with torch.no_grad():
                xv, yv = data.batch(8, 16)
                acc = (model(xv)[0].argmax(-1) == yv).float().mean().item()
            print(f"step {step:2d} T {T:2d} loss {loss.item():.4f} acc {acc:.3f}")
        assert not torch.isnan(loss), "diverged"


if __name__ == "__main__":
    train()
