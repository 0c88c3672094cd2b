"""Named arrays of a program that cannot be recorded, such as those that an inference engine dumps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stablenum
import stablenum_torch
from tests.lockfile.data import WEIGHTS, X
from tests.lockfile.programs import PROGRAMS, in_torch


def forward(temperature: float = 1.0, form: Any = np.float32, epsilon: float = 1e-5) -> dict[str, Any]:
    """What an engine computes with the same weights, in its own format."""
    weights = {name: x.astype(form) for name, x in WEIGHTS.items()}
    hidden = np.tanh(X.astype(form) @ weights["up"].T + weights["up_bias"])
    centred = hidden - hidden.mean(-1, keepdims=True)
    normed = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + form(epsilon)) * weights["gain"]
    logits = normed @ weights["head"].T / form(temperature)
    shifted = logits - logits.max(-1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    names = ("hidden", "normed", "logits", "logprobs")
    return dict(zip(names, (hidden, normed, logits, logprobs), strict=True))


def dumped(folder: Path, arrays: dict[str, Any]) -> Any:
    np.savez(folder / "engine.npz", **arrays)
    return stablenum.load_program(folder / "engine.npz")


@pytest.mark.slow
@pytest.mark.parametrize("form", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("framework", PROGRAMS)
def test_an_engine_that_computes_the_same_agrees(framework: str, form: Any, tmp_path: Path) -> None:
    report = stablenum.diff(dumped(tmp_path, forward(form=form)), PROGRAMS[framework]())
    assert report.ok, str(report)
    assert report.verdict == "the same where both have values"
    assert report.matched[0] == (4, 4)
    assert len([n for n in report.notes if ": the same as " in n]) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "first", "code"),
    [({"temperature": 1.001}, "logits", "head"), ({"epsilon": 1e-3}, "normed", "gain")],
)
@pytest.mark.parametrize("framework", PROGRAMS)
def test_the_first_array_that_differs_is_named_with_the_line_of_the_program(
    framework: str, fault: dict[str, float], first: str, code: str, tmp_path: Path
) -> None:
    report = stablenum.diff(dumped(tmp_path, forward(**fault)), PROGRAMS[framework]())
    assert not report.ok
    assert report.first.result == first
    assert report.first.left.operation == first
    assert code in report.first.right.code, str(report)
    assert not report.causes  # nothing was tried


def test_either_side_may_be_the_dump_and_the_other_a_recording(tmp_path: Path) -> None:
    dump = dumped(tmp_path, forward(temperature=1.001))
    stablenum.save_program(in_torch(), tmp_path / "golden.snum")
    recorded = stablenum.load_program(tmp_path / "golden.snum")
    for sides in ((dump, recorded), (recorded, dump), (in_torch(), dump)):
        report = stablenum.diff(*sides)
        assert report.first.result == "logits"
    assert report.first.right.where.endswith("engine.npz")


def test_arrays_are_found_in_another_layout(tmp_path: Path) -> None:
    arrays = forward()
    turned = {"hidden": arrays["hidden"].T, "logits": arrays["logits"].reshape(3, 4, 5)}
    report = stablenum.diff(dumped(tmp_path, turned), in_torch())
    assert report.ok, str(report)
    assert report.matched[0] == (2, 2)


def test_what_the_program_lacks_is_said(tmp_path: Path) -> None:
    arrays = {**forward(), "cache": np.random.default_rng(0).normal(size=(7, 11)), "tokens": np.arange(9)}
    report = stablenum.diff(dumped(tmp_path, arrays), in_torch())
    assert report.ok
    assert [n.partition(":")[0] for n in report.notes if "no value of the program is near" in n] == [
        "cache",
        "tokens",
    ]


@pytest.mark.slow
def test_a_dump_that_has_nothing_of_the_program_is_refused(tmp_path: Path) -> None:
    dump = dumped(tmp_path, {"a": np.random.default_rng(1).normal(size=(40, 3))})
    with pytest.raises(ValueError, match=r"none of the 1 arrays of .* is near a value of the program"):
        stablenum.diff(dump, in_torch())
    with pytest.raises(ValueError, match="one of the two sides must be a program with its operations"):
        stablenum.diff(dump, dump)


@pytest.mark.parametrize("weights", [{"head": "head"}, ("match", {"head": "head"}), lambda left: left])
def test_weights_are_refused_with_named_arrays(weights: Any, tmp_path: Path) -> None:
    dump = dumped(tmp_path, forward())
    for sides in ((dump, in_torch()), (in_torch(), dump)):
        with pytest.raises(ValueError, match="weights must be left out with a recording of named arrays"):
            stablenum.diff(*sides, weights=weights)


@pytest.mark.slow
def test_a_nan_is_a_difference(tmp_path: Path) -> None:
    arrays = forward()
    arrays["logits"][3, 2] = np.nan
    report = stablenum.diff(dumped(tmp_path, arrays), in_torch())
    assert not report.ok


@pytest.mark.slow
def test_an_unquantised_layer_stands_out(tmp_path: Path) -> None:
    """The engine rounds its weights to 8 bits, but for one layer; the trainer rounds all."""

    def rounded(w: Any) -> Any:
        scale = np.abs(w).max() / 127
        return np.round(w / scale) * scale

    x = np.random.default_rng(2).normal(size=(6, 8)).astype(np.float32)
    layers = [np.random.default_rng(k).normal(size=(8, 8)).astype(np.float32) / 3 for k in range(4)]

    def program() -> Any:
        weights = [torch.tensor(rounded(w).astype(np.float32)) for w in layers]

        def loss(h: torch.Tensor) -> torch.Tensor:
            for w in weights:
                h = torch.tanh(h @ w)
            return h

        return stablenum_torch.program(loss, torch.tensor(x))

    arrays, h = dict[str, Any](), x
    for k, w in enumerate(layers):
        h = np.tanh(h @ (w if k == 2 else rounded(w).astype(np.float32)))
        arrays[f"layer{k}"] = h
    report = stablenum.diff(dumped(tmp_path, arrays), program())
    assert report.first.result == "layer2"


@pytest.mark.slow
def test_an_array_that_two_others_read_has_its_part_once(tmp_path: Path) -> None:
    """A fault in a state that both a weight and a sum read is not also counted at the weight."""
    w = np.random.default_rng(4).normal(size=(8, 6)).astype(np.float32)

    def forward(factor: float) -> dict[str, Any]:
        states = np.tanh(X @ w) * np.float32(factor)
        score = states.sum(-1)
        weight = np.exp(score - score.max()) / np.exp(score - score.max()).sum()
        return {"states": states, "weight": weight, "pooled": weight @ states}

    def loss(x: torch.Tensor) -> torch.Tensor:
        states = torch.tanh(x @ torch.tensor(w))
        return torch.softmax(states.sum(-1), -1) @ states

    report = stablenum.diff(dumped(tmp_path, forward(1.001)), stablenum_torch.program(loss, torch.tensor(X)))
    rows = (n.split("; adds ") for n in report.notes if "; adds " in n)
    parts = {first.partition(":")[0]: float(rest.split(" ")[0]) for first, rest in rows}
    assert parts["states"] > 100 * max(abs(parts["weight"]), abs(parts["pooled"]))
