"""The pairs in ``examples/diff`` are judged as they say, and the pages show the command's own output."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.selection import only

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples" / "diff"
PAGE = (ROOT / "docs" / "diff.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")

# Exit code, the beginning of the output, and the causes of the differences.
EXPECTED = {
    "layer_norm_epsilon.py": (1, "The two programs differ: loss, by", ["epsilon_value"]),
    "equivalent_attention.py": (0, "The two programs are the same in exact arithmetic.", []),
    "adamw_decay.py": (1, "The two programs differ: 2.bias after the update, by", ["decay_coupling"]),
    "mended_port.py --steps 5": (0, "The two programs are the same in exact arithmetic.", []),
}


# A pair that differs and one that does not; single causes and runs of several steps are tested by themselves.
FAST = ["layer_norm_epsilon.py", "equivalent_attention.py"]


@functools.cache
def run(arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments.split()]
    return subprocess.run(command, cwd=EXAMPLES, capture_output=True, text=True, timeout=300)


def without_numbers(text: str) -> list[str]:
    """The lines of a text without the figures, which may move with the versions; lines of code stay."""
    return [re.sub(r"(?<!py:)\b\d+(\.\d+)?(e[-+]\d+)?", "#", line).rstrip() for line in text.splitlines()]


def shown(page: str, command: str) -> str:
    """What a page shows below a command, up to the first line of dots."""
    found = re.search(rf"^```console\n\$ {re.escape(command)}\n(.*?)^```", page, re.M | re.S)
    assert found is not None, command
    return found[1].partition("...\n")[0]


@pytest.mark.parametrize("arguments", only(FAST, EXPECTED))
def test_a_pair_is_judged_as_it_says(arguments: str) -> None:
    code, begins, causes = EXPECTED[arguments]
    result = run(f"-m stablenum diff {arguments}")
    assert result.returncode == code, result.stdout + result.stderr
    assert result.stdout.startswith(begins)
    assert re.findall(r"why \(confirmed, (\w+)\)", result.stdout) == causes


def test_every_pair_is_tested() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {name.split()[0] for name in EXPECTED}


@pytest.mark.parametrize("arguments", only(FAST, EXPECTED))
def test_the_page_shows_what_the_command_prints(arguments: str) -> None:
    printed = without_numbers(run(f"-m stablenum diff {arguments}").stdout)
    lines = without_numbers(shown(PAGE, f"stablenum diff {arguments}"))
    assert len(lines) >= 3
    assert printed[: len(lines)] == lines


def test_the_readme_shows_what_the_command_prints() -> None:
    printed = without_numbers(run("-m stablenum diff layer_norm_epsilon.py").stdout)
    lines = without_numbers(shown(README, "stablenum diff layer_norm_epsilon.py"))
    assert len(lines) >= 6
    assert printed[: len(lines)] == lines


def test_the_tutorial_shows_the_file_that_it_runs() -> None:
    source = (EXAMPLES / "layer_norm_epsilon.py").read_text(encoding="utf-8")
    code = source.partition('"""\n\n')[2]
    assert f"```python\n{code}```" in PAGE


def test_the_port_trains_like_the_original() -> None:
    result = run("mended_port.py")
    assert result.returncode == 0, result.stderr
    assert without_numbers(result.stdout) == without_numbers(shown(PAGE, "python mended_port.py"))
    rows = re.findall(r"torch (\S+) +flax (\S+)", result.stdout)
    assert len(rows) == 5
    for mine, theirs in rows:
        assert float(theirs) == pytest.approx(float(mine), rel=1e-3)
    assert float(rows[-1][0]) < 0.7 * float(rows[0][0])
