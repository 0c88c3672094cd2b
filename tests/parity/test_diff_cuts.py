"""The place of a difference by exchange, the lines within which it lies, and who called them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import stablenum
import stablenum_jax
import stablenum_torch
from stablenum.diagnosis.diff.compare import compared
from stablenum.diagnosis.diff.places.cuts import least_cut
from stablenum.diagnosis.diff.sides.recording import undisturbed

X = np.random.default_rng(1).normal(size=(6, 6)).astype(np.float32)
W = np.random.default_rng(2).normal(size=(6, 6)).astype(np.float32)
HERE = Path(__file__).name


def in_torch(w: Any, x: Any) -> Any:
    h = torch.tanh(x @ w)
    b = h.cumsum(0) - h.flip(0) * 2
    return (b @ x).square().mean()


def in_jax(w: Any, x: Any) -> Any:
    h = jnp.tanh(x @ w)
    b = jnp.sort(h, 0) + jnp.flip(h, 0)
    c = b * jnp.arange(6)
    return jnp.mean((c @ x) ** 2)


def programs() -> tuple[Any, Any]:
    model = torch.nn.ParameterDict({"w": torch.tensor(W)})
    return (
        stablenum_torch.program(lambda x: in_torch(model["w"], x), torch.tensor(X), model=model),
        stablenum_jax.program(lambda p, x: in_jax(p["w"], x), {"w": W}, X),
    )


def line_of(function: Any, text: str) -> str:
    first = function.__code__.co_firstlineno
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()[first:]
    return f"{HERE}:{next(n for n, line in enumerate(lines, first + 1) if text in line)}"


def test_the_least_that_heals_is_the_place() -> None:
    """Neither line has a counterpart; what follows them does."""

    def body() -> Any:
        comparison = compared(*programs())
        return comparison, least_cut(comparison, comparison.groups[0])

    comparison, found = undisturbed(body)
    assert found is not None
    place, patch = found
    assert (patch.agrees, patch.side) == (True, "right")
    assert comparison.left.trace.values[patch.left].producer is not None
    assert place.left.step.place.code.startswith("b = h.cumsum")
    assert place.right.step.place.code.startswith("b = jnp.sort")


def test_what_no_change_mends_is_said_to_lie_within_lines() -> None:
    report = stablenum.diff(*programs())
    (mine,), theirs = report.first.within
    assert mine.endswith(line_of(in_torch, "b = "))
    assert [w.rpartition("/")[2] for w in theirs] == [line_of(in_jax, "b = "), line_of(in_jax, "c = ")]
    shown = f"What differs lies within {mine} on the left and {theirs[0]}, {theirs[1]} on the right."
    assert shown in str(report)
    assert shown in report.to_html()
    assert report.to_dict()["differences"][0]["within"] == ((mine,), theirs)


def test_a_confirmed_cause_needs_no_lines() -> None:
    model = torch.nn.Linear(6, 6)
    report = stablenum.diff(
        stablenum_torch.program(lambda x: torch.relu(model(x)).mean(), torch.tensor(X), model=model),
        stablenum_torch.program(lambda x: torch.tanh(model(x)).mean(), torch.tensor(X), model=model),
    )
    assert report.causes[0].confirmed
    assert "lies within" not in str(report)


@pytest.fixture
def package(tmp_path: Path) -> Any:
    """A module of an installed package."""
    folder = tmp_path / "site-packages"
    (folder / "layers_of_others").mkdir(parents=True)
    (folder / "layers_of_others" / "__init__.py").write_text(
        "def act(x, slope):\n    return x.clamp(min=0) + slope * x.clamp(max=0)\n", encoding="utf-8"
    )
    sys.path.insert(0, str(folder))
    yield importlib.import_module("layers_of_others")
    sys.path.remove(str(folder))
    del sys.modules["layers_of_others"]


def test_a_line_of_a_package_comes_with_the_line_that_calls_it(package: Any) -> None:
    model = torch.nn.Linear(6, 6)

    def loss(slope: float) -> Any:
        def body(x: Any) -> Any:
            return package.act(model(x), slope).mean()

        return stablenum_torch.program(body, torch.tensor(X), model=model)

    report = stablenum.diff(loss(0.1), loss(0.2))
    place = report.first.left
    assert place.where.endswith("layers_of_others/__init__.py:2")
    assert place.called_at.rpartition("/")[2] == line_of(
        test_a_line_of_a_package_comes_with_the_line_that_calls_it, "return package.act"
    )
    assert f"called at {place.called_at}" in str(report)
    assert place.called_at in report.to_html()
