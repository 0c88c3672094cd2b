"""The pages show what the commands print, and the instructions for agents are installed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import stablenum

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "mending"
PAGE = (ROOT / "docs" / "mending.md").read_text(encoding="utf-8")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stablenum", *arguments]
    return subprocess.run(command, cwd=EXAMPLES, capture_output=True, text=True, timeout=560, check=False)


def shown(command: str) -> list[str]:
    """What the page shows below a command, after the dots."""
    found = re.search(rf"^```console\n\$ {re.escape(command)}\n\.\.\.\n(.*?)^```", PAGE, re.M | re.S)
    assert found is not None
    return found[1].splitlines()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_page_shows_how_a_port_is_mended() -> None:
    before = (EXAMPLES / "port.py").read_text(encoding="utf-8")
    done = run("diff", "port.py", "--fix")
    assert done.returncode == 4, done.stderr
    printed = done.stdout.splitlines()
    assert [line for line in printed if line.startswith("Mended, proven")] == shown(
        "stablenum diff port.py --fix"
    )
    block = re.search(r"^```text\n(Mended, proven.*?)\n```", PAGE, re.M | re.S)
    assert block is not None
    first = "\n".join(line.rstrip() for line in block[1].splitlines())
    assert first in "\n".join(line.rstrip() for line in printed)
    assert (EXAMPLES / "port.py").read_text(encoding="utf-8") == before


@pytest.mark.slow
def test_the_page_shows_how_a_script_is_mended() -> None:
    done = run("explain", "train.py", "--fix")
    assert done.returncode == 4, done.stderr
    printed = "\n".join(line.rstrip() for line in done.stdout.splitlines())
    assert "\n".join(shown("stablenum explain train.py --fix")) in printed


def test_the_instructions_for_agents_are_installed() -> None:
    assert (Path(stablenum.__file__).parent / "agents.md").is_file()
    assert (ROOT / "docs" / "agents.md").read_text(encoding="utf-8").count("../stablenum/agents.md") == 1
