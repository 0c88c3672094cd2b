"""The stories of the documentation: their notebooks are those of their texts, and run from start to end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
STORIES = ROOT / "docs" / "stories"
NAMES = ["port-differs", "run-dies"]

# What each story tells, in the order in which its cells print it.
TOLD = {
    "run-dies": [
        "loss: nan\n",
        "log gives -inf (forward)",
        "stablenum_torch.numerics.log(1 - p)",
        "tried: with this change",
        "NONFINITE_LOSS",
        "0 steps skipped",
        "Attempt 1: back to step",
        "bad shard, with recovery",
    ],
    "port-differs": [
        "The two programs differ",
        "(confirmed, epsilon_value)",
        "(confirmed, scale)",
        "(confirmed, decay_coupling)",
        "The two programs differ",
        "(confirmed, gelu_variant)",
        "The two programs are the same in exact arithmetic.",
        "equal decisions in 400 of 400 steps",
        "INF_GRADIENT",
    ],
}


def committed(name: str) -> Any:
    return nbformat.read(STORIES / f"{name}.ipynb", as_version=4)


def code_of(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(notebook: Any) -> str:
    return "".join(o.text for cell in code_of(notebook) for o in cell.outputs if o.output_type == "stream")


def tells(text: str, name: str) -> bool:
    """Whether a text contains what a story tells, in that order."""
    for part in TOLD[name]:
        _, found, text = text.partition(part)
        if not found:
            return False
    return True


def test_every_story_has_a_text_and_a_notebook() -> None:
    assert sorted(path.stem for path in STORIES.glob("*.md")) == NAMES
    assert sorted(path.stem for path in STORIES.glob("*.ipynb")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_cells_of_a_notebook_are_those_of_its_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    text = __import__("notebooks").notebook_of(STORIES / f"{name}.md")
    mine, theirs = (
        [(c.id, c.cell_type, c.source, c.metadata) for c in notebook.cells]
        for notebook in (committed(name), text)
    )
    assert mine == theirs  # else: make stories


@pytest.mark.parametrize("name", NAMES)
def test_a_committed_notebook_ran_from_start_to_end_and_tells_its_story(name: str) -> None:
    notebook = committed(name)
    cells = code_of(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert all(o.output_type != "error" for cell in cells for o in cell.outputs)
    assert any("image/svg+xml" in o.get("data", {}) for cell in cells for o in cell.outputs)
    assert tells(printed(notebook), name)


@pytest.mark.parametrize("name", NAMES)
def test_no_output_varies_from_run_to_run(name: str) -> None:
    text = printed(committed(name))
    # A warning is printed as "UserWarning: ..."; a message may name a class of warnings.
    for word in ("/tmp", "ipykernel", "0x", "seconds", str(ROOT), "Warning:", "\x1b"):
        assert word not in text


@pytest.mark.parametrize("name", NAMES)
def test_a_story_is_in_the_sidebar_and_behind_a_door(name: str) -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    tutorials = index.partition(":caption: Tutorials")[2].partition("```")[0]
    assert f"\nstories/{name}\n" in tutorials
    assert f"](stories/{name}.ipynb)" in index


# One and a half and two minutes on two cores that do nothing else.
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", NAMES)
def test_a_story_runs_in_a_clean_kernel(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "docs/notebooks.py", name, "--to", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert result.returncode == 0, result.stderr
    assert tells(printed(nbformat.read(tmp_path / f"{name}.ipynb", as_version=4)), name)
