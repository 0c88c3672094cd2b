"""A recorded program takes the place of a live one on either side of a comparison."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import stablenum
import stablenum_torch
from stablenum.diagnosis.diff.lockfile import saving
from stablenum.diagnosis.diff.lockfile.saving import recording_of, write_program
from tests.lockfile.data import WEIGHTS
from tests.lockfile.programs import PROGRAMS, in_jax, in_torch


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A recording of the program of each framework."""
    folder = tmp_path_factory.mktemp("golden")
    for name, program in PROGRAMS.items():
        stablenum.save_program(program(), folder / f"{name}.snum")
    return {name: folder / f"{name}.snum" for name in PROGRAMS}


_PARTS = (
    "operation", "primitive", "phase", "inputs", "outputs", "module", "scalars", "forward", "where",
    "library", "roles",
)  # fmt: skip


# --- the file ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", PROGRAMS)
def test_what_is_read_is_what_was_recorded(framework: str, tmp_path: Path) -> None:
    made = recording_of(PROGRAMS[framework](), 2)
    write_program(made, tmp_path / "golden.snum")
    read = stablenum.load_program(tmp_path / "golden.snum")
    for field in dataclasses.fields(made):
        one, other = getattr(made, field.name), getattr(read, field.name)
        if field.name in ("path", "made", "dialect"):
            continue
        if field.name == "trace":
            assert [(v.producer, v.role, v.name) for v in one.values] == [
                (v.producer, v.role, v.name) for v in other.values
            ]
            for step, its in zip(one.steps, other.steps, strict=True):
                for part in _PARTS:
                    assert getattr(step, part) == getattr(its, part), part
                assert (step.place and step.place.code) == (its.place and its.place.code)
        elif field.name == "arrays":
            assert one.keys() <= other.keys()
            for value in one:
                np.testing.assert_array_equal(one[value], other[value])
        elif field.name == "kept":
            for name in one:
                assert one[name].print == other[name].print
                np.testing.assert_array_equal(one[name].array, other[name].array)
        elif field.name == "optimizer_at":
            assert (one is None) == (other is None)
            assert one is None or one.place.code == other.place.code
        elif field.name == "literals":  # an infinity tells nothing of what a constant was
            assert sorted(filter(np.isfinite, one)) == sorted(other)
        elif field.name in ("aside", "numbers"):
            assert sorted(one) == sorted(other)
        else:
            assert one == other, field.name
    assert read.made["stablenum"] == stablenum.__version__


@pytest.mark.parametrize("framework", PROGRAMS)
def test_equal_recordings_are_equal_files(framework: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        stablenum.save_program(PROGRAMS[framework](), tmp_path / f"{name}.snum")
    assert (tmp_path / "a.snum").read_bytes() == (tmp_path / "b.snum").read_bytes()


@pytest.mark.slow
def test_a_file_of_200_operations_is_smaller_than_a_megabyte(golden: dict[str, Path]) -> None:
    for path in golden.values():
        operations = len(stablenum.load_program(path).trace.steps)
        assert path.stat().st_size <= 2**20 * max(1, operations / 200)


def test_recording_changes_nothing_of_the_program() -> None:
    program = in_torch()
    model = program._model
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    torch.manual_seed(3)
    state = torch.get_rng_state()
    recording_of(program)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())
    assert not program._optimizer.state


# --- either side -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("right", PROGRAMS)
@pytest.mark.parametrize("left", PROGRAMS)
def test_a_recording_agrees_with_a_live_program_of_either_framework(
    golden: dict[str, Path], left: str, right: str
) -> None:
    recorded = stablenum.load_program(golden[left])
    report = stablenum.diff(recorded, PROGRAMS[right]())
    assert report.ok, str(report)
    assert report.carried_over
    other_way = stablenum.diff(PROGRAMS[right](), recorded)
    assert other_way.ok, str(other_way)
    assert any("given on the right" in note for note in other_way.notes)


def test_two_recordings_are_compared_with_each_other(golden: dict[str, Path], tmp_path: Path) -> None:
    left = stablenum.load_program(golden["torch"])
    assert stablenum.diff(left, stablenum.load_program(golden["torch"])).ok
    stablenum.save_program(in_torch(temperature=1.001), tmp_path / "other.snum")
    report = stablenum.diff(left, stablenum.load_program(tmp_path / "other.snum"))
    assert report.first.right.code.startswith("return (h.to(head.dtype)")
    assert not any(c.confirmed for d in report.differences for c in d.causes)  # nothing can be run


FAULTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "epsilon": ({"epsilon": 1e-6}, "rsqrt", "epsilon_value"),
    "a term that is lacking": ({"centred": False}, "mean", "mean_subtraction_missing"),
    "temperature": ({"temperature": 1.001}, "temperature", ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("framework", PROGRAMS)
def test_a_fault_is_named_with_its_line(golden: dict[str, Path], framework: str, name: str) -> None:
    switches, part, _ = FAULTS[name]
    report = stablenum.diff(stablenum.load_program(golden[framework]), PROGRAMS[framework](**switches))
    assert not report.ok
    assert part in report.first.left.code + report.first.right.code, str(report)


@pytest.mark.parametrize("framework", PROGRAMS)
def test_a_cause_is_confirmed_by_a_change_of_the_live_side(golden: dict[str, Path], framework: str) -> None:
    recorded = stablenum.load_program(golden[framework])
    report = stablenum.diff(recorded, PROGRAMS[framework](epsilon=1e-6))
    assert [(c.code, c.confirmed) for c in report.causes] == [("epsilon_value", True)]
    assert "on the right" in report.causes[0].evidence


@pytest.mark.slow
@pytest.mark.parametrize("framework", PROGRAMS)
def test_another_learning_rate_is_seen_in_the_update(golden: dict[str, Path], framework: str) -> None:
    report = stablenum.diff(stablenum.load_program(golden[framework]), PROGRAMS[framework](rate=1.1e-2))
    assert report.first.right.phase == "update"
    assert report.causes[0].sentence == "the rate is 0.01 on the left and 0.011 on the right."


@pytest.mark.slow
def test_results_whose_arrays_are_not_in_the_file_are_compared_by_their_sums(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(saving, "_VALUES", 64)
    stablenum.save_program(in_torch(), tmp_path / "lean.snum")
    lean = stablenum.load_program(tmp_path / "lean.snum")
    assert len(lean.arrays) < 40
    assert stablenum.diff(lean, in_torch()).ok
    for switches in ({"epsilon": 1e-6}, {"temperature": 1.001}, {"rate": 1.1e-2}, {"centred": False}):
        assert not stablenum.diff(lean, in_torch(**switches)).ok


# --- rounding ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("framework", "form"),
    [("torch", torch.bfloat16), ("torch", torch.float16), ("jax", jnp.bfloat16), ("jax", jnp.float16)],
)
def test_a_narrower_format_is_a_difference_of_rounding(
    golden: dict[str, Path], framework: str, form: Any
) -> None:
    report = stablenum.diff(stablenum.load_program(golden[framework]), PROGRAMS[framework](form=form))
    assert report.first.of_rounding
    assert report.causes[0].code == "lower_precision"
    assert not report.causes[0].confirmed
    assert "head" in report.first.right.code
    assert "in float64 they agree" in str(report)


@pytest.mark.slow
def test_a_recording_in_a_narrow_format_allows_what_that_rounds(tmp_path: Path) -> None:
    stablenum.save_program(in_torch(form=torch.bfloat16), tmp_path / "narrow.snum")
    narrow = stablenum.load_program(tmp_path / "narrow.snum")
    assert stablenum.diff(narrow, in_torch(form=torch.bfloat16)).ok
    assert stablenum.diff(narrow, in_torch()).ok  # which rounds less


@pytest.mark.slow
def test_an_overflow_of_the_live_program_is_a_difference(tmp_path: Path) -> None:
    x = torch.linspace(1, 9, 8)
    wide = stablenum_torch.program(lambda x: (x * 1e4).exp2().log2().sum(), x / 1e3)
    narrow = stablenum_torch.program(lambda x: (x * 1e4).exp2().half().float().log2().sum(), x / 1e3)
    stablenum.save_program(wide, tmp_path / "wide.snum")
    report = stablenum.diff(stablenum.load_program(tmp_path / "wide.snum"), narrow)
    assert report.first.of_rounding
    assert "overflows in float16" in report.causes[0].sentence


HARMLESS: dict[str, Callable[[], Any]] = {
    "the batch in another order": lambda: in_torch(order=np.random.default_rng(0).permutation(12)),
    "two threads": in_torch,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_changes_give_no_alarm(golden: dict[str, Path], name: str) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2 if "threads" in name else before)
    try:
        report = stablenum.diff(stablenum.load_program(golden["torch"]), HARMLESS[name]())
    finally:
        torch.set_num_threads(before)
    assert report.ok, str(report)


def test_the_report_says_what_rounding_explains(golden: dict[str, Path]) -> None:
    report = stablenum.diff(stablenum.load_program(golden["torch"]), in_torch())
    note = next(n for n in report.notes if "off the recording's float64 twin" in n)
    assert "rounding explains" in note
    assert any("is the recording" in n and "torch" in n for n in report.notes)


# --- steps -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", PROGRAMS)
def test_as_many_steps_are_compared_as_were_recorded(framework: str, tmp_path: Path) -> None:
    path = tmp_path / "three.snum"
    stablenum.save_program(PROGRAMS[framework](), path, steps=3)
    three = stablenum.load_program(path)
    assert stablenum.diff(three, PROGRAMS[framework]()).ok
    with pytest.raises(
        ValueError, match=r"steps must be 3, as many as were recorded in .*three\.snum; got 1"
    ):
        stablenum.diff(three, PROGRAMS[framework](), steps=1)


@pytest.mark.slow
def test_the_first_step_that_leaves_the_bound_is_named(tmp_path: Path) -> None:
    def program(late: bool) -> Any:
        parameter = torch.nn.Parameter(torch.linspace(0.5, 1.5, 6))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        calls = [0]

        def loss() -> torch.Tensor:
            calls[0] += 1
            return (parameter**2).sum() * (1.01 if late and calls[0] == 3 else 1.0)

        return stablenum_torch.program(loss, optimizer=optimizer)

    stablenum.save_program(program(late=False), tmp_path / "steps.snum", steps=4)
    report = stablenum.diff(stablenum.load_program(tmp_path / "steps.snum"), program(late=True))
    assert report.first.step == 3


def beside(path: Path) -> Path:
    """The weights of a recording."""
    (found,) = path.parent.glob(f"{path.name}.*.weights")
    return found


# --- weights -----------------------------------------------------------------------------------------------


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A recording whose weights lie beside it."""
    monkeypatch.setattr(saving, "_WEIGHTS", 16)
    path = tmp_path / "large.snum"
    stablenum.save_program(in_torch(), path)
    assert beside(path).exists()
    return path


@pytest.mark.slow
def test_weights_beside_the_file_are_read(apart: Path) -> None:
    recorded = stablenum.load_program(apart)
    assert recorded.has_weights
    np.testing.assert_array_equal(recorded.parameters()["head"], WEIGHTS["head"])
    assert stablenum.diff(recorded, in_jax()).ok


def test_without_the_weights_the_program_keeps_its_own(apart: Path) -> None:
    beside(apart).unlink()
    recorded = stablenum.load_program(apart)
    assert not recorded.has_weights
    report = stablenum.diff(recorded, in_torch())
    assert report.ok
    assert not report.carried_over
    assert any("have the fingerprints of the recorded ones" in note for note in report.notes)


@pytest.mark.slow
def test_other_weights_than_the_recorded_ones_are_named(apart: Path) -> None:
    beside(apart).unlink()
    other = in_torch()
    with torch.no_grad():
        other._model.head[0, 0] += 0.5
    report = stablenum.diff(stablenum.load_program(apart), other)
    assert not report.ok
    assert any("other numbers than the recorded ones, first in head" in note for note in report.notes)


def test_weights_of_another_recording_are_refused(apart: Path) -> None:
    weights = beside(apart)
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(bytes(data))
    with pytest.raises(ValueError, match="is not the file that was written with it"):
        stablenum.load_program(apart)


@pytest.mark.slow
def test_a_smaller_recording_takes_old_weights_away(apart: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    stablenum.save_program(in_torch(), apart)
    assert not list(apart.parent.glob("*.weights"))


# --- arguments ---------------------------------------------------------------------------------------------


def test_what_is_no_program_is_refused(golden: dict[str, Path], tmp_path: Path) -> None:
    recorded = stablenum.load_program(golden["torch"])
    with pytest.raises(TypeError, match=r"program must be made by stablenum_torch\.program"):
        stablenum.save_program(recorded, tmp_path / "a.snum")
    with pytest.raises(TypeError, match="path must be a path"):
        stablenum.save_program(in_torch(), 3)
    with pytest.raises(ValueError, match=r"path must end in .snum; got '.*a.txt'"):
        stablenum.save_program(in_torch(), tmp_path / "a.txt")
    with pytest.raises(ValueError, match="steps must be at least 1"):
        stablenum.save_program(in_torch(), tmp_path / "a.snum", steps=0)
    with pytest.raises(ValueError, match="give the recording as left"):
        stablenum.diff(in_torch(), recorded, weights={"up": "up"})
    assert not list(tmp_path.iterdir())


def test_a_program_that_fails_leaves_the_old_file(golden: dict[str, Path]) -> None:
    before = golden["torch"].read_bytes()
    broken = stablenum_torch.program(lambda x: x @ x, torch.ones(2, 3))
    with pytest.raises(stablenum.ProgramError, match="the recorded program failed"):
        stablenum.save_program(broken, golden["torch"])
    assert golden["torch"].read_bytes() == before


@pytest.mark.slow
def test_assert_same_raises_with_the_first_screen(golden: dict[str, Path]) -> None:
    recorded = stablenum.load_program(golden["torch"])
    assert stablenum.assert_same(recorded, in_torch()).ok
    with pytest.raises(
        AssertionError, match=r"(?s)The two programs differ.*First difference.*epsilon_value"
    ) as info:
        stablenum.assert_same(recorded, in_torch(epsilon=1e-6))
    assert info.value.report.causes[0].code == "epsilon_value"


# --- what strangers found ----------------------------------------------------------------------------------

# Constants that noise would make into other indices or sizes.
INDICES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "an index": lambda t: t[(torch.arange(17) * 0.5).ceil().long()].tanh(),
    "a size": lambda t: (t[:, (torch.arange(9) / 8) <= 0.5] @ torch.ones(5, 4)).tanh(),
}


@pytest.mark.parametrize("name", INDICES)
def test_constants_that_become_indices_or_sizes_stand_still(name: str, tmp_path: Path) -> None:
    table = torch.randn(9, 9, generator=torch.Generator().manual_seed(1))
    stablenum.save_program(stablenum_torch.program(INDICES[name], table), tmp_path / "golden.snum")
    golden = stablenum.load_program(tmp_path / "golden.snum")
    assert stablenum.diff(golden, stablenum_torch.program(INDICES[name], table)).ok
    assert not stablenum.diff(golden, stablenum_torch.program(lambda t: INDICES[name](t) * 1.01, table)).ok


# Formulas that are equal in exact arithmetic, the second of which loses digits.
WORSE: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = {
    "log1p": (lambda h: torch.log1p(h.exp() * 1e-4), lambda h: torch.log(1 + h.exp() * 1e-4)),
    "variance": (
        lambda h: (h + 1000).var(-1, correction=0),
        lambda h: (h + 1000).pow(2).mean(-1) - (h + 1000).mean(-1).pow(2),
    ),
    "cancellation": (lambda h: h * 1.5, lambda h: (h * 1.5 + 4096) - 4096),
}


@pytest.mark.parametrize("name", WORSE)
def test_a_formula_that_loses_digits_is_a_difference_of_rounding(name: str, tmp_path: Path) -> None:
    h = torch.randn(16, 32, generator=torch.Generator().manual_seed(2))
    good, bad = WORSE[name]
    stablenum.save_program(stablenum_torch.program(good, h), tmp_path / "golden.snum")
    report = stablenum.diff(stablenum.load_program(tmp_path / "golden.snum"), stablenum_torch.program(bad, h))
    assert not report.ok
    assert report.first.of_rounding


def test_a_program_whose_result_is_nan_is_not_recorded(tmp_path: Path) -> None:
    program = stablenum_torch.program(lambda x: torch.log(x).sum(), torch.tensor([-1.0, 1.0]))
    with pytest.raises(stablenum.ProgramError, match="is NaN, so that nothing could be compared"):
        stablenum.save_program(program, tmp_path / "nan.snum")
    assert not list(tmp_path.iterdir())


def test_a_program_without_the_recorded_optimizer_is_refused(golden: dict[str, Path]) -> None:
    recorded, program = stablenum.load_program(golden["torch"]), in_torch()
    program._optimizer = None
    with pytest.raises(ValueError, match="has the updates of an optimizer, and the program has no optimizer"):
        stablenum.diff(recorded, program)


def test_a_disk_that_is_full_leaves_the_old_recording_with_its_weights(
    apart: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = saving.write_archive

    def full(path: Path, *args: Any, **kwargs: Any) -> None:
        if path == apart:
            raise OSError(28, "No space left on device")
        write(path, *args, **kwargs)

    monkeypatch.setattr(saving, "write_archive", full)
    with pytest.raises(OSError, match="No space left"):
        stablenum.save_program(in_torch(epsilon=0.1), apart)
    assert stablenum.diff(stablenum.load_program(apart), in_torch()).ok


def test_complex_values_are_recorded_without_a_warning(tmp_path: Path) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))
    program = stablenum_torch.program(lambda x: torch.fft.rfft(x).abs().log1p(), x)
    stablenum.save_program(program, tmp_path / "golden.snum")
    assert stablenum.diff(stablenum.load_program(tmp_path / "golden.snum"), program).ok


def test_other_packages_that_are_imported_do_not_change_the_file(golden: dict[str, Path]) -> None:
    assert set(stablenum.load_program(golden["torch"]).made) == {
        "stablenum", "python", "platform", "torch", "numpy",
    }  # fmt: skip
