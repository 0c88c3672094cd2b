"""The page of a comparison without a browser: what stands in it, and which operations stand in one line."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stablenum import DiffReport
from stablenum._support.outside_text import printable
from stablenum.diagnosis.diff.differences import Cause, Difference, Location, Off
from stablenum.diagnosis.diff.report.alignment import aligned
from tests.browser.reports import report_of, row

HOSTILE = "</script><script>alert(1)</script><!-- <img src=x onerror=alert(2)> ]]> \u2028 \x00 \udc80 & \"'"
EMPTY = DiffReport(verdict="the same in exact arithmetic", weights={})


class Page(HTMLParser):
    """Checks that tags are closed in order; collects elements and what reaches out of the page."""

    VOID = ("meta", "link", "input", "!doctype")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.reaching: list[str] = []
        self.text: dict[str, str] = {}
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        reaching = ("src", "href", "srcset", "action")
        self.reaching += [value or "" for name, value in attrs if name in reaching or name.startswith("on")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        kind = self.open[-1] if self.open else ""
        self.text[kind] = self.text.get(kind, "") + data


def data_of(page: str) -> Any:
    """The embedded data, which must be strict JSON."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    return json.loads(text, parse_constant=refuse)


def hostile_report() -> DiffReport:
    texts = {"operation": HOSTILE, "where": HOSTILE, "code": HOSTILE, "module": HOSTILE}
    location = Location(**texts, phase="forward")
    cause = Cause(code=HOSTILE, sentence=HOSTILE, evidence=HOSTILE, remedy=HOSTILE, confirmed=True)
    return DiffReport(
        verdict=HOSTILE,
        differences=(
            Difference(
                left=location,
                right=location,
                result=HOSTILE,
                step=1,
                error=math.inf,
                allowed=0.0,
                causes=(cause,),
            ),
        ),
        weights={HOSTILE: HOSTILE},
        left_off=Off(error=math.nan, where=HOSTILE, operation=HOSTILE, added=math.inf),
        notes=(HOSTILE,),
        left_rows=(row(**texts, partner=0, error=math.inf, allowed=math.nan, off=-math.inf),),
        right_rows=(row(**texts, partner=0, error=math.nan),),
    )


REPORTS = {
    "empty": EMPTY,
    "differs": report_of(60),
    "agrees": report_of(60, differs=False),
    "hostile": hostile_report(),
}


@pytest.mark.parametrize("name", REPORTS)
def test_a_page_is_well_formed_and_reaches_nothing(name: str) -> None:
    page = Page(REPORTS[name].to_html())
    assert page.reaching == ["data:,"]
    assert page.tags.count("script") == (0 if name == "empty" else 2)
    assert "img" not in page.tags


@pytest.mark.parametrize("name", REPORTS)
def test_a_page_names_no_address(name: str) -> None:
    text = REPORTS[name].to_html().replace("http://www.w3.org/2000/svg", "")  # a name, not an address
    assert not re.search(r"https?://|url\(|@import|fetch\(|XMLHttpRequest|innerHTML", text)


def test_the_data_are_strict_json_and_hold_every_row() -> None:
    report = report_of(60)
    data = data_of(report.to_html())
    assert len(data["left"]["operation"]) == len(report.left_rows)
    assert sorted(i for i in data["lines"]["right"] if i is not None) == list(range(len(report.right_rows)))
    named = [data["strings"][i] for i in data["left"]["operation"]]
    assert named == [r.operation for r in report.left_rows]
    i, j = data["first"]
    assert report.first is not None
    assert report.first.left is not None
    assert report.first.right is not None
    assert report.left_rows[i].where == report.first.left.where
    assert report.right_rows[j].where == report.first.right.where


def test_a_notebook_shows_the_page_in_a_frame() -> None:
    frame = hostile_report()._repr_html_()
    assert frame.count("<") == 2
    assert Page(frame).tags == ["iframe"]


def test_texts_of_users_come_back_as_they_were() -> None:
    page = hostile_report().to_html()
    data = data_of(page)
    assert HOSTILE in data["strings"]
    assert Page(page).text["pre"] == 2 * printable(HOSTILE)


def test_numbers_that_are_not_finite_are_texts() -> None:
    left = data_of(hostile_report().to_html())["left"]
    assert (left["error"], left["allowed"], left["off"]) == (["inf"], ["nan"], ["-inf"])


def test_the_first_difference_is_the_row_of_its_phase_and_step() -> None:
    places = [
        row(),
        row(phase="backward"),
        row(phase="backward", operation="mul"),
        row(phase="backward", operation="mul", step=2),
    ]
    location = Location(where="model.py:7", operation="mul", module="", phase="backward")
    first = Difference(left=location, right=None, result="loss", step=1, error=1.0, allowed=0.0)
    report = DiffReport(verdict="different", differences=(first,), weights={}, left_rows=tuple(places))
    assert data_of(report.to_html())["first"] == [2, None]


def test_the_first_difference_is_the_row_that_it_names_among_equal_ones() -> None:
    location = Location(where="model.py:7", operation="add", module="", phase="forward", row=2)
    first = Difference(left=location, right=None, result="loss", step=1, error=1.0, allowed=0.0)
    rows = (row(), row(), row(), row())
    report = DiffReport(verdict="different", differences=(first,), weights={}, left_rows=rows)
    assert data_of(report.to_html())["first"] == [2, None]


def test_an_operation_that_a_side_lacks_is_said_to_be_missing() -> None:
    missing = Location(where="port.py:9", operation=None, module="", phase="forward")
    first = Difference(left=None, right=missing, result="loss", step=3, error=1.0, allowed=0.0)
    page = DiffReport(verdict="different", differences=(first,), weights={}).to_html()
    assert "no such operation in this line" in page
    assert "nothing leads to it" in page
    assert "loss of step 3" in page


def test_the_rounding_of_both_sides_is_shown() -> None:
    page = REPORTS["agrees"].to_html()
    assert "3.0e-07" in page
    assert "dot_general" in page


def test_a_page_is_saved(tmp_path: Any) -> None:
    report = report_of(30)
    report.save(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == report.to_html()


# --- alignment ---------------------------------------------------------------------------------------------


def lines(left: Any, right: Any, more: Any = ()) -> list[tuple[int | None, int | None]]:
    return [(line.left, line.right) for line in aligned(left, right, more)]


def test_partners_stand_in_one_line_and_the_rest_between_them() -> None:
    left = [row(partner=0), row(), row(partner=3)]
    right = [row(partner=0), row(), row(), row(partner=2)]
    assert lines(left, right) == [(0, 0), (1, 1), (None, 2), (2, 3)]


def test_phases_stand_below_one_another_in_their_order() -> None:
    left = [row(phase="update"), row(partner=1)]
    right = [row(phase="backward"), row(partner=1)]
    assert lines(left, right) == [(1, 1), (None, 0), (0, None)]


def test_pairs_beside_the_partners_can_be_given() -> None:
    left, right = [row(), row()], [row(), row(), row()]
    assert lines(left, right, [(1, 2)]) == [(0, 0), (None, 1), (1, 2)]


@given(st.lists(st.none() | st.integers(0, 19), max_size=20), st.permutations(range(20)))
def test_every_row_stands_in_one_line_and_in_its_order(partners: list[int | None], order: list[int]) -> None:
    left = [row(partner=p) for p in partners]
    right = [row(partner=p if p < len(left) else None) for p in order]
    found = lines(left, right)
    assert [i for i, _ in found if i is not None] == list(range(len(left)))
    assert [j for _, j in found if j is not None] == list(range(len(right)))


def test_a_line_of_the_right_side_alone_is_in_the_module_that_fits() -> None:
    left = [row(module="a", partner=0), row(module="b", partner=3)]
    right = [
        row(module="A", partner=0),
        row(module="A"),
        row(module="B"),
        row(module="B", partner=1),
        row(module="B"),
    ]
    assert [line.module for line in aligned(left, right)] == ["a", "a", "b", "b", "b"]


def test_the_modules_are_those_of_the_right_side_if_the_left_one_has_none() -> None:
    left = [row(partner=0), row(), row(partner=1)]
    right = [row(module="A", partner=0), row(module="B", partner=2)]
    assert [line.module for line in aligned(left, right)] == ["A", "A", "B"]
    assert [line.module for line in aligned([row(module="a")], [row(phase="backward", module="B")])] == [
        "a",
        "B",
    ]


@pytest.mark.parametrize(("known", "said"), [(True, "independent of those before"), (False, "may follow")])
def test_a_later_difference_without_a_cause_may_follow_from_those_before(known: bool, said: str) -> None:
    (first,) = hostile_report().differences
    later = first if known else replace(first, causes=())
    report = replace(hostile_report(), differences=(first, later))
    for shown in (str(report), report.to_html()):
        (title,) = re.findall("Difference 2, [^:<]*", shown)
        assert said in title
