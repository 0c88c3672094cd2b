"""``stablenum.diff`` where the same operations read other values, or the same values in another order."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn

import stablenum
import stablenum_jax
import stablenum_torch

BATCH, TIME, WIDTH, HEADS, CLASSES = 2, 5, 8, 2, 7
RNG = np.random.default_rng(0)
X = RNG.normal(size=(BATCH, TIME, WIDTH)).astype(np.float32)
Y = RNG.integers(0, CLASSES, (BATCH, TIME))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.LayerNorm(WIDTH, eps=1e-6) for _ in range(2))
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        q, k, v = (
            part(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))  # residual
        h = self.second(x)  # norm
        out: torch.Tensor = x + torch.tanh(self.up(h))
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(TIME, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)
        for p in self.parameters():  # so that no two norms are alike
            nn.init.normal_(p, std=0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x + self.positions  # positions
        for block in self.blocks:
            h = block(h)
        logits: torch.Tensor = self.head(h)  # head
        return logits


def in_torch() -> Any:
    torch.manual_seed(0)
    model = Model()
    return stablenum_torch.program(
        lambda x, y: nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()),
        torch.tensor(X),
        torch.tensor(Y),
        model=model,
    )


def dense(p: Any, x: Any) -> Any:
    return x @ p["kernel"] + p["bias"]


def norm(p: Any, x: Any) -> Any:
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-6) * p["scale"] + p["bias"]


def attention(p: Any, h: Any, fault: str) -> Any:
    q, k, v = (dense(p[n], h).reshape(BATCH, TIME, HEADS, -1) for n in ("query", "key", "value"))
    if fault == "exchanged":
        q, k = k, q
    scores = jnp.einsum("bqhw,bkhw->bhqk", q, k) / (WIDTH // HEADS) ** 0.5  # scores
    kept = jnp.tril(jnp.ones((TIME, TIME), bool), -1 if fault == "mask" else 0)
    scores = jnp.where(kept, scores, -1e30)  # mask
    y = jnp.einsum("bhqk,bkhw->bqhw", jax.nn.softmax(scores), v)
    if fault == "merged":
        y = y.swapaxes(2, 3)
    return dense(p["out"], y.reshape(BATCH, TIME, WIDTH))  # merge


def jax_block(p: Any, x: Any, fault: str) -> Any:
    h = norm(p["first"], x)
    if fault == "residual":
        x = h
    x = x + attention(p, h, fault)  # residual
    which = p["first"] if fault == "norm" else p["second"]
    h = norm(which, x)  # norm
    return x + jnp.tanh(dense(p["up"], h))


def jax_loss(p: Any, x: Any, y: Any, fault: str = "") -> Any:
    positions = p["positions"]
    if fault == "rolled":
        positions = jnp.roll(positions, 1, 0)  # roll
    h = x + positions  # positions
    for block in p["blocks"]:
        h = jax_block(block, h, fault)
    logits = dense(p["head"], h)
    if fault == "capped":
        logits = 30 * jnp.tanh(logits / 30)  # cap
    if fault == "last":
        logits, y = logits[:, :-1], y[:, :-1]
    if fault == "smoothed":
        targets = optax.smooth_labels(jax.nn.one_hot(y, CLASSES), 0.1)
        return optax.softmax_cross_entropy(logits, targets).mean()
    rows = optax.softmax_cross_entropy_with_integer_labels(logits, y)
    if fault == "ignored":
        return (rows * (y > 0)).sum() / (y > 0).sum()
    return rows.sum(1).mean() if fault == "summed" else rows.mean()


def layer(*shape: int) -> dict[str, Any]:
    return {"kernel": jnp.zeros(shape), "bias": jnp.zeros(shape[-1])}


def in_jax(fault: str = "") -> Any:
    norms = {n: {"scale": jnp.zeros(WIDTH), "bias": jnp.zeros(WIDTH)} for n in ("first", "second")}
    block = {n: layer(WIDTH, WIDTH) for n in ("query", "key", "value", "out", "up")} | norms
    parameters = {
        "positions": jnp.zeros((TIME, WIDTH)),
        "blocks": [block, block],
        "head": layer(WIDTH, CLASSES),
    }
    return stablenum_jax.program(
        lambda p, x, y: jax_loss(p, x, y, fault), parameters, jnp.asarray(X), jnp.asarray(Y)
    )


def test_the_programs_agree_without_a_fault() -> None:
    assert stablenum.diff(in_torch(), in_jax()).ok


@pytest.mark.parametrize(
    ("fault", "code", "words", "line"),
    [
        ("exchanged", "other_function", "two values the other way round", "# scores"),
        ("merged", "head_split_order", "in another order", "# merge"),
        ("rolled", "entry_order", "in another order", "# roll"),
        ("norm", "other_input", "parameter blocks.0.second", "* p["),
        ("residual", "other_input", "reads the value of add", "# residual"),
        ("capped", "extra_operation", "no div, tanh, mul here", "# cap"),
        ("last", "ignored_labels", "2 rows", ""),
        ("ignored", "ignored_labels", "rows that the right one leaves out", ""),
        ("smoothed", "label_smoothing", "0.914286", ""),
        ("summed", "reduction", "5 times", ""),
        ("mask", "mask_", "mask", "# mask"),
    ],
)
def test_a_fault_is_named_and_nothing_that_only_follows(fault: str, code: str, words: str, line: str) -> None:
    report = stablenum.diff(in_torch(), in_jax(fault))
    first = report.first
    assert first is not None
    assert first.right is not None
    assert report.causes[0].code.startswith(code)
    assert words in report.causes[0].sentence
    assert line in first.right.code
    assert len(report.differences) == 1, "its gradients differ for the same reason"
