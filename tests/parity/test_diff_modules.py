"""The module of an operation of JAX in a report: the path in the model, as PyTorch has it."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

import stablenum
import stablenum_jax
import stablenum_torch

WIDTH = 4
X = np.random.default_rng(0).normal(size=(6, WIDTH)).astype(np.float32)


class TorchBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        return torch.nn.functional.gelu(self.linear(x))


class TorchModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([TorchBlock(), TorchBlock()])

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


class NnxBlock(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return jax.nn.gelu(self.linear(x))


class NnxModel(nnx.Module):
    def __init__(self) -> None:
        self.blocks = nnx.List([NnxBlock(nnx.Rngs(i)) for i in range(2)])

    def encode(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


class EquinoxBlock(eqx.Module):
    linear: eqx.nn.Linear

    def __call__(self, x: Any) -> Any:
        return jax.nn.gelu(self.linear(x))


class EquinoxModel(eqx.Module):
    blocks: list[EquinoxBlock]

    def encode(self, x: Any) -> Any:
        for block in self.blocks:
            x = jax.vmap(block)(x)
        return x


def equinox_model() -> EquinoxModel:
    return EquinoxModel([EquinoxBlock(eqx.nn.Linear(WIDTH, WIDTH, key=jax.random.key(i))) for i in range(2)])


@pytest.mark.parametrize("make", [NnxModel, equinox_model])
def test_modules_of_nnx_and_equinox_are_named_by_their_paths(make: Any) -> None:
    torch.manual_seed(0)
    model, x = TorchModel(), torch.from_numpy(X)
    left = stablenum_torch.program(lambda: (model(x) ** 2).mean(), model=model)
    # The method called first is not __call__, which alone is given a name.
    right = stablenum_jax.program(lambda m, x: jnp.mean(m.encode(x) ** 2), make(), jnp.asarray(X))
    before = {kind: kind.__call__ for kind in (NnxBlock, EquinoxBlock, nnx.Linear, eqx.nn.Linear)}

    first = stablenum.diff(left, right).first

    assert first is not None
    assert first.left is not None
    assert first.right is not None
    assert (first.left.module, first.right.module) == ("blocks.0", "blocks.0")
    assert {kind: kind.__call__ for kind in before} == before


class LinenModel(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        return linen.Dense(WIDTH, use_bias=False, name="linear")(x)


@pytest.mark.parametrize(
    ("make", "layer"),
    [
        (LinenModel, "flax.linen.Dense"),
        (lambda: linen.Sequential([linen.Dense(WIDTH, use_bias=False)]), "flax.linen.Sequential"),
        (lambda: nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=nnx.Rngs(0)), "flax.nnx.Linear"),
    ],
)
def test_an_operation_inside_a_layer_of_a_library_is_said_to_be_the_layers(make: Any, layer: str) -> None:
    linear, model = nn.Linear(WIDTH, WIDTH, bias=False), make()

    def loss(p: Any, x: Any) -> Any:
        y = model.apply(p, x) if isinstance(model, linen.Module) else p(x)
        return jnp.mean(y**2)

    params = model.init(jax.random.key(0), X) if isinstance(model, linen.Module) else model
    report = stablenum.diff(
        stablenum_torch.program(lambda x: (2 * linear(x)).square().mean(), torch.from_numpy(X), model=linear),
        stablenum_jax.program(loss, params, X),
    )
    operations = {row.operation for row in report.right_rows if row.operation.endswith("matmul")}
    assert operations == {f"{layer}: matmul"}


@pytest.mark.parametrize("power", [2, 4])
def test_groups_of_other_entries_are_told_by_formula_or_counted(power: int) -> None:
    image = np.random.default_rng(1).normal(size=(2, 8, 5)).astype(np.float32)
    norm, last = nn.GroupNorm(4, 8), np.ascontiguousarray(image.transpose(0, 2, 1))

    def other_axes(p: Any, x: Any) -> Any:
        groups = x.reshape(2, 5, 4, 2)
        mean = groups.mean(axis=(0, 1, 3), keepdims=True)
        variance = jnp.mean(jnp.abs(groups - mean) ** power, axis=(0, 1, 3), keepdims=True)
        y = ((groups - mean) * jax.lax.rsqrt(variance + 1e-5)).reshape(x.shape)
        return jnp.mean(jnp.exp(y * p["weight"] + p["bias"]))

    left = stablenum_torch.program(lambda x: norm(x).exp().mean(), torch.from_numpy(image), model=norm)
    right = stablenum_jax.program(other_axes, {"weight": np.ones(8, "f"), "bias": np.zeros(8, "f")}, last)

    cause = stablenum.diff(left, right).causes[0]

    assert cause.code == "norm_axis"
    assert cause.confirmed == (power == 2)
    counts = "the left program takes 8 statistics of 10 entries each, the right one 4 of 20."
    assert ("axis (2, 3)" in cause.sentence) if cause.confirmed else (cause.sentence == counts)
