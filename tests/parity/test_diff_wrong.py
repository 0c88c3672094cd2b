"""``stablenum.diff`` and programs that fail, change or get other arguments; what it leaves as it was."""

from __future__ import annotations

import io
import itertools
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

import stablenum
import stablenum_jax
import stablenum_torch
from stablenum.commands.diff.progress import shown
from stablenum.diagnosis.diff.compare import STAGES, reported
from tests.parity.test_diff import PAIR, jax_program, run, torch_program

X = np.random.default_rng(5).normal(size=(4, 3)).astype(np.float32)
W = np.random.default_rng(6).normal(size=(3, 2)).astype(np.float32)


def of_torch(function: Callable[[Any], Any], x: Any = X) -> Any:
    p = torch.tensor(W, requires_grad=True)
    return stablenum_torch.program(lambda x: function(x @ p).square().mean(), torch.tensor(x))


def of_jax(function: Callable[[Any], Any], x: Any = X) -> Any:
    return stablenum_jax.program(
        lambda p, x: jnp.square(function(x @ p["p"])).mean(), {"p": jnp.asarray(W)}, jnp.asarray(x)
    )


def same(x: Any) -> Any:
    return 1.5 * x


# --- programs that change ----------------------------------------------------------------------------------

COUNT = itertools.count(1)
CHANGING: dict[str, Callable[[Any], Any]] = {
    "python": lambda x: random.random() * x,
    "numpy": lambda x: float(np.random.uniform()) * x,
    "time": lambda x: (time.perf_counter_ns() % 1009) * x,
    "a counter": lambda x: next(COUNT) * x,
    "more operations each time": lambda x: x.reshape(-1).sum() + sum([x * 0.3] * next(COUNT)),
}


@pytest.mark.parametrize("changing", CHANGING.values(), ids=CHANGING)
@pytest.mark.parametrize("made", [of_torch, of_jax], ids=["torch", "jax"])
def test_a_program_that_is_not_deterministic_is_named(made: Any, changing: Any) -> None:
    report = stablenum.diff(made(changing), made(same))
    note = report.notes[0]
    assert "The left program is not the same when it runs again" in note
    assert "test_diff_wrong.py" in note
    assert note in str(report)
    note = stablenum.diff(made(same), made(changing)).notes[0]
    assert "The right program is not the same" in note


def test_dropout_is_deterministic_since_generators_are_restored() -> None:
    torch.manual_seed(0)  # 1 mask in 256 drops everything, and then nothing can be set right
    report = stablenum.diff(of_torch(lambda x: nn.functional.dropout(x, 0.5)), of_torch(same))
    assert not report.ok
    assert report.notes == ()


def test_a_program_that_fails_when_it_runs_again_is_named() -> None:
    batches = iter([2.0])
    report = stablenum.diff(of_torch(lambda x: next(batches) * x), of_torch(same))
    assert any("The left program failed when it ran again: StopIteration" in note for note in report.notes)


# --- arguments ---------------------------------------------------------------------------------------------


def test_other_batches_are_named_at_once() -> None:
    report = stablenum.diff(of_torch(same), of_jax(same, X + 1))
    (note,) = report.notes
    assert "x [4, 3] of the left program lies in [" in note
    assert "args[1] [4, 3] of the right one in [" in note
    assert f"{X.max():.6g}" in note
    assert f"{X.max() + 1:.6g}" in note
    assert str(report).index(note) < str(report).index("First difference")


def test_a_batch_in_another_layout_is_the_same_batch() -> None:
    report = stablenum.diff(of_torch(same), of_jax(lambda x: 2 * x.T, X))
    assert report.notes == ()
    turned = stablenum_jax.program(
        lambda p, x: jnp.square(2 * (x.T @ p["p"])).mean(), {"p": jnp.asarray(W)}, jnp.asarray(X.T)
    )
    report = stablenum.diff(of_torch(same), turned)
    assert not report.ok
    assert report.notes == ()


def test_labels_in_another_form_are_not_called_another_batch() -> None:
    labels = np.asarray([0, 1, 1, 0])
    p = torch.tensor(W, requires_grad=True)
    left = stablenum_torch.program(
        lambda x, y: nn.functional.cross_entropy(x @ p, y), torch.tensor(X), torch.tensor(labels)
    )
    right = stablenum_jax.program(
        lambda p, x, y: -2 * (jax.nn.log_softmax(x @ p["p"]) * y).sum(-1).mean(),
        {"p": jnp.asarray(W)},
        jnp.asarray(X),
        jnp.eye(2)[labels],
    )
    report = stablenum.diff(left, right)
    assert not report.ok
    assert report.notes == ()


# --- results that are not finite ---------------------------------------------------------------------------


@pytest.mark.parametrize("made", [of_torch, of_jax], ids=["torch", "jax"])
def test_an_infinite_result_agrees_with_none(made: Any) -> None:
    def shifted(number: float) -> Any:
        return made(lambda x: x + number)

    with pytest.raises(stablenum.ProgramError, match="the loss is infinite in both programs"):
        stablenum.diff(shifted(float("inf")), shifted(float("inf")))
    for other in (0.0, float("nan")):
        report = stablenum.diff(shifted(other), shifted(float("inf")))
        assert report.first is not None
        assert report.first.error == float("inf")


def test_flags_are_compared_too() -> None:
    def program(limit: float) -> Any:
        return stablenum_jax.program(lambda p, x: x @ p > limit, jnp.asarray(W), jnp.asarray(X))

    assert stablenum.diff(program(0.0), program(0.0)).ok
    assert stablenum.diff(program(0.0), program(0.5)).first is not None


# --- exceptions --------------------------------------------------------------------------------------------


def failing(x: Any) -> Any:
    return x * (1 / len(()))  # the line that fails


@pytest.mark.parametrize("made", [of_torch, of_jax], ids=["torch", "jax"])
def test_an_exception_names_the_program_and_the_line(made: Any) -> None:
    for side, programs in (("left", (made(failing), made(same))), ("right", (made(same), made(failing)))):
        with pytest.raises(stablenum.ProgramError, match=f"the {side} program failed at ") as caught:
            stablenum.diff(*programs)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert "test_diff_wrong.py:" in str(caught.value)
        assert "return x * (1 / len(()))" in str(caught.value)
        assert "ZeroDivisionError: division by zero" in str(caught.value)


def test_an_exception_inside_the_framework_is_named_too() -> None:
    layer = nn.Linear(7, 2)
    program = stablenum_torch.program(layer, torch.tensor(X), model=layer)
    with pytest.raises(stablenum.ProgramError, match="the left program failed: RuntimeError: mat1 and mat2"):
        stablenum.diff(program, of_torch(same))


def test_the_command_names_the_line_of_an_exception(tmp_path: Path) -> None:
    text = PAIR.replace("{right}", "silu").replace("function(layer(x))", "(layer(x) * (1 / len(())))")
    result = run(tmp_path, text)
    assert result.returncode == 2
    message = " ".join(result.stderr.replace("│", " ").split())
    assert "the left program failed at" in message
    assert "ZeroDivisionError" in message


# --- side effects ------------------------------------------------------------------------------------------


class Busy(nn.Module):
    """A model that changes all it can reach."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.out = nn.Linear(3, 2)
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x.mul_(0.5)
            self.seen += 1
            self.out.weight.clamp_(-0.1, 0.1)
        self.calls += 1
        x = self.norm(x) + torch.randn(3) + random.random() + float(np.random.uniform())
        self.eval()
        if self.fails:
            raise KeyError("missing")
        made: torch.Tensor = nn.functional.dropout(self.out(x), 0.5)
        return made


class State:
    """All that a comparison must leave as it was."""

    def __init__(self, model: Busy, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
        self.objects = (model, optimizer, x)
        self.before = self.now()

    def now(self) -> list[Any]:
        model, optimizer, x = self.objects
        held = [*model.state_dict().values(), *(p.grad for p in model.parameters()), x, torch.get_rng_state()]
        held += [v for state in optimizer.state.values() for v in state.values()]
        plain = [m.training for m in model.modules()]
        generators = [random.getstate(), str(np.random.get_state())]
        return [[t.clone() for t in held], plain, model.calls, generators, optimizer.param_groups[0]["lr"]]

    def kept(self) -> bool:
        tensors, *plain = self.before
        others, *rest = self.now()
        assert len(tensors) == len(others)
        return plain == rest and all(torch.equal(a, b) for a, b in zip(tensors, others, strict=True))


def busy() -> tuple[Any, State, Busy]:
    torch.manual_seed(0)
    model, x = Busy(), torch.tensor(X)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(x.clone()).square().mean().backward()
    optimizer.step()
    model.train()
    program = stablenum_torch.program(lambda x: model(x).square().mean(), x, model=model, optimizer=optimizer)
    return program, State(model, optimizer, x), model


def test_nothing_of_the_users_is_changed() -> None:
    program, state, _ = busy()
    stablenum.diff(program, program, weights="as they are", steps=2)
    assert state.kept()


@pytest.mark.parametrize("side", ["left", "right"])
def test_nothing_of_the_users_is_changed_by_an_exception(side: str) -> None:
    program, state, model = busy()
    model.fails = True
    programs = (program, jax_program()) if side == "left" else (jax_program(), program)
    with pytest.raises(stablenum.ProgramError, match=f"the {side} program failed.*KeyError: 'missing'"):
        stablenum.diff(*programs)
    assert state.kept()


def test_nothing_of_a_program_of_jax_is_changed() -> None:
    x, p = X.copy(), {"p": W.copy()}
    drawn = random.getstate(), str(np.random.get_state())
    program = stablenum_jax.program(
        lambda p, x: jnp.square(random.random() * (x @ p["p"])).mean() + np.random.uniform(), p, x
    )
    stablenum.diff(program, of_jax(same))
    assert (random.getstate(), str(np.random.get_state())) == drawn
    np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(p["p"], W)


# --- progress ----------------------------------------------------------------------------------------------


def test_every_stage_is_said_in_its_order() -> None:
    stages: list[str] = []
    reported(torch_program(), jax_program(), progress=stages.append)
    assert tuple(stages) == STAGES


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_shows_the_stages_on_a_terminal_only(*, terminal: bool) -> None:
    written = io.StringIO()
    with shown(Console(file=written, force_terminal=terminal, width=100)) as begin:
        for stage in STAGES:
            begin(stage)
    assert ("trying causes" in written.getvalue()) is terminal
    assert bool(written.getvalue()) is terminal
