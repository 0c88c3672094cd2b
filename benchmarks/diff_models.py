"""A transformer in PyTorch and its port to plain JAX, which compute the same, in a size of choice."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from torch import Tensor, nn

__all__ = [
    "SIZES",
    "Size",
    "Transformer",
    "batch",
    "jax_loss",
    "jax_optimizer",
    "jax_parameters",
    "torch_loss",
    "torch_optimizer",
]

TOKENS, RATE, DECAY = 512, 1e-4, 1e-2


class Size(NamedTuple):
    """A model by its width, its number of layers and its number of heads."""

    width: int
    layers: int
    heads: int


SIZES = {"1M": Size(128, 4, 4), "10M": Size(320, 8, 5), "100M": Size(768, 14, 12)}


def batch() -> tuple[np.ndarray, np.ndarray]:
    """Return two rows of 64 tokens, and the tokens that follow."""
    drawn = np.random.default_rng(0).integers(0, TOKENS, (2, 65))
    return drawn[:, :-1], drawn[:, 1:]


# --- PyTorch -----------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention and a feed-forward network, each after a norm."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.heads = size.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mixed = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the next layer's input."""
        parts = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mixed(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A decoder."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def torch_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the cross-entropy."""
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


# --- JAX ---------------------------------------------------------------------------------------


def jax_parameters(size: Size) -> dict[str, Any]:
    """Return the parameters by layer."""
    rng, width = np.random.default_rng(1), size.width

    def linear(inputs: int, outputs: int) -> dict[str, Any]:
        kernel = rng.standard_normal((inputs, outputs), np.float32) / np.float32(np.sqrt(inputs))
        return {"kernel": jnp.asarray(kernel), "bias": jnp.zeros(outputs)}

    def norm() -> dict[str, Any]:
        return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}

    def block() -> dict[str, Any]:
        return {
            "norm1": norm(),
            "qkv": linear(width, 3 * width),
            "mixed": linear(width, width),
            "norm2": norm(),
            "up": linear(width, 4 * width),
            "down": linear(4 * width, width),
        }

    embed = jnp.asarray(rng.standard_normal((TOKENS, width), np.float32))
    blocks = [block() for _ in range(size.layers)]
    return {"embed": embed, "blocks": blocks, "norm": norm(), "head": linear(width, TOKENS)}


def _dense(p: dict[str, Any], x: Any) -> Any:
    return x @ p["kernel"] + p["bias"]


def _norm(p: dict[str, Any], x: Any) -> Any:
    return jax.nn.standardize(x, epsilon=1e-5) * p["scale"] + p["bias"]


def _block(p: dict[str, Any], x: Any, heads: int, approximate: bool) -> Any:
    parts = jnp.split(_dense(p["qkv"], _norm(p["norm1"], x)), 3, axis=-1)
    q, k, v = (part.reshape(*part.shape[:-1], heads, -1) for part in parts)
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / jnp.sqrt(q.shape[-1])
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(jnp.where(seen, scores, -1e9)), v)
    x = x + _dense(p["mixed"], mixed.reshape(x.shape))
    return x + _dense(p["down"], jax.nn.gelu(_dense(p["up"], _norm(p["norm2"], x)), approximate))


def jax_loss(p: dict[str, Any], x: Any, y: Any, *, heads: int, approximate: bool = False) -> Any:
    """Return the cross-entropy; with ``approximate``, that of another GELU than PyTorch's."""
    h = p["embed"][x]
    for block in p["blocks"]:
        h = _block(block, h, heads, approximate)
    logits = _dense(p["head"], _norm(p["norm"], h))
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def torch_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW."""
    return torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)


def jax_optimizer() -> optax.GradientTransformation:
    """Return AdamW."""
    return optax.adamw(RATE, weight_decay=DECAY)
