"""Text classifier (bag of hashed words) with a tabulated warm-up / cosine schedule."""
import argparse
import math

import numpy as np
import torch
import torch.nn as nn


def lr_table(total_steps, warmup_ratio, peak, floor=0.0):
    """learning rate of every step, computed once"""
    warmup = int(total_steps * warmup_ratio)
    steps = np.arange(total_steps, dtype=np.float64)
    ramp = np.minimum(steps / warmup, 1.0)
    progress = np.clip((steps - warmup) / max(1, total_steps - warmup), 0.0, 1.0)
    cosine = floor + (1.0 - floor) * 0.5 * (1.0 + np.cos(math.pi * progress))
    return peak * ramp * cosine


class BagOfWords(nn.Module):
    def __init__(self, buckets=512, dim=24, classes=3):
        super().__init__()
        self.bag = nn.EmbeddingBag(buckets, dim, mode="mean")
        self.out = nn.Linear(dim, classes)

    def forward(self, ids):
        return self.out(torch.relu(self.bag(ids)))


TOPICS = {
    0: "ball team score goal match league coach season win player",
    1: "stock market bank price trade profit share fund rate loss",
    2: "cell gene virus protein study drug trial brain dose blood",
}
FILLER = "the of and a to in is was on for with as by at from".split()


def sentence(topic, rng):
    words = list(rng.choice(TOPICS[topic].split(), 4)) + list(rng.choice(FILLER, 8))
    return [sum(ord(c) * 31 ** i for i, c in enumerate(w)) % 512 for w in words]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--n", type=int, default=480)
    ap.add_argument("--warmup-ratio", type=float, default=0.03)
    ap.add_argument("--peak-lr", type=float, default=0.05)
    a = ap.parse_args()

    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    labels = rng.integers(0, 3, a.n)
    ids = torch.tensor([sentence(int(k), rng) for k in labels])
    labels = torch.tensor(labels)
    model = BagOfWords()
    total = a.epochs * (a.n // a.batch)
    table = lr_table(total, a.warmup_ratio, a.peak_lr)
    opt = torch.optim.Adam(model.parameters(), lr=a.peak_lr)
    step = 0
    for epoch in range(a.epochs):
        perm = torch.randperm(a.n)
        for i in range(a.n // a.batch):
            for group in opt.param_groups:
                group["lr"] = float(table[step])
            sel = perm[i * a.batch:(i + 1) * a.batch]
            loss = nn.functional.cross_entropy(model(ids[sel]), labels[sel])
            opt.zero_grad()
            loss.backward()
            opt.step()
            step += 1
            if step % 5 == 0:
                print(f"epoch {epoch} step {step}/{total} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
