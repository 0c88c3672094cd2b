"""Healthy trainings on sequences: warm-up, rare words, a curriculum, a new mixture, large gradients."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.recovery.healthy.training import (
    CHARACTERS,
    STEPS,
    Batch,
    Training,
    cosine,
    docstrings,
    windows,
)

__all__ = ["curriculum", "new_mixture", "rare_words", "recurrent", "warm_up"]


class _Transformer(nn.Module):
    """A causal transformer with two layers."""

    def __init__(self, width: int = 32, length: int = 24) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(CHARACTERS, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width, 2, 2 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CHARACTERS)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.characters(tokens) + self.places.weight[:length]
        return self.head(self.norm(self.layers(x, mask, is_causal=True)))


class _Recurrent(nn.Module):
    """An embedding, a recurrent layer and a head."""

    def __init__(self, layer: nn.GRU | nn.LSTM | nn.RNN, symbols: int) -> None:
        super().__init__()
        self.symbols, self.layer = nn.Embedding(symbols, layer.input_size), layer
        self.head = nn.Linear(layer.hidden_size, symbols)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer(self.symbols(tokens))[0])


def _next_loss(model: nn.Module) -> Callable[[Batch, int], Tensor]:
    """The cross entropy of the next symbols."""

    def loss(batch: Batch, step: int) -> Tensor:
        return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    return loss


def warm_up(seed: int) -> Training:
    """A transformer on docstrings whose rate grows from 0 for half of the run."""
    text = docstrings()
    trained, held_out = text[: len(text) * 7 // 8], text[len(text) * 7 // 8 :]
    model = _Transformer()
    loss = _next_loss(model)
    at = lambda i: [windows(trained, 12, 24, np.random.default_rng((seed, i)))]  # noqa: E731
    tested = windows(held_out, 128, 24, np.random.default_rng(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    training = Training(model, optimizer, at, loss, lambda: float(loss(tested, 0)), clip=1.0)
    training.rate = lambda step: min(step / (STEPS // 2), 2.0 - step / (STEPS // 2))
    return training


def _grammar(rows: int, length: int, rng: np.random.Generator) -> Batch:
    """Sentences of a small grammar with nested brackets, in the symbols of the docstrings."""
    found = np.zeros((rows, length + 1), dtype=np.int64)
    for row in found:
        opened: list[int] = []
        for i in range(length + 1):
            closes = opened and (rng.random() < 0.45 or len(opened) > 4)
            if not closes:
                opened.append(int(rng.integers(4)))
            row[i] = 2 * opened[-1] + bool(closes)
            if closes:
                opened.pop()
    text = torch.from_numpy(found)
    return text[:, :-1], text[:, 1:]


def new_mixture(seed: int) -> Training:
    """A grammar with a tenth of docstrings; from the middle on, docstrings with a tenth of the grammar."""
    text = docstrings()
    model = _Recurrent(nn.GRU(24, 48, batch_first=True), CHARACTERS)
    loss = _next_loss(model)

    def mixed(formal: int, words: int, rng: np.random.Generator) -> Batch:
        parts = zip(_grammar(formal, 20, rng), windows(text, words, 20, rng), strict=True)
        return tuple(torch.cat(pair) for pair in parts)

    def at(position: int) -> list[Batch]:
        shares = (18, 2) if position < STEPS // 2 else (2, 18)
        return [mixed(*shares, np.random.default_rng((seed, position)))]

    tested = mixed(32, 32, np.random.default_rng(1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return Training(model, optimizer, at, loss, lambda: float(loss(tested, 0)), clip=1.0)


def curriculum(seed: int) -> Training:
    """Repeating what came before, without clipping: 4 symbols at first, 8 from the middle on."""
    model = _Recurrent(nn.GRU(16, 48, batch_first=True), 10)

    def copied(rows: int, length: int, rng: np.random.Generator) -> Batch:
        symbols = torch.from_numpy(rng.integers(1, 10, size=(rows, length)))
        return torch.cat([symbols, torch.zeros_like(symbols)], 1), symbols

    def loss(batch: Batch, step: int) -> Tensor:
        length = batch[1].shape[1]
        return functional.cross_entropy(model(batch[0])[:, length:].flatten(0, 1), batch[1].flatten())

    def at(position: int) -> list[Batch]:
        return [copied(32, 4 if position < STEPS // 2 else 8, np.random.default_rng((seed, position)))]

    tested = copied(128, 8, np.random.default_rng(1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return Training(model, optimizer, at, loss, lambda: float(loss(tested, 0)))


def rare_words(seed: int) -> Training:
    """Words by Zipf's law, each followed by one of a few: most rows of the tables are seldom seen."""
    words = 1000
    weights = 1.0 / np.arange(1, words + 1)
    model = nn.Sequential(nn.Embedding(words, 32), nn.ReLU(), nn.Linear(32, words))

    def pairs(rows: int, rng: np.random.Generator) -> Batch:
        first = rng.choice(words, size=rows, p=weights / weights.sum())
        second = (first * 7 + rng.integers(3, size=rows)) % words
        return torch.from_numpy(first), torch.from_numpy(second)

    def loss(batch: Batch, step: int) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    tested = pairs(1024, np.random.default_rng(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    at = lambda i: [pairs(64, np.random.default_rng((seed, i)))]  # noqa: E731
    training = Training(model, optimizer, at, loss, lambda: float(loss(tested, 0)))
    training.rate = cosine
    return training


def recurrent(seed: int) -> Training:
    """A plain recurrent layer that adds two marked numbers: large gradients at times, clipped."""
    model = nn.RNN(2, 48, batch_first=True, nonlinearity="relu")
    nn.init.eye_(model.weight_hh_l0)
    head = nn.Linear(48, 1)
    both = nn.ModuleList([model, head])

    def sums(rows: int, rng: np.random.Generator, length: int = 24) -> Batch:
        numbers, marks = rng.uniform(size=(rows, length)), np.zeros((rows, length))
        first, second = rng.integers(length // 2, size=rows), rng.integers(length // 2, length, size=rows)
        marks[np.arange(rows), first] = marks[np.arange(rows), second] = 1.0
        found = torch.tensor(np.stack([numbers, marks], 2), dtype=torch.float32)
        return found, torch.tensor((numbers * marks).sum(1, keepdims=True), dtype=torch.float32)

    def loss(batch: Batch, step: int) -> Tensor:
        return functional.mse_loss(head(model(batch[0])[0][:, -1]), batch[1])

    tested = sums(128, np.random.default_rng(1))
    optimizer = torch.optim.SGD(both.parameters(), lr=0.02, momentum=0.9)
    at = lambda i: [sums(32, np.random.default_rng((seed, i)))]  # noqa: E731
    return Training(both, optimizer, at, loss, lambda: float(loss(tested, 0)), clip=1.0)
