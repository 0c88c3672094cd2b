"""The README's examples run, and say what the text around them says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=["torch", "jax"])
def test_example(example, capsys):
    exec(compile(example, str(README), "exec"), {})
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[3] == ["3", "False", "NONFINITE_LOSS", lines[3][3]]
    others = {line[2] for line in lines if line[0] != "3"}
    assert others & {"OK", "CLIPPED"}, "good steps are applied"
    assert others <= {"OK", "CLIPPED", "INF_GRADIENT", "NAN_GRADIENT"}, "the scale may back off at first"
