"""The examples on the documentation pages run."""

from __future__ import annotations

import re
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


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_the_example_runs(block):
    exec(compile(block, "<documentation>", "exec"), {"__name__": "example"})
