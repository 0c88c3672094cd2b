"""Compiled against eager, autocast, and implementations of attention: the same, and how far each is off."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend

import stablenum
import stablenum_torch
from tests.pairs.real import within

X = torch.linspace(-2, 2, 30).reshape(6, 5)


def program(backend: Any = None, *, dropout: float = 0.0, compute: torch.dtype | None = None) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.Dropout(dropout), nn.GELU(), nn.Linear(8, 3))
    run = model if backend is None else torch.compile(model, backend=backend)
    return stablenum_torch.program(lambda x: run(x).float().square().mean(), X, model=model, compute=compute)


def one_percent_off(module: Any, inputs: Any) -> Any:
    """A backend that compiles a module wrongly."""
    return lambda *args: tuple(1.01 * out for out in module(*args))


BACKENDS = [
    "aot_eager",
    pytest.param("inductor", marks=pytest.mark.slow(reason="TorchInductor compiles C++")),
]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_program_is_run_as_it_is(backend: str) -> None:
    report = stablenum.diff(program(), program(backend))
    assert report.ok
    assert report.notes == ()
    assert report.left_off is not None
    assert report.right_off is not None
    assert report.left_off.compiled is None
    assert report.right_off.compiled is not None
    assert set(report.right_off.compiled) == {"loss", "gradient"}
    assert all(0 < error < 1e-5 for error in report.right_off.compiled.values())
    assert "compiled: off by at most" in str(report)
    assert 'scope="row">right, compiled</th><td colspan="4">loss by' in report.to_html()
    assert "left, compiled" not in report.to_html()


def test_what_a_compiler_gets_wrong_is_said() -> None:
    right = program(one_percent_off)
    report = stablenum.diff(program(), right)
    assert report.right_off is not None
    assert report.right_off.compiled is not None
    assert report.right_off.compiled["loss"] == pytest.approx(0.0201, rel=0.01)
    assert "What the compiler makes of the right program is further off" in report.notes[0]
    assert report.left_off is not None
    assert report.left_off.compiled is None


class Shifted(nn.Module):
    """The gradient of the shift is zero, but for rounding: softmax takes no notice of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.shift = nn.Linear(5, 8), nn.Parameter(torch.full((1,), 0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) + self.shift).softmax(-1).square().mean()


@pytest.mark.parametrize("backend", ["aot_eager", one_percent_off])
def test_a_gradient_that_is_nothing_but_rounding_says_nothing_of_a_compiler(backend: Any) -> None:
    def made(backend: Any = None) -> Any:
        torch.manual_seed(0)
        model = Shifted()
        run = model if backend is None else torch.compile(model, backend=backend)
        return stablenum_torch.program(run, X, model=model)

    report = stablenum.diff(made(), made(backend))
    assert report.right_off is not None
    assert report.right_off.compiled is not None
    assert report.right_off.compiled["gradient"] < (1e-5 if backend == "aot_eager" else 0.1)
    assert bool(report.notes) == (backend == one_percent_off)


def test_the_compiled_program_is_given_the_weights_and_leaves_its_own() -> None:
    torch.manual_seed(3)
    model = nn.Linear(5, 2)
    compiled = torch.compile(lambda x: model(x).square().mean(), backend="aot_eager")
    right = stablenum_torch.program(compiled, X, model=model)
    torch.manual_seed(4)
    other = nn.Linear(5, 2)
    left = stablenum_torch.program(lambda x: other(x).square().mean(), X, model=other)
    before, state = model.weight.detach().clone(), torch.get_rng_state()
    report = stablenum.diff(left, right)
    assert report.right_off is not None
    assert report.right_off.compiled is not None
    assert max(report.right_off.compiled.values()) < 1e-5
    assert torch.equal(model.weight, before)
    assert model.weight.grad is None
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_compiled_step_that_draws_numbers_is_not_run(dropout: float) -> None:
    right = program("aot_eager", dropout=dropout)
    right.play(lambda index, data: None)
    assert (right.compiled() is None) == (dropout > 0)


def test_a_jitted_function_is_compiled_as_a_whole() -> None:
    report = stablenum.diff(within.jax_model(), within.jax_model(jit=True))
    assert report.ok
    assert report.left_off is not None
    assert report.left_off.compiled is None
    assert report.right_off is not None
    assert report.right_off.compiled is not None
    assert set(report.right_off.compiled) == {"loss", "gradient"}
    assert all(0 < error < 1e-5 for error in report.right_off.compiled.values())


def test_autocast_names_the_operation_that_rounds_most() -> None:
    report = stablenum.diff(program(), program("aot_eager", compute=torch.bfloat16))
    off = report.right_off
    assert off is not None
    assert off.compiled is not None
    assert off.operation == "matmul"
    assert 1e-4 < off.added < 0.1
    assert 1e-5 < off.compiled["gradient"] < 0.1
    assert report.notes == ()


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_attention_is_the_same_by_each_implementation(backend: SDPBackend) -> None:
    report = stablenum.diff(within.torch_attention(SDPBackend.MATH), within.torch_attention(backend))
    assert report.ok
    for off in (report.left_off, report.right_off):
        assert off is not None
        assert 0 < off.error < 1e-6
        assert off.operation
        assert off.where.partition(":")[0].endswith("within.py")


def test_few_entries_tell_how_far_a_value_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    from stablenum.diagnosis.diff.sides import rounding

    whole = stablenum.diff(program(), program()).right_off
    kept: list[int] = []
    sampled = rounding._sampled
    monkeypatch.setattr(rounding, "_MOST", 0)
    monkeypatch.setattr(rounding, "_LEAST", 4)
    monkeypatch.setattr(
        rounding, "_sampled", lambda a, n: (kept.append(sampled(a, n).size), sampled(a, n))[1]
    )
    few = stablenum.diff(program(), program()).right_off
    assert max(kept) == 4
    assert few is not None
    assert whole is not None
    assert few.error == whole.error
    assert 0 < few.added <= 2 * whole.added
    assert np.isfinite(few.added)
