"""Character-level LSTM on pangrams."""
import torch
import torch.nn as nn

TEXT = (
    "the quick brown fox jumps over the lazy dog. "
    "pack my box with five dozen liquor jugs. "
    "how vexingly quick daft zebras jump! "
    "sphinx of black quartz, judge my vow. "
) * 30


class CharModel(nn.Module):
    def __init__(self, vocab_size, emb=24, hidden=64):
        super().__init__()
        self.emb_dim, self.hidden = emb, hidden
        self.embed = nn.Embedding(vocab_size, emb)
        self.rnn = nn.LSTM(emb, hidden, batch_first=True)
        self.head = nn.Linear(hidden, vocab_size)

    def resize_vocab(self, n):
        self.embed = nn.Embedding(n, self.emb_dim)
        self.head = nn.Linear(self.hidden, n)

    def forward(self, idx):
        h, _ = self.rnn(self.embed(idx))
        return self.head(h)


class Trainer:
    def __init__(self, lr=4e-3, seed=0):
        torch.manual_seed(seed)
        self.model = CharModel(vocab_size=8)
        self.lr = lr
        self.setup_optimizer()

    def setup_optimizer(self):
        self.opt = torch.optim.Adam(self.model.parameters(), lr=self.lr)

    def load(self, text):
        chars = sorted(set(text))
        self.stoi = {c: i for i, c in enumerate(chars)}
        self.data = torch.tensor([self.stoi[c] for c in text])
        self.model.resize_vocab(len(chars))
        print(f"vocab {len(chars)}  corpus {len(self.data)}")

    def batch(self, bs=24, T=32):
        start = torch.randint(0, len(self.data) - T - 1, (bs,))
        x = torch.stack([self.data[s:s + T] for s in start])
        y = torch.stack([self.data[s + 1:s + T + 1] for s in start])
        return x, y

    def step(self):
        x, y = self.batch()
        logits = self.model(x)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        return loss.item()

    def fit(self, steps=140):
        avg = None
        for s in range(steps):
            l = self.step()
            avg = l if avg is None else 0.9 * avg + 0.1 * l
            if s % 20 == 0:
                print(f"step {s:4d}  loss {l:.4f}  ema {avg:.4f}")
        return avg


if __name__ == "__main__":
    t = Trainer()
    t.load(TEXT)
    final = t.fit()
    print(f"final metric: loss {final:.4f}")
