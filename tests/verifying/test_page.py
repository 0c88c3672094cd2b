"""The page on the command shows what the command prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "verify.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def folder() -> Path:
    """The folder into which the page's program writes."""
    names: dict[str, object] = {"__name__": "example"}
    exec(compile(re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)[0], "<page>", "exec"), names)
    found = names["folder"]
    assert isinstance(found, Path)
    return found


@pytest.mark.parametrize(("arguments", "code"), [("bad.pt", 1), (".", 1)])
def test_the_page_shows_what_the_command_prints(arguments, code, folder):
    command = [sys.executable, "-m", "stablenum", "verify", *arguments.split()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "140"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    shown = re.search(
        rf"^```console\n\$ stablenum verify {re.escape(arguments)}\n(.*?)^```", PAGE, re.M | re.S
    )
    assert shown is not None
    assert [line.rstrip() for line in done.stdout.splitlines()] == shown[1].splitlines()
