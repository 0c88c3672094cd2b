"""The scripts that reproduce a first difference run, and print what the comparison measured."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn

import stablenum
import stablenum_jax
import stablenum_torch
from stablenum.commands.diff.pair import load_pair
from stablenum.diagnosis.diff.report import reproduction
from tests.parity.test_diff import PAIR, jax_program, run, torch_program

X = np.random.default_rng(3).normal(size=(4, 6)).astype(np.float32)


def ran(folder: Path, script: str) -> str:
    result = subprocess.run(
        [sys.executable, str(folder / script)], capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_scripts_are_found_where_python_does_not_look_beside_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    stablenum.diff(torch_program(), jax_program(approximate=True)).write_repro(tmp_path)
    assert "largest finite difference" in ran(tmp_path, "compare.py")


def numbers(printed: str) -> np.ndarray:
    return np.asarray([float(x) for x in re.findall(r"-?\d[\d.]*(?:e[-+]?\d+)?|nan|-?inf", printed)])


class Reproduced(NamedTuple):
    """The numbers that were written, the scripts, what ``compare.py`` prints, and the difference in that."""

    given: Mapping[str, np.ndarray]
    texts: Mapping[str, str]
    printed: str
    difference: float


def reproduced(report: Any, folder: Path) -> Reproduced:
    """Write the scripts of a report, and run ``compare.py``, which runs the others."""
    report.write_repro(folder)
    with np.load(folder / "inputs.npz") as file:
        given = dict(file)
    texts = {p.name: p.read_text(encoding="utf-8") for p in folder.glob("*.py")}
    assert not any("import stablenum" in text for text in texts.values())
    printed = ran(folder, "compare.py")
    matched = re.fullmatch(
        r"left\n(.*)\nright\n(.*)\n\d+ of \d+ entries .*\nlargest finite difference (\S+) [^\n]*\n"
        r"(?:  at [^\n]*\n)*",
        printed,
        re.S,
    )
    assert matched is not None, printed
    for side, said in zip(("left", "right"), matched.groups(), strict=False):
        turned = given["left"].transpose(0, 2, 3, 1) if "a.transpose" in texts["compare.py"] else given[side]
        wanted = turned if side == "left" else given[side]
        shape, _, entries = said.partition("\n")
        assert shape == str(wanted.shape)
        assert ("..." in entries) is (wanted.size > 20)
        if wanted.size <= 20:  # NumPy prints eight digits
            np.testing.assert_allclose(numbers(entries), wanted.reshape(-1), rtol=1e-7, atol=5e-9)
    return Reproduced(given, texts, printed, float(matched[3]))


SAME_SHAPE: dict[str, tuple[Callable[[], Any], Callable[[], Any], tuple[str, str]]] = {
    "gelu": (torch_program, lambda: jax_program(approximate=True), ("torch.erf(", "jax.lax.tanh(")),
    "epsilon": (torch_program, lambda: jax_program(epsilon=1e-3), (", 1e-05)", ", 0.001)")),
    "jax first": (jax_program, lambda: torch_program(eps=1e-3), (", 1e-05)", ", 0.001)")),
    "two of torch": (
        torch_program,
        lambda: torch_program(approximate="tanh"),
        ("torch.erf(", "torch.tanh("),
    ),
    "two of jax": (jax_program, lambda: jax_program(epsilon=1e-6), (", 1e-05)", ", 1e-06)")),
    "rate": (torch_program, lambda: jax_program(rate=2e-2), ("addcdiv_", "-0.02")),
}


@pytest.mark.parametrize(("left", "right", "parts"), SAME_SHAPE.values(), ids=SAME_SHAPE)
def test_the_scripts_print_what_was_measured(
    left: Callable[[], Any], right: Callable[[], Any], parts: tuple[str, str], tmp_path: Path
) -> None:
    made = reproduced(stablenum.diff(left(), right()), tmp_path)
    for script, part in zip(("left.py", "right.py"), parts, strict=True):
        assert part in made.texts[script]
        assert len(made.texts[script].splitlines()) < 36
    assert made.difference == pytest.approx(gap(made), rel=1e-9)
    assert made.difference > 0


def gap(made: Reproduced) -> float:
    """The largest difference of the two values that were measured."""
    return float(np.abs(made.given["left"] - made.given["right"]).max())


def test_each_script_runs_alone_and_both_begin_with_the_same_numbers(tmp_path: Path) -> None:
    report = stablenum.diff(torch_program(), jax_program(approximate=True))
    report.write_repro(tmp_path)
    with np.load(tmp_path / "inputs.npz") as file:
        given = dict(file)
    (read,) = set(given) - {"left", "right"}
    assert given[read].dtype == np.float64
    for side in ("left", "right"):
        assert f'given["{read}"]' in (tmp_path / f"{side}.py").read_text(encoding="utf-8")
        printed = numbers(ran(tmp_path, f"{side}.py"))
        np.testing.assert_allclose(printed, given[side].reshape(-1), rtol=1e-7, atol=5e-9)


def missing(name: str, *, relu: bool) -> Any:
    """Two layers, with relu between them or without it."""
    w = np.random.default_rng(4).normal(size=(6, 5)).astype(np.float32)
    if name == "torch":
        p = torch.tensor(w, requires_grad=True)

        def loss(x: torch.Tensor) -> torch.Tensor:
            h = x @ p
            return (h.relu() if relu else h).pow(3).mean()

        return stablenum_torch.program(loss, torch.tensor(X))

    def loss_fn(p: Any, x: Any) -> Any:
        h = x @ p["p"]
        return ((jax.nn.relu(h) if relu else h) ** 3).mean()

    return stablenum_jax.program(loss_fn, {"p": jnp.asarray(w)}, jnp.asarray(X))


@pytest.mark.parametrize("has", ["torch", "jax"])
def test_a_side_without_the_operation_has_no_script(has: str, tmp_path: Path) -> None:
    sides = {name: missing(name, relu=name == has) for name in ("torch", "jax")}
    made = reproduced(stablenum.diff(sides["torch"], sides["jax"]), tmp_path)
    other = {"torch": "right", "jax": "left"}[has]
    assert f"{other}.py" not in made.texts
    assert f'["{other}"]  # the {other} program has no operation here' in made.texts["compare.py"]
    assert made.difference == pytest.approx(gap(made), rel=1e-9)


def test_another_layout_is_turned_before_it_is_compared(tmp_path: Path) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 3, 3)
    x = np.random.default_rng(1).normal(size=(2, 2, 7, 5)).astype(np.float32)

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(conv(x)).square().mean()

    def port(p: Any, x: Any) -> Any:
        h = jax.lax.conv_general_dilated(
            x, p["w"], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jnp.square(jax.nn.gelu(h + p["b"], approximate=True)).mean()

    p = {"w": jnp.zeros((3, 3, 2, 3)), "b": jnp.zeros(3)}
    report = stablenum.diff(
        stablenum_torch.program(loss_of, torch.tensor(x), model=conv),
        stablenum_jax.program(port, p, jnp.asarray(x.transpose(0, 2, 3, 1))),
    )
    made = reproduced(report, tmp_path)
    assert "a.transpose([0, 2, 3, 1])" in made.texts["compare.py"]
    turned = made.given["left"].transpose(0, 2, 3, 1)
    assert made.difference == pytest.approx(np.abs(turned - made.given["right"]).max(), rel=1e-9)


def test_what_cannot_be_written_is_read_and_the_script_says_so(tmp_path: Path) -> None:
    # The keys of dropout have no form in float64, so that what is drawn is read.
    def port(p: Any, x: Any, key: Any) -> Any:
        kept = jax.random.bernoulli(key, 0.5, x.shape)
        return jnp.square(jnp.where(kept, x * p["w"], 0.0)).mean()

    p = {"w": jnp.ones(6)}
    sides = [stablenum_jax.program(port, p, jnp.asarray(X), jax.random.key(seed)) for seed in (0, 1)]
    made = reproduced(stablenum.diff(*sides), tmp_path)
    assert "cannot be written as code: what it gave is read as" in made.texts["left.py"]
    assert made.difference == pytest.approx(gap(made), rel=1e-9)


def test_arrays_that_are_too_large_are_left_out_and_the_script_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reproduction, "_MOST_BYTES", 100)
    report = stablenum.diff(torch_program(), jax_program(approximate=True))
    assert sum(a.nbytes for a in report._repro.arrays.values()) <= 100
    report.write_repro(tmp_path)
    result = subprocess.run(
        [sys.executable, str(tmp_path / "left.py")], capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 1
    assert "inputs.npz lacks" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_numbers_that_are_not_finite_are_written_too(bad: float, tmp_path: Path) -> None:
    def program(number: float) -> Any:
        p = torch.ones(6, requires_grad=True)
        return stablenum_torch.program(lambda x: ((x + number).exp() * p).mean(), torch.tensor(X))

    made = reproduced(stablenum.diff(program(0.1), program(bad)), tmp_path)
    assert f"float('{bad}')" in made.texts["right.py"]
    assert np.isfinite(made.given["left"]).all()
    assert not np.isfinite(made.given["right"]).any()


def test_a_masked_value_does_not_hide_how_far_the_others_are_apart(tmp_path: Path) -> None:
    w = np.random.default_rng(5).normal(size=(6, 6)).astype(np.float32)

    def program(*, masked: bool) -> Any:
        p = torch.tensor(w, requires_grad=True)

        def loss(x: torch.Tensor) -> torch.Tensor:
            scores = x @ p
            if masked:
                scores = scores.masked_fill(torch.eye(4, 6) == 1, float("-inf"))
            return scores.softmax(-1).square().mean()

        return stablenum_torch.program(loss, torch.tensor(X))

    made = reproduced(stablenum.diff(program(masked=True), program(masked=False)), tmp_path)
    assert (
        "4 of 24 entries differ by more than 1e-9 of the largest, 4 of them with inf or NaN" in made.printed
    )
    assert made.difference < 1e-9
    assert "  at [0, 0] left -inf right -0.175" in made.printed
    assert made.printed.count("  at [") == 4


def test_a_report_that_was_pickled_still_writes_its_scripts(tmp_path: Path) -> None:
    report = stablenum.diff(torch_program(), jax_program(approximate=True))
    again = pickle.loads(pickle.dumps(report))
    assert again == report
    again.write_repro(tmp_path)
    assert "torch.erf" in (tmp_path / "left.py").read_text(encoding="utf-8")
    assert "repro" not in report.to_json()


def test_programs_that_agree_have_nothing_to_reproduce(tmp_path: Path) -> None:
    report = stablenum.diff(torch_program(), jax_program())
    with pytest.raises(ValueError, match=r"this report says: the same in exact arithmetic.*report\.ok"):
        report.write_repro(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_only_files_of_the_same_name_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "left.py").write_text("old", encoding="utf-8")
    (tmp_path / "mine.txt").write_text("mine", encoding="utf-8")
    report = stablenum.diff(torch_program(), jax_program(approximate=True))
    report.write_repro(tmp_path)
    assert "torch.erf" in (tmp_path / "left.py").read_text(encoding="utf-8")
    assert (tmp_path / "mine.txt").read_text(encoding="utf-8") == "mine"


def test_a_target_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    report = stablenum.diff(torch_program(), jax_program(approximate=True))
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match=r"folder must be a folder or a new name; .*file' is a file"):
        report.write_repro(tmp_path / "file")
    with pytest.raises(TypeError, match="folder must be the path of a folder; got int"):
        report.write_repro(3)
    with pytest.raises(OSError, match=r"folder .* cannot be written to"):
        report.write_repro(tmp_path / "file" / "below")


def test_the_command_writes_the_scripts(tmp_path: Path) -> None:
    result = run(tmp_path, PAIR.replace("{right}", "hardswish"), "--repro", "repro")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "torch" in (tmp_path / "repro" / "right.py").read_text(encoding="utf-8")
    assert "pair.py:11" in (tmp_path / "repro" / "left.py").read_text(encoding="utf-8")


def test_the_command_says_if_there_is_nothing_to_reproduce(tmp_path: Path) -> None:
    result = run(tmp_path, PAIR.replace("{right}", "silu"), "--repro", "repro")
    assert result.returncode == 0
    assert "there is no difference to reproduce" in result.stderr
    assert not (tmp_path / "repro").exists()


def test_the_command_refuses_a_file_before_it_compares(tmp_path: Path) -> None:
    result = run(tmp_path, "raise SystemExit(7)", "--repro", "pair.py")
    assert result.returncode == 2
    assert "is a file; name a folder" in " ".join(result.stderr.replace("│", " ").split())


def test_nothing_is_shown_where_standard_error_is_no_terminal(tmp_path: Path) -> None:
    assert run(tmp_path, PAIR.replace("{right}", "hardswish")).stderr == ""


def test_an_optimizer_of_many_tensors_is_written_too(tmp_path: Path) -> None:
    """``foreach`` writes into lists of tensors."""

    def program(rate: float) -> Any:
        torch.manual_seed(0)
        layer = nn.Linear(6, 2)
        adam = torch.optim.AdamW(layer.parameters(), lr=1e-3, weight_decay=rate, foreach=True)
        return stablenum_torch.program(
            lambda x: layer(x).square().mean(), torch.tensor(X), model=layer, optimizer=adam
        )

    made = reproduced(stablenum.diff(program(0.1), program(0.2)), tmp_path)
    assert "_foreach_" in made.texts["left.py"]
    assert made.difference > 0


def test_the_scripts_of_an_update_of_optax(tmp_path: Path) -> None:
    def program(decay: float) -> Any:
        return stablenum_jax.program(
            lambda p, x: jnp.square(x @ p["w"]).mean(),
            {"w": jnp.ones((6, 2))},
            jnp.asarray(X),
            optimizer=optax.adamw(1e-2, weight_decay=decay),
        )

    assert reproduced(stablenum.diff(program(0.1), program(0.2)), tmp_path).difference > 0


def test_the_scripts_on_the_page_are_those_that_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docs = Path(__file__).parents[2] / "docs"
    page = (docs / "diff.md").read_text(encoding="utf-8")
    reference = (docs / "diff-reference.md").read_text(encoding="utf-8")
    (example,) = (e for e in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) if "report = " in e)
    (tmp_path / "pair.py").write_text(example.partition("report = ")[0], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    pair = load_pair(Path("pair.py"))
    stablenum.diff(pair.left, pair.right).write_repro("repro")
    texts = re.findall(r"^```text\n(.*?)^```", reference, re.M | re.S)
    shown = [text for text in texts if "def run()" in text]
    assert len(shown) == 2
    for name, text in zip(("left.py", "right.py"), shown, strict=True):
        assert text in (tmp_path / "repro" / name).read_text(encoding="utf-8")
