"""The labels of the corpus are complete, and right where the code can tell."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from corpus import CAUSES, Case, Task
from corpus.case import MARK
from corpus.labels import FILE, collect, read
from corpus.names import plain_name
from corpus.task import ROOT
from corpus.tools.ours import replay
from stablenum.diagnosis import Cause
from stablenum.diagnosis.checkup.symptoms import Symptom

LABELS = read()
FAILING = {name: label for name, label in LABELS.items() if label["kind"] == "failing"}
STEPS = [name for name in FAILING if Task(name).is_step]
SCRIPTS = [name for name in FAILING if not Task(name).is_step]


def test_the_file_is_what_the_programs_and_the_answers_say() -> None:
    kept = json.loads(FILE.read_text(encoding="utf-8"))
    assert kept == json.loads(json.dumps(collect())), "write it again: python -m corpus labels"


def test_every_program_has_a_label_and_every_label_a_program() -> None:
    files = {
        path.relative_to(ROOT).as_posix()
        for kind in ("failing", "healthy", "unseen", "silent")
        for path in (ROOT / kind).rglob("*.py")
        if path.name != "__init__.py"
    }
    assert files == {label["file"] for label in LABELS.values()}
    assert all(Task(name).path == ROOT / label["file"] for name, label in LABELS.items())


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_failing_step_has_its_marked_line_an_operation_and_a_cause(framework: str) -> None:
    for name in (name for name in STEPS if Task(name).framework == framework):
        label = FAILING[name]
        lines = Task(name).path.read_text(encoding="utf-8").splitlines()
        assert all(lines[number - 1].rstrip().endswith(MARK) for number in label["lines"]), name
        assert len(label["lines"]) == bool(label["operations"]), name
        assert set(label["causes"]) <= CAUSES.keys(), name
        assert label["causes"], name
        assert label["status"] == "tuned"
        assert framework in label["needs"], name


def test_a_failing_script_has_lines_with_code_and_says_what_is_wrong() -> None:
    for name in SCRIPTS:
        label = FAILING[name]
        lines = Task(name).path.read_text(encoding="utf-8").splitlines()
        assert label["lines"], name
        assert all(lines[number - 1].strip() for number in label["lines"]), name
        assert label["what"], name
        assert label["remedy"], name
        assert label["operations"] is None
        assert Task(name).framework in label["needs"], name


def test_the_readme_has_the_counts_and_a_label_as_it_is() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for kind in ("failing", "healthy", "unseen", "silent"):
        row = next(line for line in text.splitlines() if line.startswith(f"| `{kind}` |"))
        counts = [
            sum(
                Task(name).set == kind and Task(name).framework == framework and label["kind"] == state
                for name, label in LABELS.items()
            )
            for state in ("failing", "healthy")
            for framework in ("torch", "jax")
        ]
        shown = [int(number) for cell in row.split("|")[3:5] for number in re.findall(r"\d+", cell)]
        assert shown == [count for count in counts if count]
    (example,) = re.findall(r"^```json\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    for name, label in json.loads(f"{{{example}}}").items():
        assert label == LABELS[name]


def test_the_tool_in_the_readme_runs() -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text("utf-8"), re.M | re.S)
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["look"](Task("torch/failing/log_of_zero")).detected
    assert not names["look"](Task("torch/healthy/causal_mask")).detected


def test_the_causes_are_those_that_a_diagnosis_can_name() -> None:
    assert set(CAUSES) | {"not_replayed", "nothing_wrong", "other_rank", "unknown"} == {
        cause.value for cause in Cause
    }


def test_the_symptoms_are_those_that_a_checkup_can_name() -> None:
    symptoms = {cause for name in SCRIPTS for cause in FAILING[name]["causes"] or ()}
    assert symptoms <= {symptom.value for symptom in Symptom}


@pytest.mark.parametrize("name", [name for name in STEPS if "adam" in name or "where_trap" in name])
def test_the_primitive_at_fault_is_accepted(name: str) -> None:
    report = replay(Task(name).framework, Task(name).build())
    primitive = report.findings[0].primitive if report.findings else ""
    accepted = {plain_name(operation) for operation in FAILING[name]["operations"]}
    assert not primitive or plain_name(primitive) in accepted


@pytest.mark.parametrize(
    "wrong",
    [
        {"cause": "domains", "operation": "log"},
        {"cause": "domain", "operation": "log", "fails": "loudly"},
        {"cause": "domain", "operation": "log", "only": "jax"},
    ],
)
def test_a_case_rejects_words_that_it_does_not_know(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"expected|only"):
        Case(**wrong)


def test_the_corpus_does_not_import_stablenum_or_the_other_framework() -> None:
    """Apart from our own entry."""
    for framework, other in (("torch", "jax"), ("jax", "torch")):
        code = f"""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {{"stablenum", "stablenum_torch", "stablenum_jax", {other!r}}}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Blocked())
import corpus.__main__, corpus.plain, corpus.tools.baseline
from corpus.labels import collect
from corpus.task import Task
for name in collect()["programs"]:
    if name in ("{framework}/failing/log_of_zero", "{framework}/failing/checkpointed_log"):
        Task(name).build()
"""
        subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2], timeout=120)
