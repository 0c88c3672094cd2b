"""The README's examples run, and say what the text around them says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from stablenum import NonFiniteError
from stablenum.commands.compare import SCENARIOS

README = Path(__file__).parents[1] / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES[:2], ids=["torch", "jax"])
def test_example(example, capsys):
    exec(compile(example, str(README), "exec"), {})
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[3] == ["3", "False", "NONFINITE_LOSS", lines[3][3]]
    others = {line[2] for line in lines if line[0] != "3"}
    assert others <= {"OK", "CLIPPED", "INF_GRADIENT", "NAN_GRADIENT"}, "the scale may back off at first"
    assert sum(line[1] == "True" for line in lines) >= len(lines) - 2, "the good steps are applied"


def test_torchs_first_step_has_a_reason_that_the_text_names(capsys):
    exec(compile(EXAMPLES[0], str(README), "exec"), {})
    reason = capsys.readouterr().out.splitlines()[0].split()[2]
    after = README.read_text(encoding="utf-8").split("The first steps may be skipped too", 1)[1]
    assert reason in ("OK", "CLIPPED") or f"`{reason}`" in after.split("\n\n", 1)[0]


@pytest.mark.parametrize("example", EXAMPLES[:2], ids=["torch", "jax"])
def test_example_that_raises_stops_at_the_bad_batch(example, capsys):
    stopping = example.replace('loss_scale="dynamic"', 'loss_scale="dynamic", on_nonfinite="raise"')
    assert stopping != example
    with pytest.raises(NonFiniteError, match="loss is NaN or inf"):
        exec(compile(stopping, str(README), "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_the_example_of_the_rules():
    names: dict[str, Any] = {}
    exec(compile(EXAMPLES[2], str(README), "exec"), names)
    assert names["config"].unit_rule is not None
    assert len(EXAMPLES) == 3


def test_the_table_is_that_of_the_built_in_scenarios():
    table = re.search(r"```text\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)[1]
    rows = re.findall(r"^(\S+) +\w+ +(\w+) +(\d+) +(\d+) +\d/6 +yes", table, re.MULTILINE)
    assert [name for name, *_ in rows] == list(SCENARIOS)
    for name, guarded, steps, skipped in rows:
        expected = SCENARIOS[name].expected
        assert guarded == expected.guarded
        assert expected.skips is None or int(skipped) == expected.skips
        assert int(steps) <= SCENARIOS[name].steps or expected.rewinds  # steps are made again
