"""What a comparison says of what it does not compare; steps and calls of one line are told apart."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import stablenum
import stablenum_jax
import stablenum_torch
from tests.parity.test_diff import PAIR, run

X = np.random.default_rng(5).normal(size=(4, 3)).astype(np.float32)
W = np.random.default_rng(6).normal(size=(3, 2)).astype(np.float32)


def in_torch(function: Any, x: Any = X) -> Any:
    p = torch.tensor(W, requires_grad=True)
    return stablenum_torch.program(lambda x: function(x @ p), torch.tensor(x))


def in_jax(function: Any, x: Any = X) -> Any:
    return stablenum_jax.program(lambda p, x: function(x @ p["p"]), {"p": jnp.asarray(W)}, jnp.asarray(x))


def module(*layers: nn.Module, rate: float | None = None, x: Any = X) -> Any:
    """A program of a model, with an optimizer if there is a rate."""
    model = nn.Sequential(*layers)
    optimizer = None if rate is None else torch.optim.SGD(model.parameters(), lr=rate)
    return stablenum_torch.program(
        lambda x: model(x).square().mean(), torch.tensor(x), model=model, optimizer=optimizer
    )


# --- results that are not finite ---------------------------------------------------------------------------


@pytest.mark.parametrize("made", [in_torch, in_jax], ids=["torch", "jax"])
def test_a_loss_that_is_nan_on_both_sides_is_an_error_with_both_places(made: Any) -> None:
    def roots(x: Any) -> Any:
        return (x**0.5).mean()

    with pytest.raises(stablenum.ProgramError, match="the loss is NaN in both programs") as caught:
        stablenum.diff(made(roots), made(roots))
    message = str(caught.value)
    assert "left program first in pow (" in message
    assert "right program first in pow (" in message
    assert message.count("test_diff_notes.py:") == 2
    assert "stablenum explain" in message


def test_a_batch_that_holds_nan_is_named() -> None:
    bad = np.full_like(X, np.nan)
    with pytest.raises(stablenum.ProgramError, match=r"the left program first in its argument x \[4, 3\]"):
        stablenum.diff(in_torch(lambda x: x.mean(), bad), in_torch(lambda x: x.mean(), bad))


def test_gradients_that_are_nan_on_both_sides_are_an_error_although_the_losses_agree() -> None:
    def loss(x: Any) -> Any:
        return (x * 0).abs().sqrt().sum()

    with pytest.raises(stablenum.ProgramError, match=r"the gradient of .* is NaN in both programs"):
        stablenum.diff(in_torch(loss), in_torch(loss))


def test_a_difference_before_a_nan_is_still_reported_with_a_note() -> None:
    def loss(scale: float) -> Any:
        return lambda x: x.square().mean() * scale + (x * 0).abs().sqrt().sum()

    report = stablenum.diff(in_torch(loss(1.0)), in_torch(loss(2.0)))
    assert not report.ok
    assert any("is NaN in both programs" in note for note in report.notes)


def test_minus_infinity_beside_finite_outputs_is_compared() -> None:
    def masked(x: Any) -> Any:
        return x.masked_fill(torch.tensor([True, False]), float("-inf"))

    assert stablenum.diff(in_torch(masked), in_torch(masked)).ok


# --- an optimizer of one side ------------------------------------------------------------------------------


def test_an_optimizer_of_one_side_alone_is_noted() -> None:
    layer = nn.Linear(3, 2)
    for sides, one, other in (((0.1, None), "left", "right"), ((None, 0.1), "right", "left")):
        report = stablenum.diff(*(module(layer, rate=rate) for rate in sides))
        (note,) = report.notes
        assert f"Only the {one} program has an optimizer: the updates are not compared" in note
        assert f"Give the {other} one its optimizer" in note
    assert not stablenum.diff(module(layer, rate=0.1), module(layer, rate=0.1)).notes


# --- weights -----------------------------------------------------------------------------------------------


def test_the_report_says_that_both_sides_keep_their_weights() -> None:
    layer = nn.Linear(3, 2)
    report = stablenum.diff(module(layer), module(layer), weights="as they are")
    assert not report.carried_over
    assert "Both sides keep their own weights. Gradients are compared between these, 2:" in str(report)
    assert "Weights of the right program" not in str(report)
    assert "Both sides keep their own weights" in report.to_html()
    assert json.loads(report.to_json())["carried_over"] is False
    carried = stablenum.diff(module(layer), module(layer))
    assert carried.carried_over
    assert "Weights of the right program, 2:" in str(carried)


@pytest.mark.parametrize(
    "weights", [{"0.weight": "0.weight"}, lambda a: {"0.weight": a["0.weight"]}], ids=["dict", "function"]
)
def test_weights_that_a_map_leaves_out_are_named(weights: Any) -> None:
    torch.manual_seed(0)
    report = stablenum.diff(module(nn.Linear(3, 2)), module(nn.Linear(3, 2)), weights=weights)
    assert any(
        "weights leaves out 0.bias of the right program, which keeps its own values" in n
        for n in report.notes
    )


def test_a_map_may_leave_out_what_is_not_computed_with() -> None:
    """The count of the batches is no floating-point number."""
    norm = nn.BatchNorm1d(3)
    names = {f"0.{n}": f"0.{n}" for n in ("weight", "bias", "running_mean", "running_var")}
    assert not stablenum.diff(module(norm), module(norm), weights=names).notes


def test_the_command_says_that_the_file_may_define_weights(tmp_path: Path) -> None:
    text = PAIR.replace("made(function)", "made(function, width=2)").replace("(4, 2)", "(4, width)")
    text = text.replace("made(nn.functional.{right})", "made(nn.functional.silu, width=3)")
    result = run(tmp_path, text)
    message = " ".join(result.stderr.replace("│", " ").split())
    assert result.returncode == 2, result.stdout
    assert "PAIR.py may define weights, such as weights = ('match', {...})" in message


FAILING = """
import torch
import stablenum_torch
{top}
def made(fails):
    def loss(x):
        if fails:
            raise RuntimeError("it is wrong.")
        return x.square().sum()
    return stablenum_torch.program(loss, torch.ones(3, requires_grad=True))

def left():
    {left}
    return made(False)

def right():
    return made(True)
"""


@pytest.mark.parametrize(
    ("top", "left", "said"),
    [
        ("", "pass", "Call its loss function with the same arguments"),
        ("1 / 0", "pass", "the file in pair.py failed, line 4: ZeroDivisionError: division by zero."),
        ("", "1 / 0", "left() in pair.py failed, line 13: ZeroDivisionError: division by zero."),
    ],
)
def test_a_program_that_fails_is_no_wrong_use_of_the_command(
    top: str, left: str, said: str, tmp_path: Path
) -> None:
    result = run(tmp_path, FAILING.format(top=top, left=left))
    assert result.returncode == 2
    assert result.stderr.startswith("Error: ")
    assert said in result.stderr
    assert not [word for word in ("Usage", "Invalid value", "..", "Traceback") if word in result.stderr]


def test_what_is_no_file_is_a_wrong_use_of_the_command(tmp_path: Path) -> None:
    result = run(tmp_path, "", "--json", "report.txt")
    assert result.returncode == 2
    assert "Usage" in result.stderr


# --- steps, files and rows ---------------------------------------------------------------------------------


def test_the_heading_names_the_step_where_there_are_several() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    once = stablenum.diff(module(layer, rate=0.1), module(layer, rate=0.2))
    assert "First difference, update:" in str(once)
    twice = stablenum.diff(module(layer, rate=0.1), module(layer, rate=0.2), steps=2)
    assert "First difference, step 1, update:" in str(twice)
    assert "First difference, step 1, update" in twice.to_html()


@pytest.mark.parametrize(("option", "suffix"), [("--html", ".html or .htm"), ("--json", ".json")])
def test_the_command_writes_a_form_only_to_its_suffix(option: str, suffix: str, tmp_path: Path) -> None:
    target = tmp_path / "report.pdf"
    result = run(tmp_path, PAIR.replace("{right}", "silu"), option, str(target))
    assert result.returncode == 2
    assert not target.exists()
    assert f"must end in {suffix}" in " ".join(result.stderr.replace("│", " ").split())


class Block(nn.Module):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(3, eps=eps)

    def forward(self, x: Any) -> Any:
        return x + torch.tanh(self.norm(x))


def test_the_page_marks_the_call_that_differs_among_those_of_one_line() -> None:
    sides = [module(Block(1e-5), Block(1e-5), Block(eps)) for eps in (1e-5, 1e-2)]
    report = stablenum.diff(*sides)
    assert report.first is not None
    assert report.first.left is not None
    assert report.first.left.module == "2.norm"
    (text,) = re.findall(r'id="data">(.*?)</script>', report.to_html(), re.S)
    i, j = json.loads(text)["first"]
    assert (report.left_rows[i].module, report.right_rows[j].module) == ("2.norm", "2.norm")


# --- layers that are used in another order than their numbers ----------------------------------------------


def of_layers(order: tuple[int, ...]) -> Any:
    def loss(p: Any, x: Any) -> Any:
        for k in order:
            x = jnp.tanh(x @ p[f"layer{k}"])
        return jnp.mean(x**2)

    return stablenum_jax.program(loss, {f"layer{k}": jnp.zeros((3, 3)) for k in range(3)}, jnp.asarray(X))


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1)])
def test_numbers_that_run_in_another_order_than_the_layers_are_named(order: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layers = [part for _ in range(3) for part in (nn.Linear(3, 3, bias=False), nn.Tanh())]
    report = stablenum.diff(module(*layers), of_layers(order))
    assert report.ok
    assert report.weights[f"layer{order[1]}"] == "2.weight, transposed"
    told = [note for note in report.notes if "the numbers in their names" in note]
    assert [("layer1 <- 4.weight" in note, "layer2 <- 2.weight" in note) for note in told] == (
        [] if order == (0, 1, 2) else [(True, True)]
    )


def test_updates_of_programs_with_other_weights_are_no_further_difference() -> None:
    def made(seed: int) -> Any:
        torch.manual_seed(seed)
        return module(nn.Linear(3, 2), rate=0.1)

    report = stablenum.diff(made(0), made(1), weights="as they are")
    assert {d.left.phase for d in report.differences if d.left is not None} == {"forward"}
    assert any("the updates are not compared" in note for note in report.notes)
    left = made(0)
    torch.manual_seed(0)
    same = stablenum.diff(left, module(nn.Linear(3, 2), rate=0.2), weights="as they are")
    assert [d.left.phase for d in same.differences if d.left is not None] == ["update"]
    assert not any("the updates are not compared" in note for note in same.notes)


def test_what_is_returned_beside_the_loss_is_said_not_to_be_compared() -> None:
    w, x = np.ones((3, 3), "f"), np.ones((2, 3), "f")
    weight = torch.tensor(w, requires_grad=True)

    def of_torch(x: Any) -> Any:
        y = x @ weight
        return y.square().mean(), {"mean": y.mean(0)}

    def of_jax(w: Any, x: Any) -> Any:
        y = x @ w
        return jnp.mean(y**2), {"mean": 2 * y.mean(0), "square": y**2, "count": jnp.ones((), int)}

    left = stablenum_torch.program(of_torch, torch.tensor(x))
    right = stablenum_jax.program(of_jax, jnp.asarray(w), jnp.asarray(x))
    report = stablenum.diff(left, right)

    assert report.ok
    text = " ".join(report.notes)
    assert "The left program returns output[1]['mean'] beside the loss" in text
    assert "The right program returns output[1]['mean'] and 1 more beside the loss" in text
    assert "count" not in text
