"""A training on digits that meets a bad shard of data, with and without recovery: python digits.py"""

import functools
import warnings

import torch
from sklearn.datasets import load_digits

import stablenum_torch

STEPS, BATCH = 600, 64
BAD = range(520, 560)  # these batches come from a broken file: pixels too large, labels in another order


@functools.cache
def data():
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    y = torch.tensor(digits.target)
    return x[:1500], y[:1500], x[1500:], y[1500:]


def good_batch_at(number):
    x, y, *_ = data()
    rows = torch.randperm(len(x), generator=torch.Generator().manual_seed(number))[:BATCH]
    return x[rows], y[rows]


def batch_at(number):
    """The batch with this number; the same in every run."""
    x, y = good_batch_at(number)
    return (1e4 * x, y.flip(0)) if number in BAD else (x, y)


def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
    )
    adam = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return model, stablenum_torch.wrap(adam, clip=1.0, names=model)


def train_step(model, opt, batch):
    x, y = batch
    loss = torch.nn.functional.cross_entropy(model(x), y)
    opt.zero_grad()
    opt.backward(loss)
    opt.step()
    return loss.item()


def accuracy(model):
    _, _, x, y = data()
    model.eval()
    with torch.no_grad():
        right = (model(x).argmax(1) == y).float().mean().item()
    model.train()
    return right


def alone(batch_at=batch_at):
    model, opt = make()
    losses = [train_step(model, opt, batch_at(n)) for n in range(STEPS)]
    return losses, accuracy(model)


def with_recovery():
    model, opt = make()
    recovery = stablenum_torch.Recovery(model, opt, data=batch_at, every=50, good_after=50)
    losses = []
    for batch in recovery.batches(STEPS):
        losses.append((recovery.step, train_step(model, opt, batch)))
    return losses, accuracy(model), recovery.events


def main():
    for name, batches in (("all data good", good_batch_at), ("a bad shard", batch_at)):
        print(f"{name}: {alone(batches)[1]:.1%} of held-out digits")
    _, right, events = with_recovery()
    print(f"a bad shard, with recovery: {right:.1%} of held-out digits")
    for event in events:
        print(event)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
