import random
import torch
import torch.nn as nn
import torch.nn.functional as F

SUBJECTS = ["the cat", "a small dog", "my neighbour", "the old sailor", "every child"]
VERBS = ["watches", "follows", "paints", "forgets", "describes"]
OBJECTS = ["the moon", "a wooden boat", "its own shadow", "the quiet river", "two birds"]


def make_text(n, rnd):
    return " ".join(f"{rnd.choice(SUBJECTS)} {rnd.choice(VERBS)} {rnd.choice(OBJECTS)}."
                    for _ in range(n))


class CharModel(nn.Module):
    def __init__(self, vocab, emb=24, hidden=96):
        super().__init__()
        self.emb = nn.Embedding(vocab, emb)
        self.lstm = nn.LSTM(emb, hidden, batch_first=True)
        self.proj = nn.Linear(hidden, vocab)

    def forward(self, x, state=None):
        h, state = self.lstm(self.emb(x), state)
        return self.proj(h).softmax(dim=-1), state


def batches(ids, batch, length, steps):
    for _ in range(steps):
        starts = torch.randint(0, len(ids) - length - 1, (batch,))
        block = torch.stack([ids[s:s + length + 1] for s in starts])
        yield block[:, :-1], block[:, 1:]


def complete(model, prompt, stoi, itos, n=40):
    ids = [stoi[c] for c in prompt]
    with torch.no_grad():
        out, state = model(torch.tensor([ids]))
        for _ in range(n):
            nxt = int(out[0, -1].argmax())
            ids.append(nxt)
            out, state = model(torch.tensor([[nxt]]), state)
    return "".join(itos[i] for i in ids)


def main():
    torch.manual_seed(0)
    text = make_text(600, random.Random(0))
    itos = sorted(set(text))
    stoi = {c: i for i, c in enumerate(itos)}
    ids = torch.tensor([stoi[c] for c in text])
    model = CharModel(len(itos))
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step, (x, y) in enumerate(batches(ids, 32, 48, 240)):
        out, _ = model(x)
        loss = F.cross_entropy(out.reshape(-1, len(itos)), y.reshape(-1))
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        if step % 40 == 0 or step == 239:
            acc = (out.argmax(-1) == y).float().mean().item()
            print(f"step {step:3d} loss {loss.item():.4f} next-char acc {acc:.3f}")
    print(complete(model, "the ", stoi, itos))


if __name__ == "__main__":
    main()
