"""Tests of comparisons in which each program keeps its own parameters (``weights="as they are"``)."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from flax import linen
from flax.traverse_util import unflatten_dict
from torch import nn

import stablenum
import stablenum_jax
import stablenum_torch

RNG = np.random.default_rng(0)
WIDTH, HEADS = 8, 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.out = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        k, v = self.kv(memory).chunk(2, dim=-1)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (self.q(x), k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        out: torch.Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.self_attn = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.cross_attn = nn.LayerNorm(WIDTH), Attention()

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        x = x + self.self_attn(h, h)
        out: torch.Tensor = x + self.cross_attn(self.norm2(x), memory)
        return out


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, memory)
        return x


class AttentionPort(linen.Module):
    @linen.compact
    def __call__(self, x: Any, memory: Any) -> Any:
        q = linen.Dense(WIDTH, name="q")(x)
        k, v = jnp.split(linen.Dense(2 * WIDTH, name="kv")(memory), 2, axis=-1)
        q, k, v = (t.reshape(*t.shape[:2], HEADS, -1) for t in (q, k, v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(q.shape[-1])
        y = jnp.einsum("bhqk,bkhd->bqhd", linen.softmax(scores, axis=-1), v)
        return linen.Dense(WIDTH, name="out")(y.reshape(x.shape))


class LayerPort(linen.Module):
    @linen.compact
    def __call__(self, x: Any, memory: Any) -> Any:
        h = linen.LayerNorm(epsilon=1e-5, name="norm1")(x)
        x = x + AttentionPort(name="self_attn")(h, h)
        h = linen.LayerNorm(epsilon=1e-5, name="norm2")(x)
        return x + AttentionPort(name="cross_attn")(h, memory)


class DecoderPort(linen.Module):
    @linen.compact
    def __call__(self, x: Any, memory: Any) -> Any:
        for i in range(2):
            x = LayerPort(name=f"layers_{i}")(x, memory)
        return x


def carried_over(model: nn.Module) -> dict[str, Any]:
    flat = {}
    for name, p in model.named_parameters():
        array, (*path, last) = p.detach().numpy(), name.replace("layers.", "layers_").split(".")
        last = {"weight": "kernel" if array.ndim == 2 else "scale"}.get(last, last)
        flat[(*path, last)] = array.T if array.ndim == 2 else array
    return dict(unflatten_dict(flat))


def of_decoders(change: Any = lambda params: params) -> stablenum.DiffReport:
    torch.manual_seed(0)
    model = Decoder()
    x, memory = (RNG.normal(size=(2, n, WIDTH)).astype(np.float32) for n in (3, 4))
    params = change(carried_over(model))
    return stablenum.diff(
        stablenum_torch.program(
            lambda x, m: model(x, m).square().mean(), torch.tensor(x), torch.tensor(memory), model=model
        ),
        stablenum_jax.program(
            lambda p, x, m: jnp.mean(DecoderPort().apply({"params": p}, x, m) ** 2), params, x, memory
        ),
        weights="as they are",
    )


def test_a_right_port_of_two_layers_that_are_built_alike_is_the_same() -> None:
    report = of_decoders()
    assert report.ok, str(report)
    crossed = {n: str(s) for n, s in report.weights.items() if n[:8].replace("_", ".") not in str(s)}
    assert crossed == {}


def test_layers_that_were_carried_over_in_exchange_are_named() -> None:
    report = of_decoders(lambda p: {"layers_0": p["layers_1"], "layers_1": p["layers_0"]})
    assert not report.ok
    assert str(report.weights["layers_0.self_attn.q.kernel"]) == "layers.1.self_attn.q.weight, transposed"


def of_images(change: Any) -> stablenum.DiffReport:
    torch.manual_seed(0)
    model, x = nn.Conv2d(3, 4, 3), RNG.normal(size=(2, 3, 6, 6)).astype(np.float32)
    kernel, bias = (p.detach().numpy() for p in model.parameters())
    params = {"kernel": change(kernel.transpose(2, 3, 1, 0)), "bias": bias}
    port = linen.Conv(4, (3, 3), padding="VALID")
    return stablenum.diff(
        stablenum_torch.program(lambda x: model(x).exp().mean(), torch.tensor(x), model=model),
        stablenum_jax.program(
            lambda p, x: jnp.mean(jnp.exp(port.apply({"params": p}, x))), params, x.transpose(0, 2, 3, 1)
        ),
        weights="as they are",
    )


def test_a_kernel_whose_axes_were_exchanged_is_named() -> None:
    report = of_images(lambda kernel: kernel.transpose(1, 0, 2, 3))
    cause = report.causes[0]
    assert (cause.code, cause.confirmed) == ("transposed_weight", True), cause
    assert cause.sentence == "kernel holds the numbers of weight in another order."
    assert report.notes[0].endswith("on the left: kernel.")


def test_a_kernel_with_other_numbers_is_named() -> None:
    cause = of_images(lambda kernel: kernel * 1.01).causes[0]
    assert (cause.code, cause.confirmed) == ("other_input", True), cause
    assert cause.sentence == "kernel holds other numbers than weight."
    assert cause.remedy == "Give both programs the same numbers there."


def test_the_kernel_that_was_carried_over_is_no_difference() -> None:
    assert of_images(lambda kernel: kernel).ok
