"""What the entries of other tools read from their output."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from corpus import Found, Task
from corpus.judging import judge
from corpus.labels import read
from corpus.tools import baseline, jax_checks, ours, torch_anomaly
from corpus.tools.scripts import innermost, run_script

LABELS = read()
JAX = [jax_checks.debug_nans, jax_checks.debug_nans_and_infs, jax_checks.float_checks]

# (entry, program) -> whether the guilty line is named, and the operation.
WORDS = [
    (torch_anomaly.detect_anomaly, "torch/failing/where_trap_sqrt", True, "SqrtBackward0"),
    (torch_anomaly.detect_anomaly, "torch/failing/fully_masked_row", False, "MulBackward0"),
    (jax_checks.debug_nans, "jax/failing/acos_beyond_one", True, "acos"),
    (jax_checks.debug_nans_and_infs, "jax/failing/log_of_zero", True, "log"),
    (jax_checks.float_checks, "jax/failing/acos_beyond_one", True, "acos"),
    (jax_checks.float_checks, "jax/failing/division_by_own_sum", True, "div"),
    (ours.stablenum, "torch/failing/where_trap_sqrt", True, "sqrt"),
    (ours.stablenum, "jax/failing/where_trap_sqrt", True, "sqrt"),
]


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize(("entry", "name", "line", "operation"), WORDS)
def test_the_output_of_a_tool_is_read(entry, name: str, line: bool, operation: str) -> None:
    found = entry(Task(name))
    assert found.detected
    assert found.said
    assert judge(LABELS[name], vars(found))["line"] is line
    assert found.operation == operation


@pytest.mark.parametrize("entry", JAX)
def test_an_entry_without_output_found_nothing(entry) -> None:
    assert entry(Task("jax/healthy/double_where")) == Found(False)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_detection_does_not_see_an_infinite_loss() -> None:
    assert torch_anomaly.detect_anomaly(Task("torch/failing/log_of_zero")) == Found(False)


def test_our_own_entry_names_the_cause_and_blames_no_healthy_program() -> None:
    found = ours.stablenum(Task("torch/failing/where_trap_sqrt"))
    assert judge(LABELS["torch/failing/where_trap_sqrt"], vars(found)) == dict.fromkeys(
        ("detected", "line", "operation", "cause"), True
    )
    assert not ours.stablenum(Task("torch/healthy/causal_mask")).detected


@pytest.mark.parametrize("name", ["torch/failing/log_of_zero", "jax/failing/log_of_zero"])
def test_without_a_tool_an_infinite_loss_is_not_noticed(name: str) -> None:
    assert baseline.python(Task(name)) == Found(False)


def test_a_script_ends_where_its_exception_was_raised(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    for text, line in (
        ("import sys\nassert sys.argv[1:] == []\n\ndef f():\n    1 / 0\n\nf()\n", 5),
        ("import sys\nsys.exit('diverged')\n", 2),
        ("import sys\nif __name__ == '__main__':\n    sys.exit(0)\n1 / 0\n", 0),
        ("try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise ValueError from e\n", 2),
    ):
        file.write_text(text, encoding="utf-8")
        before = sys.argv
        error = run_script(file)
        assert innermost(error, file) == line
        assert (error is None) == (line == 0)
        assert sys.argv is before


@pytest.mark.slow(reason="runs whole scripts")
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_a_script_is_run_inside_a_tool() -> None:
    name = "torch/unseen/a02"
    for found in (torch_anomaly.detect_anomaly(Task(name)), ours.stablenum(Task(name))):
        assert judge(LABELS[name], vars(found)) == {"detected": True, "line": True}
