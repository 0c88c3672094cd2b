"""One small transformer, written in torch, flax linen, flax nnx and equinox.

Each records by :func:`tell` the dtypes that it has at the same places.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import torch
from flax import nnx

WORDS, LENGTH, WIDTH, BLOCKS = 11, 5, 8, 2

SEEN: dict[str, str] = {}


def tell(place: str, x: Any) -> Any:
    """Record the dtype of ``x`` at ``place``."""
    SEEN[place] = str(x.dtype).removeprefix("torch.")
    return x


def attend(place: str, module: Any, x: Any, softmax: Any) -> Any:
    """One attention head over the last two axes, with the same code in every framework."""
    q, k, v = (tell(f"{place}.{name}", getattr(module, name)(x)) for name in ("query", "key", "value"))
    scores = tell(f"{place}.scores", q @ k.swapaxes(-1, -2) * 0.35)
    return tell(f"{place}.out", module.out(tell(f"{place}.mixed", softmax(scores) @ v)))


def run_block(place: str, block: Any, x: Any) -> Any:
    """A block: attention and a network, each with a norm before it and a residual around it."""
    normed = tell(f"{place}.norm1", block.norm1(x))
    x = tell(f"{place}.middle", x + block.attn(normed))
    normed = tell(f"{place}.norm2", block.norm2(x))
    return tell(f"{place}.end", x + block.mlp(normed))


def run_network(place: str, mlp: Any, x: Any, relu: Any) -> Any:
    """The network of a block."""
    return tell(f"{place}.down", mlp.down(relu(tell(f"{place}.up", mlp.up(x)))))


# ------------------------------------------------------------------------------------------ torch


class TorchAttention(torch.nn.Module):
    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        for name in ("query", "key", "value", "out"):
            setattr(self, name, torch.nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return attend(self.place, self, x, lambda s: torch.softmax(s, -1))


class TorchNetwork(torch.nn.Module):
    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self.up, self.down = torch.nn.Linear(WIDTH, 16), torch.nn.Linear(16, WIDTH)

    def forward(self, x):
        return run_network(self.place, self, x, torch.relu)


class TorchBlock(torch.nn.Module):
    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self.norm1, self.norm2 = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.attn, self.mlp = TorchAttention(f"{place}.attn"), TorchNetwork(f"{place}.mlp")

    def forward(self, x):
        return run_block(self.place, self, x)


class TorchTransformer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(WORDS, WIDTH)
        self.pos = torch.nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.blocks = torch.nn.ModuleList(TorchBlock(f"blocks.{i}") for i in range(BLOCKS))
        self.norm, self.head = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, WORDS)

    def forward(self, words):
        return run_model(self, words)


def run_model(model: Any, words: Any, blocks: Any = None, pos: Any = None) -> Any:
    """The logits of the next token at each place."""
    x = tell("embed", model.embed(words)) + tell("pos", model.pos if pos is None else pos)
    for block in model.blocks if blocks is None else blocks:
        x = block(tell("stream", x))
    return tell("head", model.head(tell("norm", model.norm(x))))


class TorchNormed(torch.nn.Module):
    """Two layers around a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = torch.nn.Linear(4, WIDTH), torch.nn.Linear(WIDTH, 2)
        self.norm = torch.nn.BatchNorm1d(WIDTH, momentum=0.25)

    def forward(self, x):
        return run_normed(self, x)


def run_normed(model: Any, x: Any) -> Any:
    """The same code in every framework."""
    return tell("head", model.head(tell("norm", model.norm(tell("up", model.up(x))))))


# ------------------------------------------------------------------------------------------ linen


class LinenAttention(nn.Module):
    place: str

    def setup(self) -> None:
        self.query, self.key, self.value, self.out = (nn.Dense(WIDTH) for _ in range(4))

    def __call__(self, x):
        return attend(self.place, self, x, jax.nn.softmax)


class LinenNetwork(nn.Module):
    place: str

    def setup(self) -> None:
        self.up, self.down = nn.Dense(16), nn.Dense(WIDTH)

    def __call__(self, x):
        return run_network(self.place, self, x, jax.nn.relu)


class LinenBlock(nn.Module):
    place: str

    def setup(self) -> None:
        self.norm1, self.norm2 = nn.LayerNorm(), nn.LayerNorm()
        self.attn, self.mlp = LinenAttention(f"{self.place}.attn"), LinenNetwork(f"{self.place}.mlp")

    def __call__(self, x):
        return run_block(self.place, self, x)


class LinenTransformer(nn.Module):
    def setup(self) -> None:
        self.embed = nn.Embed(WORDS, WIDTH)
        self.pos = self.param("pos", nn.initializers.zeros, (LENGTH, WIDTH))
        self.blocks = [LinenBlock(f"blocks.{i}") for i in range(BLOCKS)]
        self.norm, self.head = nn.LayerNorm(), nn.Dense(WORDS)

    def __call__(self, words):
        return run_model(self, words)


class LinenNormed(nn.Module):
    def setup(self) -> None:
        self.up, self.head = nn.Dense(WIDTH), nn.Dense(2)
        self.norm = nn.BatchNorm(use_running_average=False, momentum=0.75)

    def __call__(self, x):
        return run_normed(self, x)


# -------------------------------------------------------------------------------------------- nnx


class NnxAttention(nnx.Module):
    def __init__(self, place: str, rngs: nnx.Rngs) -> None:
        self.place = place
        for name in ("query", "key", "value", "out"):
            setattr(self, name, nnx.Linear(WIDTH, WIDTH, rngs=rngs))

    def __call__(self, x):
        return attend(self.place, self, x, jax.nn.softmax)


class NnxNetwork(nnx.Module):
    def __init__(self, place: str, rngs: nnx.Rngs) -> None:
        self.place = place
        self.up, self.down = nnx.Linear(WIDTH, 16, rngs=rngs), nnx.Linear(16, WIDTH, rngs=rngs)

    def __call__(self, x):
        return run_network(self.place, self, x, jax.nn.relu)


class NnxBlock(nnx.Module):
    def __init__(self, place: str, rngs: nnx.Rngs) -> None:
        self.place = place
        self.norm1, self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attn, self.mlp = NnxAttention(f"{place}.attn", rngs), NnxNetwork(f"{place}.mlp", rngs)

    def __call__(self, x):
        return run_block(self.place, self, x)


class NnxTransformer(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.pos = nnx.Param(jnp.zeros((LENGTH, WIDTH)))
        self.blocks = nnx.List([NnxBlock(f"blocks.{i}", rngs) for i in range(BLOCKS)])
        self.norm, self.head = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.Linear(WIDTH, WORDS, rngs=rngs)

    def __call__(self, words):
        return run_model(self, words, pos=self.pos[...])


class NnxNormed(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.up, self.head = nnx.Linear(4, WIDTH, rngs=rngs), nnx.Linear(WIDTH, 2, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.75, rngs=rngs)

    def __call__(self, x):
        return run_normed(self, x)


# ---------------------------------------------------------------------------------------- equinox


class EqxRows(eqx.Module):
    """An equinox layer, which takes a single row, applied to all rows."""

    layer: Any

    def __call__(self, x):
        return jax.vmap(jax.vmap(self.layer))(x)


def _rows(layer: Any) -> Any:
    return EqxRows(layer)


class EqxAttention(eqx.Module):
    place: str = eqx.field(static=True)
    query: Any
    key: Any
    value: Any
    out: Any

    def __init__(self, place: str, keys: Any) -> None:
        self.place = place
        self.query, self.key, self.value, self.out = (
            _rows(eqx.nn.Linear(WIDTH, WIDTH, key=next(keys))) for _ in range(4)
        )

    def __call__(self, x):
        return attend(self.place, self, x, jax.nn.softmax)


class EqxNetwork(eqx.Module):
    place: str = eqx.field(static=True)
    up: Any
    down: Any

    def __init__(self, place: str, keys: Any) -> None:
        self.place = place
        self.up = _rows(eqx.nn.Linear(WIDTH, 16, key=next(keys)))
        self.down = _rows(eqx.nn.Linear(16, WIDTH, key=next(keys)))

    def __call__(self, x):
        return run_network(self.place, self, x, jax.nn.relu)


class EqxBlock(eqx.Module):
    place: str = eqx.field(static=True)
    norm1: Any
    norm2: Any
    attn: EqxAttention
    mlp: EqxNetwork

    def __init__(self, place: str, keys: Any) -> None:
        self.place = place
        self.norm1, self.norm2 = _rows(eqx.nn.LayerNorm(WIDTH)), _rows(eqx.nn.LayerNorm(WIDTH))
        self.attn, self.mlp = EqxAttention(f"{place}.attn", keys), EqxNetwork(f"{place}.mlp", keys)

    def __call__(self, x):
        return run_block(self.place, self, x)


class EqxTransformer(eqx.Module):
    embed: Any
    pos: Any
    blocks: list
    norm: Any
    head: Any

    def __init__(self) -> None:
        keys = iter(jax.random.split(jax.random.key(0), 100))
        self.embed = _rows(eqx.nn.Embedding(WORDS, WIDTH, key=next(keys)))
        self.pos = jnp.zeros((LENGTH, WIDTH))
        self.blocks = [EqxBlock(f"blocks.{i}", keys) for i in range(BLOCKS)]
        self.norm = _rows(eqx.nn.LayerNorm(WIDTH))
        self.head = _rows(eqx.nn.Linear(WIDTH, WORDS, key=next(keys)))

    def __call__(self, words):
        return run_model(self, words)
