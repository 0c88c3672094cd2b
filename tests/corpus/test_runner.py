"""The runner judges what it should, and a tool that raises, ends or hangs does not stop it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from corpus import Task
from corpus.__main__ import main
from corpus.judging import COLUMNS, judge, score
from corpus.labels import read
from corpus.runner import chosen, run
from corpus.tools.command import Command, named_line
from corpus.worker import load

LABELS = read()
TOOLS = "tests.corpus.made_up_tools"
FEW = ["log_of_zero", "sqrt_at_zero", "causal_mask"]


def few(tool: str, **options: Any) -> dict[str, Any]:
    return run(f"{TOOLS}:{tool}", chosen("torch", ["failing", "healthy"], FEW), **options)["programs"]


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_tool_that_knows_every_answer_is_right_everywhere(framework: str) -> None:
    names = chosen(framework, ["failing", "healthy", "unseen", "silent"])
    tool = load(f"{TOOLS}:knowing")
    total = score(LABELS, {name: vars(tool(Task(name))) for name in names}, names)
    assert total.right == total.of
    assert total.alarms == total.errors == []
    assert total.of["detected"] + total.healthy == len(names)
    assert total.of["line"] > total.of["cause"] > total.of["operation"] > 100


@pytest.mark.parametrize("tool", ["silent", "mistaken"])
def test_a_tool_that_knows_nothing_is_right_nowhere(tool: str) -> None:
    names = chosen("jax", ["failing", "healthy", "unseen", "silent"])
    answer = load(f"{TOOLS}:{tool}")
    total = score(LABELS, {name: vars(answer(Task(name))) for name in names}, names)
    assert [total.right[column] for column in COLUMNS[1:]] == [0, 0, 0]
    assert total.right["detected"] == (0 if tool == "silent" else total.of["detected"])
    assert len(total.alarms) == (0 if tool == "silent" else total.healthy)


def test_what_a_tool_answers_in_its_process_is_recorded() -> None:
    records = few("knowing")
    assert len(records) == 3
    for name, record in records.items():
        assert all(judge(LABELS[name], record).values()) or LABELS[name]["kind"] == "healthy"
        assert "/" not in record.get("file", "")
    assert not records["torch/healthy/causal_mask"]["detected"]


def test_a_tool_that_raises_is_counted_and_the_run_goes_on() -> None:
    records = few("raising")
    assert records["torch/failing/log_of_zero"]["detected"]
    failed = records["torch/failing/sqrt_at_zero"]
    assert failed["error"] == "ValueError: cannot read sqrt_at_zero.py"
    total = score(LABELS, records, records)
    assert len(total.errors) == 2
    assert total.right["detected"] == 1
    assert total.alarms == []


@pytest.mark.parametrize(
    ("tool", "error"), [("leaving", "SystemExit: 3"), ("crashing", "the process ended with 7")]
)
def test_a_tool_that_ends_its_process_is_counted_and_the_run_goes_on(tool: str, error: str) -> None:
    records = few(tool)
    assert {record["error"] for record in records.values()} == {error}
    assert len(records) == 3


def test_a_tool_that_hangs_is_given_up_and_the_run_goes_on() -> None:
    records = few("hanging", timeout=4.0)
    assert records["torch/failing/sqrt_at_zero"]["error"] == "no answer in 4 s"
    assert records["torch/failing/log_of_zero"]["detected"]
    assert records["torch/healthy/causal_mask"]["detected"]


def test_a_program_whose_packages_are_missing_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corpus.runner.importlib.util.find_spec", lambda name: None)
    result = run(f"{TOOLS}:silent", ["jax/failing/adam_nan_moment"])
    assert result["programs"] == {}
    assert result["not_run"] == {"jax/failing/adam_nan_moment": ["jax", "optax"]}


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ("tests.corpus.made_up_tools", "MODULE:FUNCTION"),
        ("tests.corpus.no_such_tools:silent", "No module named"),
        ("command:mytool", "{script}"),
    ],
)
def test_a_tool_that_cannot_be_loaded_is_reported_at_once(tool: str, words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        run(tool, ["torch/failing/log_of_zero"])


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("train.py:20: the derivative of sqrt", 20),
        ("see /a/b/train.py:3 and train.py:4", 3),
        ("mytrain.py:9 is another file, train.py:8 is not", 8),
        ('File "/a/train.py", line 5, in f\n  File "/a/train.py", line 7, in g\n', 7),
        ('File "/a/mytrain.py", line 5, in f', 0),
        ("all is well", 0),
    ],
)
def test_the_line_that_a_command_names(said: str, line: int) -> None:
    assert named_line(said, "train.py") == line


def test_a_command_is_judged_by_its_exit_status_and_output() -> None:
    task = Task("torch/unseen/a01")
    naming = "import pathlib, sys; print(pathlib.Path(sys.argv[1]).name + ':38: NaN'); sys.exit(1)"
    found = Command(f'python -c "{naming}" {{script}}')(task)
    assert judge(LABELS[task.name], vars(found)) == {"detected": True, "line": True}
    assert not Command("python -c pass {script}")(task).detected


def test_a_command_gets_a_script_that_runs_the_step() -> None:
    task = Task("torch/failing/sqrt_at_zero")
    code = "import runpy, sys; runpy.run_path(sys.argv[1]); sys.exit(8 * ('corpus.plain' in sys.modules))"
    found = Command(f'python -c "{code}" {{script}}')(task)
    assert found.detected, found.said
    assert "Error" not in found.said


def test_the_command_line_writes_a_file_and_prints_its_score(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "r.json"
    line = ["run", "--tool", f"{TOOLS}:knowing", "--framework", "torch", "--name", "oracle", "--only", *FEW]
    assert main([*line, "--out", str(file)]) == 0
    said = capsys.readouterr().out
    assert "1 of 3 torch/failing/log_of_zero: " in said
    assert "failing: detected 2 of 2, line 2 of 2, operation 2 of 2, cause 2 of 2" in said
    result = json.loads(file.read_text(encoding="utf-8"))
    assert result["tool"] == "oracle"
    assert result["entry"] == f"{TOOLS}:knowing"
    assert {"torch", "numpy"} == set(result["versions"])
    with pytest.raises(SystemExit, match="none of these is a program"):
        main([*line[:7], "--only", "nothing", "--out", str(file)])
