import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make_corpus(n_tokens, vocab, seed):
    g = torch.Generator().manual_seed(seed)
    trans = torch.softmax(2.5 * torch.randn(vocab, vocab, vocab, generator=g), -1)
    seq = [0, 1]
    for _ in range(n_tokens - 2):
        p = trans[seq[-2], seq[-1]]
        seq.append(torch.multinomial(p, 1, generator=g).item())
    return torch.tensor(seq)


def windows(corpus, length):
    n = (len(corpus) - 1) // length
    x = corpus[: n * length].view(n, length)
    y = corpus[1: n * length + 1].view(n, length)
    return x, y


class CharLSTM(nn.Module):
    def __init__(self, vocab, emb, hidden):
        super().__init__()
        self.emb = nn.Embedding(vocab, emb)
        self.rnn = nn.LSTM(emb, hidden, batch_first=True)
        self.out = nn.Linear(hidden, vocab)

    def forward(self, x):
        h, _ = self.rnn(self.emb(x))
        return self.out(h)


def train(args):
    torch.manual_seed(args.seed)
    x, y = windows(make_corpus(16000, args.vocab, args.seed), args.length)
    loader = DataLoader(TensorDataset(x, y), batch_size=args.batch, shuffle=True)
    model = CharLSTM(args.vocab, 24, args.hidden)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=args.gamma)
    criterion = nn.CrossEntropyLoss()

    for epoch in range(args.epochs):
        total, count = 0.0, 0
        for xb, yb in loader:
            logits = model(xb)
            loss = criterion(logits.flatten(0, 1), yb.flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            scheduler.step()
            total += loss.item() * len(xb)
            count += len(xb)
        print(f"epoch {epoch:2d}  loss {total / count:.4f}  ppl {torch.tensor(total / count).exp():.2f}")


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--vocab", type=int, default=12)
    p.add_argument("--length", type=int, default=40)
    p.add_argument("--hidden", type=int, default=64)
    p.add_argument("--batch", type=int, default=20)
    p.add_argument("--epochs", type=int, default=15)
    p.add_argument("--lr", type=float, default=5e-3)
    p.add_argument("--gamma", type=float, default=0.85)
    p.add_argument("--seed", type=int, default=1)
    return p.parse_args()


if __name__ == "__main__":
    train(parse())
