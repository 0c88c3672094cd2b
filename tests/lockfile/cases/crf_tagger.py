"""Sequence tagger: bidirectional GRU written out by hand, with a linear-chain CRF on top."""
import numpy as np
import torch
import torch.nn as nn

import stablenum_torch

VOCAB, EMBED, HIDDEN, TAGS = 80, 24, 20, 6


class GRU(nn.Module):
    """One direction. Padded steps keep the previous state."""

    def __init__(self, dim, hidden):
        super().__init__()
        self.input = nn.Linear(dim, 3 * hidden)
        self.hidden = nn.Linear(hidden, 3 * hidden)
        self.start = nn.Parameter(0.3 * torch.randn(hidden))

    def cell(self, gates_x, h):
        gates_h = self.hidden(h)
        xr, xz, xn = gates_x.chunk(3, dim=-1)
        hr, hz, hn = gates_h.chunk(3, dim=-1)
        reset = torch.sigmoid(xr + hr)
        update = torch.sigmoid(xz + hz)
        candidate = torch.tanh(xn + reset * hn)
        return (1 - update) * candidate + update * h

    def forward(self, x, mask):
        h = self.start.expand(x.size(0), -1)
        gates = self.input(x)
        states = []
        for t in range(x.size(1)):
            new = self.cell(gates[:, t], h)
            h = torch.where(mask[:, t, None], new, h)
            states.append(h)
        return torch.stack(states, dim=1)


class CRF(nn.Module):
    def __init__(self, tags):
        super().__init__()
        self.start = nn.Parameter(0.1 * torch.randn(tags))
        self.end = nn.Parameter(0.1 * torch.randn(tags))
        self.trans = nn.Parameter(0.1 * torch.randn(tags, tags))

    def score(self, emissions, tags, mask):
        emit = emissions.gather(2, tags[..., None]).squeeze(2)
        move = self.trans[tags[:, :-1], tags[:, 1:]]
        last = tags.gather(1, mask.sum(dim=1, keepdim=True) - 1).squeeze(1)
        total = (emit * mask).sum(dim=1) + (move * mask[:, 1:]).sum(dim=1)
        return total + self.start[tags[:, 0]] + self.end[last]

    def log_partition(self, emissions, mask):
        alpha = self.start + emissions[:, 0]
        for t in range(1, emissions.size(1)):
            scores = alpha[:, :, None] + self.trans
            step = torch.logsumexp(scores, dim=1) + emissions[:, t]
            alpha = torch.where(mask[:, t, None], step, alpha)
        return torch.logsumexp(alpha + self.end, dim=1)

    def forward(self, emissions, tags, mask):
        return self.log_partition(emissions, mask) - self.score(emissions, tags, mask)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, EMBED)
        self.fwd, self.bwd = GRU(EMBED, HIDDEN), GRU(EMBED, HIDDEN)
        self.emit = nn.Linear(2 * HIDDEN, TAGS)
        self.crf = CRF(TAGS)

    def forward(self, words, tags, mask):
        x = self.embed(words)
        left = self.fwd(x, mask)
        right = self.bwd(x.flip(1), mask.flip(1)).flip(1)
        features = torch.cat([left, right], dim=-1)
        return self.crf(self.emit(features), tags, mask)


def make_data(batch=8, seq=14, seed=3):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(5, seq + 1, size=batch)
    mask = np.arange(seq)[None, :] < lengths[:, None]
    words = rng.integers(1, VOCAB, size=(batch, seq)) * mask
    tags = rng.integers(0, TAGS, size=(batch, seq)) * mask
    return torch.from_numpy(words), torch.from_numpy(tags), torch.from_numpy(mask)


def program():
    torch.manual_seed(3)
    model = Tagger()
    words, tags, mask = make_data()

    def loss_fn(words, tags, mask):
        nll = model(words, tags, mask)
        return nll.sum() / mask.sum()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return stablenum_torch.program(loss_fn, words, tags, mask, model=model, optimizer=optimizer)
