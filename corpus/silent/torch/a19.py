import torch
import torch.nn as nn
import torch.nn.functional as F

CLASSES, STEPS, HIDDEN = 4, 60, 64


def make_batch(n, gen):
    """The class is shown at the first step; afterwards there is only weak noise."""
    label = torch.randint(0, CLASSES, (n,), generator=gen)
    x = 0.05 * torch.randn(n, STEPS, CLASSES, generator=gen)
    x[:, 0] += F.one_hot(label, CLASSES).float()
    return x, label


class Remember(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(CLASSES, HIDDEN, nonlinearity="tanh", batch_first=True)
        self.readout = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x):
        _, last = self.rnn(x)
        return self.readout(last.squeeze(0))


def evaluate(model, gen):
    with torch.no_grad():
        x, y = make_batch(500, gen)
        out = model(x)
        return F.cross_entropy(out, y).item(), (out.argmax(1) == y).float().mean().item()


def main(n_steps=250, lr=1e-3):
    torch.manual_seed(19)
    gen = torch.Generator().manual_seed(190)
    model = Remember()
    opt = torch.optim.Adam(model.parameters(), lr=lr)
    for step in range(n_steps):
        x, y = make_batch(64, gen)
        loss = F.cross_entropy(model(x), y)
        model.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        if (step + 1) % 25 == 0:
            l, a = evaluate(model, gen)
            print(f"{step + 1:4d} train {loss.item():.4f} eval {l:.4f} acc {a:.3f}")


main()
