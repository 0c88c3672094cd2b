"""Nothing but the judge confirms a cause, and it confirms what it has tried."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stablenum.diagnosis.diff.causes import judge
from stablenum.diagnosis.diff.causes.judge import Edit, Proposal, Slope, judged, told
from stablenum.diagnosis.diff.causes.scene import Scene
from stablenum.diagnosis.diff.places.frontier import Frontier
from stablenum.diagnosis.diff.places.patches import Patch
from stablenum.diagnosis.diff.places.results import Group

ROOT = Path(judge.__file__).parents[1]


def confirming() -> Iterator[str]:
    """The modules that say of a cause that it is confirmed, or leave that open."""
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                said = [k.value for k in node.keywords if k.arg == "confirmed"]
                if any(not (isinstance(v, ast.Constant) and v.value is False) for v in said):
                    yield path.name


def test_nothing_but_the_judge_confirms_a_cause() -> None:
    assert set(confirming()) == {"judge.py"}


class Programs:
    """Two programs of whose results a number is left to be healed.

    Args:
        heals: the value that has to be replaced by 1.
        meets: the value after which the line gives the same, whatever the results are.
        shares: how many values are equal on both sides after a change.
    """

    def __init__(self, heals: int, meets: int = -1, shares: int = 0, replaced: tuple[int, ...] = ()) -> None:
        self.heals, self.now_meets, self.shares, self.replaced = heals, meets, shares, replaced
        self.found = self
        self.groups = (Group("loss", 1, (), (0, 0)),)

    def known(self, side: str) -> dict[int, list[int]]:
        return {}

    def group(self, group: Group) -> Group:
        return group

    def with_values(self, side: str, values: dict[int, Any], until: Any = None) -> Programs:
        assert side == "right"
        return Programs(self.heals, self.now_meets, self.shares, (*self.replaced, *values))

    def agrees(self, group: Group) -> bool:
        return self.heals in self.replaced

    def meets(self, found: Any, side: str) -> bool:
        return self.now_meets in self.replaced


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many values are shared only with a change is what the programs say."""

    def shared(before: Any, after: Any, side: str, region: Any, value: int) -> int:
        return after.shares

    monkeypatch.setattr(judge, "newly_shared", shared)


def scene(heals: int, meets: int = -1, patch: Patch | None = None, shares: int = 0) -> Scene:
    programs: Any = Programs(heals, meets, shares)
    return Scene(programs, Frontier(None, None, (), ()), programs.groups[0], (), patch)


def change(value: int) -> tuple[Edit, ...]:
    return (Edit("right", {value: np.ones(1)}),)


def proposals(*values: int, **options: Any) -> list[Proposal]:
    return [Proposal("scale", f"change {v}", [change(v)], "tried", "seen", **options) for v in values]


def test_the_change_that_heals_is_confirmed_and_the_others_are_not_said() -> None:
    here = scene(heals=3)
    verdict = judged(here, "numbers", proposals(1, 2, 3))
    assert [(c.sentence, c.evidence) for c in verdict.confirmed] == [
        ("change 3", "seen tried, the results agree.")
    ]
    assert not verdict.likely
    assert here.tried == {"numbers": 3}
    assert here.healed == [change(3)]


def test_what_cannot_be_tried_is_likely() -> None:
    verdict = judged(scene(heals=1), "", [Proposal("scale", "a guess", measured="seen")])
    assert [(c.sentence, c.evidence, c.confirmed) for c in verdict.likely] == [("a guess", "seen", False)]


def test_what_was_tried_in_vain_is_likely_only_if_the_programs_show_it() -> None:
    assert not judged(scene(heals=9), "", proposals(1)).likely
    assert [c.confirmed for c in judged(scene(heals=9), "", proposals(1, likely=True)).likely] == [False]


def test_two_changes_that_heal_are_both_named_and_one_change_once() -> None:
    two = [
        Proposal("scale", "one", [change(3)]),
        Proposal("scale", "the same", [change(3)], same="one"),
        Proposal("scale", "two", [change(3)]),
        Proposal("scale", "three", [change(3)]),
    ]
    assert [c.sentence for c in judged(scene(heals=3), "", two).confirmed] == ["one", "two"]


def test_one_of_several_ways_to_make_a_change_is_enough() -> None:
    here = scene(heals=3)
    assert told(here, Proposal("scale", "", [change(1), change(3)])).confirmed
    assert not told(here, Proposal("scale", "", [change(1), change(2)])).confirmed


def test_a_line_that_gives_the_same_is_not_enough_where_one_value_makes_the_results_agree() -> None:
    """Sums of entries do not show their order: a line may give the same, transposed."""
    one = Patch(0, 5, "right", {5: np.ones(1)}, agrees=True, shared=0)
    further = Patch(0, 5, "right", {5: np.ones(1)}, agrees=False, shared=9)
    proposal = Proposal("scale", "", [change(2)])
    assert not told(scene(heals=5, meets=2), proposal).confirmed  # nothing follows from it
    assert told(scene(heals=5, meets=2, shares=1), proposal).confirmed
    assert told(scene(heals=5, meets=2, shares=1, patch=further), proposal).confirmed
    assert not told(scene(heals=5, meets=2, shares=1), replace(proposal, by_results=True)).confirmed
    assert not told(scene(heals=5, meets=2, shares=1, patch=one), proposal).confirmed


@pytest.mark.parametrize(
    ("slope", "heals"),
    [
        (Slope(changed=2.0, wanted=2.0, before=1.0), True),
        (Slope(changed=2.0, wanted=3.0, before=1.0), False),
        (Slope(changed=2.0, wanted=2.0, before=2.0), False),
    ],
)
def test_a_measured_slope_heals_only_if_the_change_makes_it_the_wanted_one(slope: Slope, heals: bool) -> None:
    here = scene(heals=1)
    assert told(here, Proposal("stopped_gradient", "", [slope])).confirmed == heals
    assert not here.healed  # nothing was replaced with which the search could go on


def test_a_search_of_many_changes_ends() -> None:
    def endless() -> Iterator[Proposal]:
        while True:
            yield from proposals(1)

    here = scene(heals=9)
    judged(here, "numbers", endless())
    assert here.tried["numbers"] == judge._MOST_TRIALS
