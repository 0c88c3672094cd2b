import torch
from torch import nn, optim


class Layer(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.attn = nn.MultiheadAttention(d, heads, batch_first=True)
        self.ff = nn.Sequential(nn.Linear(d, 2 * d), nn.ReLU(), nn.Linear(2 * d, d))
        self.ln_a = nn.LayerNorm(d)
        self.ln_b = nn.LayerNorm(d)

    def forward(self, h):
        z = self.ln_a(h)
        h = h + self.attn(z, z, z, need_weights=False)[0]
        return h + self.ff(self.ln_b(h))


class SequenceClassifier(nn.Module):
    def __init__(self, vocab, length, d=32, depth=2, heads=4, classes=2):
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.position = nn.Embedding(length, d)
        self.layers = [Layer(d, heads) for _ in range(depth)]
        self.norm = nn.LayerNorm(d)
        self.classify = nn.Linear(d, classes)

    def forward(self, tokens):
        h = self.embed(tokens) + self.position(torch.arange(tokens.size(1)))
        for layer in self.layers:
            h = layer(h)
        return self.classify(self.norm(h).mean(dim=1))


def make_batch(n, length, vocab):
    """Label 1 when the first token occurs again later in the sequence."""
    tokens = torch.randint(0, vocab, (n, length))
    label = torch.randint(0, 2, (n,))
    for i in range(n):
        rest = tokens[i, 1:]
        rest[rest == tokens[i, 0]] = (tokens[i, 0] + 1) % vocab
        if label[i]:
            where = torch.randint(0, length - 1, (2,))
            rest[where] = tokens[i, 0]
    return tokens, label


def main():
    torch.manual_seed(0)
    vocab, length = 8, 8
    model = SequenceClassifier(vocab, length)
    optimizer = optim.Adam(model.parameters(), lr=3e-3)
    loss_fn = nn.CrossEntropyLoss()
    history = []
    for step in range(1, 301):
        tokens, label = make_batch(64, length, vocab)
        out = model(tokens)
        loss = loss_fn(out, label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append((out.argmax(1) == label).float().mean().item())
        if step % 30 == 0:
            print(f"{step:4d}  loss={loss.item():.4f}  acc={sum(history[-30:]) / 30:.3f}")


main()
