"""Harmless changes and faults of programs that others wrote: what was right stays right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.lockfile.record import CASES, RECORD, cases, changed_text, row_of, table

FOUND: dict[str, dict[str, Any]] = json.loads(RECORD.read_text(encoding="utf-8"))
PAGE = (Path(__file__).parents[2] / "docs" / "numerics.md").read_text(encoding="utf-8")
# Changes of which the programs' authors say that they are harmless.
KINDS = ("harmless", "fault")


def test_every_case_can_be_made_and_was_recorded() -> None:
    assert set(FOUND) >= set(cases())
    for case in cases().values():
        assert case["kind"] in KINDS
        text = changed_text(case)
        assert text != (CASES / case["base"]).read_text(encoding="utf-8")
        lines = {line.strip() for line in text.splitlines()}
        wanted = case.get("line", [])
        assert {w.strip() for w in ([wanted] if isinstance(wanted, str) else wanted)} <= lines


def test_the_page_has_the_table() -> None:
    assert table(FOUND) in PAGE


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(cases()))
def test_a_case_is_judged_as_it_was(name: str, tmp_path: Path) -> None:
    row, before = row_of(cases()[name], tmp_path), FOUND[name]
    if row.kind == "harmless":
        assert row.seen == before["seen"]
    assert row.seen >= before["seen"]
    assert row.line >= before["line"]
