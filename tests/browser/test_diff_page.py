"""The page of a comparison in a browser: what it shows, and how it answers to the mouse and to keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stablenum import DiffReport
from tests.browser.reports import report_of, row
from tests.core.test_diff_page import HOSTILE, REPORTS

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = playwright.expect

Opened = Callable[..., Any]


@pytest.fixture
def opened(opened_file: Opened, tmp_path: Path) -> Opened:
    """Opens the page of a report."""

    def open_page(report: DiffReport, **options: Any) -> Any:
        file = tmp_path / "report.html"
        report.save(file)
        return opened_file(file, **options)

    return open_page


def small() -> DiffReport:
    """Two modules, in the second of which the programs differ; the right side has one value earlier."""
    left = (
        row(operation="embed", module="body", partner=1, error=1e-14, allowed=1e-12, state="rounding"),
        row(operation="linear", module="body", partner=2, error=0.0, allowed=1e-12),
        row(operation="gelu", module="head.act", where="model.py:9", code="F.gelu(x)", state="different"),
        row(operation="moved", module="head.act", partner=0, error=2e-13, allowed=1e-12, off=1e-7),
        row(operation="sum", module="loss", phase="backward", state="different"),
    )
    right = (
        row(operation="early", module="Body", partner=3, error=2e-13, allowed=1e-12, where="port.py:1"),
        row(operation="take", module="Body", partner=0, error=1e-14, allowed=1e-12, state="rounding"),
        row(operation="dot_general", module="Body", partner=1, error=0.0, allowed=1e-12),
        row(operation="tanh", module="Head", where="port.py:9", code="nn.gelu(x)", state="different"),
        row(operation="reduce_sum", phase="backward", state="unmatched"),
    )
    model = report_of(30)
    assert model.first is not None
    assert model.first.left is not None
    assert model.first.right is not None
    first = replace(
        model.first,
        left=replace(model.first.left, where="model.py:9", operation="gelu"),
        right=replace(model.first.right, where="port.py:9", operation="tanh"),
    )
    return replace(model, differences=(first,), left_rows=left, right_rows=right)


def operations(page: Any) -> list[str]:
    return page.locator(".line .operation").evaluate_all("all => all.map((e) => e.firstChild.textContent)")


# --- opening -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REPORTS)
def test_a_page_opens(name: str, opened: Opened) -> None:
    page = opened(REPORTS[name])
    expect(page.locator("h1")).to_contain_text("The two programs")
    if name != "empty":
        expect(page.get_by_role("treegrid", name="Operations")).to_be_visible()
        expect(page.get_by_role("slider", name="Error by position")).to_be_visible()


def test_what_comes_from_users_is_shown_and_not_run(opened: Opened) -> None:
    page = opened(REPORTS["hostile"])
    cell = page.locator("#left-0")
    cell.hover()
    visible = HOSTILE[: HOSTILE.index("\u2028")].strip()
    expect(page.locator("#detail pre").first).to_contain_text(visible)
    expect(cell).to_contain_text(visible)
    page.locator("#plot").hover()
    expect(page.locator(".tip")).to_contain_text(visible)
    expect(page.locator("img")).to_have_count(0)
    expect(page.locator("script")).to_have_count(2)


def test_of_many_operations_only_those_in_view_are_in_the_document(opened: Opened) -> None:
    page = opened(report_of(5000))
    page.get_by_role("button", name="Unfold all").click()
    assert page.locator("#tree .row").count() < 100
    page.locator("#tree").evaluate("tree => tree.scrollTo(0, tree.scrollHeight)")
    expect(page.locator("#left-4999")).to_be_visible()
    assert page.locator("#tree .row").count() < 100


def test_the_themes_differ(opened: Opened) -> None:
    colours = [
        opened(small(), color_scheme=scheme).evaluate("getComputedStyle(document.body).backgroundColor")
        for scheme in ("light", "dark")
    ]
    assert colours[0] != colours[1]


@pytest.mark.parametrize("name", ["differs", "agrees", "hostile"])
def test_a_narrow_window_needs_no_scrolling_to_the_side(name: str, opened: Opened) -> None:
    page = opened(REPORTS[name], viewport={"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_the_verdict_needs_no_script(opened: Opened) -> None:
    page = opened(small(), java_script_enabled=False)
    expect(page.locator(".difference").first).to_contain_text("epsilon_value")
    expect(page.locator("noscript p")).to_be_visible()
    expect(page.locator("#tree")).to_be_hidden()
    expect(page.locator("#weights")).to_be_visible()


# --- the list ----------------------------------------------------------------------------------------------


def test_a_text_filters_operations_modules_files_and_code(opened: Opened) -> None:
    page = opened(small())
    for text, found in {
        "GELU": ["gelu", "tanh"],  # the code of tanh
        "dot_general": ["linear", "dot_general"],  # one line
        "head.act": ["gelu", "tanh", "moved"],
        "port.py:1": ["early"],
        "nowhere": [],
    }.items():
        page.locator("#filter-text").fill(text)
        assert operations(page) == found, text
    expect(page.locator("#count")).to_have_text("0 of 10 operations")
    expect(page.locator(".module")).to_have_count(0)
    page.locator("#filter-text").fill("")
    expect(page.locator("#count")).to_have_text("10 operations")
    assert len(operations(page)) == 10


def test_states_and_phases_are_chosen(opened: Opened) -> None:
    page = opened(small())
    page.get_by_role("checkbox", name="rounding").check()
    assert operations(page) == ["embed", "take"]
    page.get_by_role("checkbox", name="different").check()
    assert set(operations(page)) == {"embed", "take", "gelu", "tanh", "sum", "reduce_sum"}
    page.get_by_role("checkbox", name="backward").check()
    assert operations(page) == ["sum", "reduce_sum"]
    expect(page.locator("#count")).to_have_text("1 of 10 operations")


def test_a_filter_opens_modules_and_leaves_them_as_they_were(opened: Opened) -> None:
    page = opened(report_of(300))
    before = operations(page)
    page.locator("#filter-text").fill("softmax")
    assert len(operations(page)) > len(before)
    page.locator("#filter-text").fill("")
    assert operations(page) == before


def test_pointing_at_an_operation_shows_its_partner_and_details(opened: Opened) -> None:
    page = opened(small())
    page.locator("#right-1").hover()
    expect(page.locator(".lit")).to_have_attribute("id", "right-1")
    expect(page.locator(".partner")).to_have_attribute("id", "left-0")
    detail = page.locator("#detail")
    expect(detail).to_contain_text("embed")
    expect(detail).to_contain_text("only rounding distinguishes them")
    expect(detail).to_contain_text("error 1.0e-14")
    page.locator("#left-2").hover()
    expect(page.locator(".partner")).to_have_attribute("id", "right-3")
    expect(detail).to_contain_text("nn.gelu(x)")
    page.locator("#right-4").hover()
    expect(page.locator(".partner")).to_have_count(0)
    expect(detail).to_contain_text("no partner")


def test_a_partner_in_another_line_can_be_gone_to(opened: Opened) -> None:
    page = opened(small())
    page.locator("#left-3").hover()
    expect(page.locator(".partner")).to_have_attribute("id", "right-0")
    page.get_by_role("button", name="Show the partner on the right").click()
    expect(page.locator("#right-0")).to_be_focused()
    page.get_by_role("button", name="Fold all", exact=True).click()
    page.get_by_role("button", name="Show the partner on the left").click()
    expect(page.locator("#left-3")).to_be_focused()


def test_modules_are_folded_by_a_click(opened: Opened) -> None:
    page = opened(small())
    body = page.locator(".module", has_text="Body")
    expect(body).to_have_attribute("aria-expanded", "true")
    body.click()
    expect(body).to_have_attribute("aria-expanded", "false")
    expect(page.locator("#left-0")).to_have_count(0)
    expect(page.locator("#left-2")).to_be_visible()
    body.click()
    expect(page.locator("#left-0")).to_be_visible()


def test_a_module_inside_one_alone_shares_its_line(opened: Opened) -> None:
    page = opened(small())
    names = page.locator(".module .cell:first-child .name").all_inner_texts()
    assert names == ["forward", "body", "head.act", "backward", "loss"]


def test_the_list_is_walked_with_keys(opened: Opened) -> None:
    page = opened(small())
    page.locator(".module").first.focus()
    press = page.keyboard.press
    press("ArrowDown")
    expect(page.locator(".module", has_text="Body")).to_be_focused()
    press("ArrowRight")
    expect(page.locator("#right-0")).to_be_focused()  # the line has no left side
    press("ArrowDown")
    expect(page.locator("#left-0")).to_be_focused()
    press("ArrowRight")
    expect(page.locator("#right-1")).to_be_focused()
    expect(page.locator(".partner")).to_have_attribute("id", "left-0")
    press("ArrowLeft")
    expect(page.locator("#left-0")).to_be_focused()
    press("ArrowLeft")
    expect(page.locator(".module", has_text="Body")).to_be_focused()
    press("ArrowLeft")
    expect(page.locator("#left-0")).to_have_count(0)
    expect(page.locator(".module", has_text="Body")).to_be_focused()
    press("End")
    expect(page.locator("#left-4")).to_be_focused()
    press("Home")
    expect(page.locator(".module").first).to_be_focused()
    press("Enter")
    expect(page.locator(".row.line")).to_have_count(1)  # of the backward pass


def test_one_press_of_the_tab_key_enters_and_leaves_the_list(opened: Opened) -> None:
    page = opened(report_of(300))
    page.get_by_role("button", name="Fold all", exact=True).focus()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('#tree') !== null")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('#tree') === null")


def test_the_focus_stays_when_its_line_is_out_of_view(opened: Opened) -> None:
    page = opened(report_of(3000))
    page.get_by_role("button", name="First difference").click()
    focused = page.evaluate("document.activeElement.id")
    assert focused.startswith("left-")
    page.get_by_role("button", name="Unfold all").click()
    page.locator(f"#{focused}").focus()
    page.locator("#tree").evaluate("tree => tree.scrollTo(0, tree.scrollHeight)")
    page.locator("#left-2999").wait_for()
    assert page.evaluate("document.activeElement.id") == focused


def test_an_operation_that_a_filter_hides_is_shown_when_it_is_gone_to(opened: Opened) -> None:
    page = opened(small())
    page.locator("#filter-text").fill("embed")
    page.get_by_role("button", name="First difference").click()
    expect(page.locator("#left-2")).to_be_focused()
    expect(page.locator("#filter-text")).to_have_value("")


def test_each_step_is_a_node_if_there_are_several(opened: Opened) -> None:
    rows = (row(), row(step=2))
    page = opened(replace(small(), differences=(), left_rows=rows, right_rows=rows))
    assert page.locator(".module .cell:first-child .name").all_inner_texts() == [
        "step 1, forward",
        "step 2, forward",
    ]


# --- plot and weights --------------------------------------------------------------------------------------


def test_the_plot_says_which_operation_is_under_the_pointer(opened: Opened) -> None:
    page = opened(small())
    page.locator("#plot").hover(position={"x": 60, "y": 100})
    tip = page.locator(".tip")
    expect(tip).to_contain_text("early")
    expect(tip).to_contain_text("error 2.0e-13, allowed 1.0e-12")
    expect(page.locator("line.frontier")).to_have_count(1)
    page.mouse.move(0, 0)
    expect(tip).to_be_hidden()


def test_the_plot_is_walked_with_keys_and_leads_to_the_list(opened: Opened) -> None:
    page = opened(small())
    plot = page.locator("#plot")
    plot.focus()
    page.keyboard.press("Home")
    expect(plot).to_have_attribute(
        "aria-valuetext", "early, port.py:1, Body, equal, error 2.0e-13, allowed 1.0e-12"
    )
    page.keyboard.press("ArrowRight")
    expect(plot).to_have_attribute("aria-valuenow", "2")
    page.keyboard.press("Enter")
    expect(page.locator("#left-0")).to_be_focused()


def test_the_plot_is_drawn_again_at_another_width(opened: Opened) -> None:
    page = opened(small())
    page.set_viewport_size({"width": 500, "height": 700})
    expect(page.locator("#plot svg")).to_have_attribute(
        "width", str(page.locator("#plot").evaluate("e => e.clientWidth"))
    )
    assert page.evaluate("document.documentElement.scrollWidth") <= 500


def test_weights_are_filtered(opened: Opened) -> None:
    page = opened(small())
    page.locator("#weights-filter").fill("blocks.3.")
    expect(page.locator("#weights tbody tr:visible")).to_have_count(3)
    expect(page.locator("#weights-count")).to_have_text("3 of 36")
