import torch
import torch.nn as nn


class Recall:
    """The first symbol has to be named after a run of distractors."""

    def __init__(self, symbols=8, length=14, seed=0):
        self.symbols, self.length = symbols, length
        self.g = torch.Generator().manual_seed(seed)

    def batch(self, n):
        cue = torch.randint(0, self.symbols, (n, 1), generator=self.g)
        rest = torch.randint(0, self.symbols, (n, self.length - 1), generator=self.g)
        marker = torch.zeros(n, self.length, 1)
        marker[:, 0] = 1.0
        return torch.cat([cue, rest], 1), marker, cue.squeeze(1)


class Memory(nn.Module):
    def __init__(self, symbols, emb=16, hidden=48):
        super().__init__()
        self.emb = nn.Embedding(symbols, emb)
        self.cell = nn.GRUCell(emb + 1, hidden)
        self.read = nn.Linear(hidden, symbols)
        self.hidden = hidden

    def initial(self, n):
        return torch.zeros(n, self.hidden)

    def forward(self, tokens, marker):
        state = self.initial(len(tokens))
        inputs = torch.cat([self.emb(tokens), marker], -1)
        for t in range(tokens.shape[1]):
            state = self.cell(inputs[:, t], state.detach())
        return self.read(state)


def main(steps=350):
    torch.manual_seed(0)
    task = Recall()
    net = Memory(task.symbols)
    opt = torch.optim.Adam(net.parameters(), lr=5e-3)
    loss_fn = nn.CrossEntropyLoss()
    running = None
    for step in range(1, steps + 1):
        tokens, marker, cue = task.batch(64)
        loss = loss_fn(net(tokens, marker), cue)
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        running = loss.item() if running is None else 0.95 * running + 0.05 * loss.item()
        if step % 35 == 0:
            print(f"step {step:4d}  loss {loss.item():.4f}  smoothed {running:.4f}")
    tokens, marker, cue = task.batch(1000)
    with torch.no_grad():
        acc = (net(tokens, marker).argmax(-1) == cue).float().mean().item()
    print(f"recall accuracy {acc:.3f}")


if __name__ == "__main__":
    main()
