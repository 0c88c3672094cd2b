"""The examples on the documentation pages run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGES = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
BLOCKS = {
    f"{page.name}:{i}": block
    for page in PAGES
    for i, block in enumerate(
        re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    )
}


def test_the_pages_have_examples():
    assert {name.partition(":")[0] for name in BLOCKS} == {"how-it-works.md", "quickstart.md"}


def test_the_scenario_files_on_the_page_run(tmp_path):
    page = (PAGES[0].parent / "compare.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```toml\n(.*?)^```", page, re.M | re.S)
    file = tmp_path / "mine.toml"
    file.write_text("\n".join(blocks), encoding="utf-8")
    names = re.findall(r'^name = "(.*)"', "\n".join(blocks), re.M)
    assert names == ["mine", "spiky"]
    asked = [part for name in names for part in ("--scenario", name)]
    options = ["--config", str(file), *asked, "--backend", "torch", "--backend", "jax-jit"]
    command = [sys.executable, "-m", "stablenum", "compare", *options]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_the_example_runs(block):
    exec(compile(block, "<documentation>", "exec"), {"__name__": "example"})
