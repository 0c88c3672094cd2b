import torch
import torch.nn as nn
import torch.nn.functional as F


class GatedCell(nn.Module):
    def __init__(self, d_in, hidden, gate_bias=3.0):
        super().__init__()
        self.gates = nn.Linear(d_in + hidden, 2 * hidden)
        self.cand = nn.Linear(d_in + hidden, hidden)
        with torch.no_grad():
            self.gates.bias.zero_()
            self.gates.bias[hidden:].fill_(gate_bias)

    def forward(self, x, h):
        r, z = torch.sigmoid(self.gates(torch.cat([x, h], -1))).chunk(2, -1)
        n = torch.tanh(self.cand(torch.cat([x, r * h], -1)))
        return (1 - z) * h + z * n


class Reader(nn.Module):
    def __init__(self, vocab, hidden=48, classes=6):
        super().__init__()
        self.emb = nn.Embedding(vocab, 16)
        self.cell = GatedCell(16, hidden)
        self.hidden = hidden
        self.head = nn.Linear(hidden, classes)

    def forward(self, tokens):
        x = self.emb(tokens)
        h = x.new_zeros(len(tokens), self.hidden)
        for t in range(tokens.shape[1]):
            h = self.cell(x[:, t], h)
        return self.head(h)


def sample(n, length=40, classes=6, noise=8):
    label = torch.randint(0, classes, (n,))
    filler = torch.randint(classes, classes + noise, (n, length))
    filler[:, 0] = label
    return filler, label


def main():
    torch.manual_seed(0)
    model = Reader(14)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(1, 301):
        x, y = sample(64)
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        if step % 50 == 0 or step == 1:
            acc = (logits.argmax(1) == y).float().mean().item()
            print(f"step {step:3d} loss {loss.item():.4f} acc {acc:.3f}")


if __name__ == "__main__":
    main()
