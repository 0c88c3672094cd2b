"""Character LSTM on a small synthetic grammar."""
import random
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(3)
random.seed(3)

SUBJ = ["the cat", "a dog", "the old man", "my friend", "one bird"]
VERB = ["sees", "likes", "eats", "finds", "hears"]
OBJ = ["the fish", "a song", "some bread", "the river", "a stone"]


def make_text(n):
    return " ".join(f"{random.choice(SUBJ)} {random.choice(VERB)} {random.choice(OBJ)}." for _ in range(n))


text = make_text(1500)
chars = sorted(set(text))
stoi = {c: i for i, c in enumerate(chars)}
data = torch.tensor([stoi[c] for c in text])


class CharLSTM(nn.Module):
    def __init__(self, vocab, emb=32, hidden=96):
        super().__init__()
        self.emb = nn.Embedding(vocab, emb)
        self.lstm = nn.LSTM(emb, hidden, batch_first=True)
        self.out = nn.Linear(hidden, vocab)

    def forward(self, x):
        h, _ = self.lstm(self.emb(x))
        return self.out(h)


class Trainer:
    def __init__(self, model, lr=4e-3, weight_decay=0.1, seq=48, batch=32):
        self.model = model
        self.seq, self.batch = seq, batch
        self.opt = torch.optim.Adam(model.parameters(), lr=lr, weight_decay=weight_decay)

    def sample(self):
        i = torch.randint(0, len(data) - self.seq - 1, (self.batch,))
        w = torch.stack([data[j:j + self.seq + 1] for j in i])
        return w[:, :-1], w[:, 1:]

    def fit(self, steps):
        for step in range(1, steps + 1):
            x, y = self.sample()
            logits = self.model(x)
            loss = F.cross_entropy(logits.reshape(-1, logits.size(-1)), y.reshape(-1))
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            if step % 20 == 0:
                print(f"step {step:4d}  loss {loss.item():.4f}")


if __name__ == "__main__":
    Trainer(CharLSTM(len(chars))).fit(200)
