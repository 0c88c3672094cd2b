"""``stablenum diff`` on pairs of programs that others wrote: no false alarm, and the right line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.pairs.judged import HERE, cases, judged, lines_of, source_of

# Some of the programs call what optax has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated:DeprecationWarning")

SETS = (
    "tuned",
    "blind",
    "second",
    "third",
    "fourth",
    "fifth",
    "sixth",
    "seventh",
    "eighth",
    "ninth",
    "tenth",
    "eleventh",
    "within",
)
KINDS = ("equivalent", "error")
# A pair whose author says that it agrees: torch clips by norm + 1e-6 and optax by the norm.
NOT_THE_SAME = {("fourth", "vae_equivalent")}
# Square matrices that only the order of their axes tells from ones that are right.
NOT_SEEN = {("fifth", "gpt2_wo_transposed"), ("seventh", "flow_mix_transposed")}
FOUND: dict[str, dict[str, dict[str, bool]]] = json.loads((HERE / "found.json").read_text(encoding="utf-8"))
ALL = [(name, case) for name in SETS for case in cases(name)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "case"), ALL, ids=[f"{n}-{c}" for n, c in ALL])
def test_a_pair_is_judged_as_it_was(name: str, case: str, tmp_path: Path) -> None:
    found = judged(name, cases(name)[case], tmp_path)._asdict()
    expected = FOUND[name][case]
    assert {k: v for k, v in found.items() if expected[k]} == {k: True for k, v in expected.items() if v}
    if cases(name)[case]["kind"] == "error":
        assert found["ok"] == ((name, case) in NOT_SEEN), "a difference was not seen, or one more is seen"


@pytest.mark.parametrize("case", ["gru_cells_nnx", "gru_hard_sigmoid", "vq_eqx"])
def test_some_pairs_are_judged_in_every_run(case: str, tmp_path: Path) -> None:
    found = judged("tuned", cases("tuned")[case], tmp_path)
    if cases("tuned")[case]["kind"] == "equivalent":
        assert found.ok
    else:
        assert found.left
        assert found.right
        assert found.cause
        assert found.confirmed


def test_replaced_values_leave_the_numbers_of_the_others(tmp_path: Path) -> None:
    """In this pair a sum of gradients cancels once a value is replaced."""
    found = judged("within", cases("within")["resnet_pool_copy"], tmp_path)
    assert found.left
    assert found.right


@pytest.mark.parametrize("name", SETS)
def test_every_case_can_be_made(name: str) -> None:
    for case in cases(name).values():
        text = source_of(name, case)
        before = text if "both" not in case else (HERE / name / case["base"]).read_text(encoding="utf-8")
        for side, of in (("left", before), ("right", text)):
            fragment: Any = case.get(side)
            assert fragment is None or lines_of(of, fragment)


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
