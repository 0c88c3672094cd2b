import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

rng = np.random.default_rng(5)
torch.manual_seed(5)


def waves(n, length=40):
    """Three kinds of signal (sine, saw, square), random phase, period and noise; two channels."""
    kind = rng.integers(0, 3, n)
    t = np.arange(length)[None, :]
    period = rng.uniform(10, 20, (n, 1))
    phase = (t / period + rng.uniform(0, 1, (n, 1))) % 1.0
    forms = np.stack([np.sin(2 * np.pi * phase), 2 * phase - 1, np.sign(phase - 0.5)])
    sig = forms[kind, np.arange(n)]
    two = np.stack([sig, np.roll(sig, 1, axis=1)], axis=-1)
    return torch.tensor(two + 0.1 * rng.normal(size=two.shape), dtype=torch.float32), torch.tensor(kind)


class WaveNet(nn.Module):
    def __init__(self, n_feat, n_hidden, n_class):
        super().__init__()
        self.rnn = nn.GRU(n_feat, n_hidden)
        self.fc = nn.Linear(n_hidden, n_class)

    def forward(self, x):
        out, _ = self.rnn(x)
        return self.fc(out[:, -1])


def accuracy(model, x, y):
    model.eval()
    with torch.no_grad():
        acc = (model(x).argmax(dim=1) == y).float().mean().item()
    model.train()
    return acc


def main():
    train_x, train_y = waves(2000)
    test_x, test_y = waves(500)
    model = WaveNet(2, 48, 3)
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    step = 0
    for epoch in range(4):
        order = torch.randperm(len(train_x))
        for idx in order.split(50):
            loss = F.cross_entropy(model(train_x[idx]), train_y[idx])
            opt.zero_grad()
            loss.backward()
            opt.step()
            step += 1
            if step % 20 == 0:
                print(f"step {step} loss {loss.item():.4f}")
        print(f"epoch {epoch} test acc {accuracy(model, test_x, test_y):.3f}")


main()
