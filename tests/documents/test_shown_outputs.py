"""What the pages show below a command is what the command prints, line by line between dots."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Page, command line, and the folder of its script. The outputs of diff and --fix have tests of their own.
SHOWN = [
    ("README.md", "stablenum explain train.py -- --lr 0.01", "explain"),
    ("docs/checkup.md", "stablenum checkup finetune.py", "checkup"),
]


def parts_of(page: str, command: str) -> list[list[str]]:
    """The lines below a command, in the same block or in the next one, cut at the lines of dots."""
    text = (ROOT / page).read_text(encoding="utf-8")
    block = re.search(rf"^```console\n\$ {re.escape(command)}\n(.*?)^```", text, re.M | re.S)
    assert block is not None, command
    shown = block[1] or re.search(r"^```text\n(.*?)^```", text[block.end() :], re.M | re.S)[1]
    parts = [part.splitlines() for part in re.split(r"^\.\.\.\n", shown, flags=re.M)]
    return [part for part in parts if part]


@pytest.mark.slow(reason="runs each script two times or more")
@pytest.mark.parametrize(("page", "command", "folder"), SHOWN, ids=[f"{page}" for page, *_ in SHOWN])
def test_the_page_shows_what_the_command_prints(page: str, command: str, folder: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command.split()],
        cwd=ROOT / "examples" / folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    printed, at = [line.rstrip() for line in done.stdout.splitlines()], 0
    for part in parts_of(page, command):
        found = [i for i in range(at, len(printed)) if printed[i : i + len(part)] == part]
        assert found, "\n".join(part)
        at = found[0] + len(part)


def test_the_scripts_of_the_pages_are_there() -> None:
    for _, command, folder in SHOWN:
        assert (ROOT / "examples" / folder / command.split()[2]).is_file()
