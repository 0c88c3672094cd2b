import torch
import torch.nn as nn
import torch.nn.functional as F

TEXT = (
    "the quick brown fox jumps over the lazy dog while the small grey cat sleeps in the warm sun "
    "and the old man reads the paper near the window where the rain never stops to fall on the roof "
    "because the clouds come from the north and the wind brings them over the hills every evening "
) * 4


class CharLSTM(nn.Module):
    def __init__(self, vocab, emb=24, hidden=96):
        super().__init__()
        self.emb = nn.Embedding(vocab, emb)
        self.rnn = nn.LSTM(emb, hidden, batch_first=True)
        self.out = nn.Linear(hidden, vocab)

    def forward(self, x):
        h, _ = self.rnn(self.emb(x))
        return self.out(h)


class Corpus:
    def __init__(self, text):
        self.chars = sorted(set(text))
        table = {c: i for i, c in enumerate(self.chars)}
        self.ids = torch.tensor([table[c] for c in text])

    def batch(self, bs, length):
        start = torch.randint(0, len(self.ids) - length - 1, (bs,))
        rows = torch.stack([self.ids[s:s + length + 1] for s in start])
        return rows[:, :-1], rows[:, 1:]


def train(steps=300, bs=32, length=40, lr=2.0, max_norm=5e-3):
    torch.manual_seed(1)
    corpus = Corpus(TEXT)
    model = CharLSTM(len(corpus.chars))
    opt = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)
    avg = None
    for step in range(1, steps + 1):
        x, y = corpus.batch(bs, length)
        logits = model(x)
        loss = F.cross_entropy(logits.transpose(1, 2), y)
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        opt.step()
        avg = loss.item() if avg is None else 0.9 * avg + 0.1 * loss.item()
        if step % 30 == 0 or step == 1:
            print(f"{step:4d} | loss {loss.item():.4f} | avg {avg:.4f}")
    print(f"FINAL avg loss {avg:.4f}")
    return model


if __name__ == "__main__":
    train()
