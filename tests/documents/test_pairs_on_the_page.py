"""The page on comparing programs counts the pairs as they were judged."""

from __future__ import annotations

from tests.pairs.judged import HERE, cases
from tests.pairs.record import table
from tests.pairs.test_pairs import ALL, BLIND, FOUND, NOT_THE_SAME

PAGE = (HERE.parents[1] / "docs" / "diff-reference.md").read_text(encoding="utf-8")


def test_every_other_equivalent_pair_was_called_the_same() -> None:
    wrong = {(n, c) for n, c in ALL if cases(n)[c]["kind"] == "equivalent" and not FOUND[n][c]["ok"]}
    assert wrong == NOT_THE_SAME


def test_the_tuned_table_of_the_page_counts_these_records() -> None:
    lines = table(FOUND).splitlines()
    assert len(lines) == 14  # thirteen sets and the sum
    assert [line for line in lines if line not in PAGE] == []


def test_the_blind_row_of_the_page_counts_these_records() -> None:
    rows = {
        kind: [FOUND[BLIND][n] for n, c in cases(BLIND).items() if c["kind"] == kind]
        for kind in ("equivalent", "error")
    }
    agree, mistakes = rows["equivalent"], rows["error"]
    same, confirmed = sum(r["ok"] for r in agree), [r for r in mistakes if r["confirmed"]]
    cells = [
        f"{same} of {len(agree)}",
        f"{len(agree) - same}",
        f"{sum(not r['ok'] for r in mistakes)} of {len(mistakes)}",
        f"{sum(r['left'] and r['right'] for r in mistakes)} of {len(mistakes)}",
        f"{sum(r['cause'] for r in mistakes)} of {len(mistakes)}",
        f"{sum(r['cause'] for r in confirmed)}",
    ]
    assert f"| twelfth blind set, twelfth version | {' | '.join(cells)} |" in PAGE
