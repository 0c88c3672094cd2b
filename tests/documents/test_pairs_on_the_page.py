"""The page on comparing programs counts the pairs as they were judged."""

from __future__ import annotations

from tests.pairs.judged import HERE, cases
from tests.pairs.test_pairs import ALL, FOUND, KINDS, NOT_THE_SAME, SETS


def test_every_other_equivalent_pair_was_called_the_same() -> None:
    wrong = {(n, c) for n, c in ALL if cases(n)[c]["kind"] == "equivalent" and not FOUND[n][c]["ok"]}
    assert wrong == NOT_THE_SAME


def test_the_table_of_the_page_counts_these_records() -> None:
    page = (HERE.parents[1] / "docs" / "diff.md").read_text(encoding="utf-8")
    table = page[page.index("The sets were then run again") : page.index("## Compared with other tools")]
    rows = [[cell.strip() for cell in line.split("|")[2:-1]] for line in table.splitlines() if " of " in line]
    for name, row in zip(SETS, [r for r in rows if len(r) == 5], strict=False):
        kinds = {
            kind: [FOUND[name][n] for n, c in cases(name).items() if c["kind"] == kind] for kind in KINDS
        }
        mistakes = kinds["error"]
        right = [
            sum(f["ok"] for f in kinds["equivalent"]),
            sum(not f["ok"] for f in mistakes),
            sum(f["left"] and f["right"] for f in mistakes),
            sum(f["module"] for f in mistakes),
            sum(f["cause"] and f["confirmed"] for f in mistakes),
        ]
        out_of = [len(kinds["equivalent"]), *[len(mistakes)] * 4]
        assert row == [f"{a} of {b}" for a, b in zip(right, out_of, strict=True)], name
