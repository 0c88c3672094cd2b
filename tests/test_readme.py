"""The README is short, its examples run, and its figures are those of the measurements and of the picture."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from stablenum import NonFiniteError

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def lines_of(example: str) -> list[str]:
    """The lines of an example that are no imports and no decorators."""
    return [line for line in example.splitlines() if line and not line.startswith(("import ", "@"))]


def test_the_readme_is_short():
    assert len(TEXT.splitlines()) <= 150
    assert [len(lines_of(example)) for example in EXAMPLES] == [9, 10]


@pytest.mark.parametrize("example", EXAMPLES, ids=["torch", "jax"])
def test_example(example, capsys):
    exec(compile(example, str(README), "exec"), {})
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[:2] for line in lines] == [[str(i), str(i != 3)] for i in range(5)]
    assert lines[3][2] == "NONFINITE_LOSS"
    assert {line[2] for line in lines if line[0] != "3"} <= {"OK", "CLIPPED"}


@pytest.mark.parametrize("example", EXAMPLES, ids=["torch", "jax"])
def test_example_that_raises_stops_at_the_bad_batch(example, capsys):
    stopping = example.replace("clip=1.0", 'clip=1.0, on_nonfinite="raise"')
    assert stopping != example
    with pytest.raises(NonFiniteError, match="loss is NaN or inf"):
        exec(compile(stopping, str(README), "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_the_picture_is_there_and_its_caption_counts(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    picture = re.search(r"!\[.*\]\((\S+)\)", TEXT)[1]
    assert (ROOT / picture).read_text(encoding="utf-8").startswith("<?xml")
    _, caption = __import__("figures.two_runs", fromlist=["two_runs"]).two_runs()
    assert caption in " ".join(TEXT.split())


def test_the_table_beside_the_peers_has_the_measured_costs():
    report = json.loads((ROOT / "benchmarks" / "results" / "cpu.json").read_text(encoding="utf-8"))
    rows = {row["name"]: row["variants"] for row in report["rows"]}
    torch, jax = (rows[f"{name} 38M/108 float32"] for name in ("torch adamw fused", "jax adamw xla"))
    wanted = (torch["scaler"], jax["apply_if_finite"], jax["jmp"], torch["fold"], jax["fold"])
    row = next(line for line in TEXT.splitlines() if line.startswith("| time of an AdamW step, 38 M"))
    assert re.findall(r"\d\.\d\d", row) == [f"{variant['ratio_to_bare']:.2f}" for variant in wanted]


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\((?!http)([^)#]+)", TEXT))))
def test_a_link_leads_to_a_file(link):
    assert (ROOT / link).exists()
