"""The page of ``stablenum compare`` in a browser: verdicts, plots of each scenario, and pointing at steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stablenum.commands.compare.backends import BACKENDS
from stablenum.commands.compare.builtin import SCENARIOS
from stablenum.commands.compare.page import as_html
from stablenum.commands.compare.runner import Result, run_scenario

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = playwright.expect

NAMES = ("single-inf", "spike-skip", "bce-saturated", "all-zero", "empty-tree")
# How many pixels of a plot are blue or red, by way of another canvas, from which reading is fast.
COLOURED = """(canvas, colour) => {
  const other = new OffscreenCanvas(canvas.width, canvas.height);
  const copy = other.getContext("2d", { willReadFrequently: true });
  copy.drawImage(canvas, 0, 0);
  const { data } = copy.getImageData(0, 0, canvas.width, canvas.height);
  let found = 0;
  for (let i = 0; i < data.length; i += 4) {
    const [red, , blue, alpha] = data.subarray(i, i + 4);
    if (alpha > 100 && (colour === "blue" ? blue > red + 60 : red > blue + 60)) found += 1;
  }
  return found;
}"""

Opened = Callable[..., Any]


@pytest.fixture(scope="module")
def results() -> list[Result]:
    return [run_scenario(SCENARIOS[name], [BACKENDS["numpy"]]) for name in NAMES]


@pytest.fixture
def opened(opened_file: Opened, results: list[Result], tmp_path: Path) -> Opened:
    def open_page(*changed: Result, **options: Any) -> Any:
        file = tmp_path / "results.html"
        file.write_text(as_html(changed or results, [BACKENDS["numpy"]], {}, {}), encoding="utf-8")
        return opened_file(file, **options)

    return open_page


def section(page: Any, name: str) -> Any:
    """The section of a scenario, whose plots have been drawn."""
    found = page.locator("section.scenario", has=page.get_by_role("heading", name=name))
    found.scroll_into_view_if_needed()
    expect(found.locator("canvas").first).to_be_visible()
    return found


def canvas(place: Any, title: str) -> Any:
    return place.locator("figure", has_text=title).locator("canvas")


def test_every_scenario_has_a_verdict_and_plots(opened):
    page = opened()
    expect(page.locator("h1")).to_contain_text("without and with a guard")
    expect(page.locator("table.verdicts tbody tr")).to_have_count(len(NAMES))
    row = page.locator("table.verdicts tr", has_text="single-inf")
    assert row.locator("td").all_inner_texts() == ["single-inf", "dies", "survives", "1 of 200", "reference"]
    for name in NAMES:
        place = section(page, name)
        expect(place).to_contain_text(SCENARIOS[name].about)
        titles = place.locator("figcaption b").all_inner_texts()
        assert titles[:2] == ["Loss", "Gradient norm"]
        assert ("Distance from the start" in titles) == (name != "bce-saturated")
        assert ("Loss scale" in titles) == (SCENARIOS[name].guard.loss_scale is not None)


def test_a_link_in_the_table_leads_to_the_scenario(opened):
    page = opened()
    page.get_by_role("link", name="all-zero").click()
    expect(page.get_by_role("heading", name="all-zero")).to_be_in_viewport()


@pytest.mark.parametrize(("name", "title"), [("single-inf", "Distance"), ("bce-saturated", "Loss")])
def test_the_runs_with_and_without_a_guard_are_drawn(opened, name, title):
    """Hiding one of them leaves no pixel of its colour but the ticks of skipped steps, which are red."""
    plots = section(opened(), name)
    drawn = canvas(plots, title)
    blue, red = (drawn.evaluate(COLOURED, colour) for colour in ("blue", "red"))
    assert blue > 100
    plots.get_by_role("checkbox", name="without a guard").uncheck()
    plots.page.wait_for_timeout(100)
    assert 0 < drawn.evaluate(COLOURED, "red") < red
    plots.get_by_role("checkbox", name="with the guard").uncheck()
    plots.page.wait_for_timeout(100)
    assert (drawn.evaluate(COLOURED, "blue"), drawn.evaluate(COLOURED, "red")) == (0, 0)


def test_skipped_steps_are_named_and_pointing_at_one_says_why(opened):
    page = opened()
    place = section(page, "single-inf")
    expect(place).to_contain_text("Skipped: step 20 (INF_GRADIENT")
    over = place.locator(".u-over").first
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    page.mouse.move(box["x"] + 20 / 199 * box["width"] + 2, box["y"] + 60)
    tip = page.locator(".tip:visible")
    expect(tip).to_contain_text("step 20")
    expect(tip).to_contain_text("INF_GRADIENT: the step was skipped: a gradient holds inf")
    expect(tip).to_contain_text("without a guard")
    expect(tip.locator(".bare ~ div")).to_contain_text("distance from the start not finite")


def test_plots_zoom_together_with_those_of_their_scenario_alone(opened):
    page = opened(viewport={"width": 1300, "height": 2200})
    first, second = section(page, "single-inf"), section(page, "spike-skip")
    pictures = [p.locator("canvas").nth(1).evaluate("e => e.toDataURL()") for p in (first, second)]
    box = first.locator(".u-over").first.bounding_box()
    page.mouse.move(box["x"] + 0.2 * box["width"], box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.4 * box["width"], box["y"] + 40)
    page.mouse.up()
    page.wait_for_timeout(200)
    now = [p.locator("canvas").nth(1).evaluate("e => e.toDataURL()") for p in (first, second)]
    assert [a == b for a, b in zip(pictures, now, strict=True)] == [False, True]


@pytest.mark.parametrize("width", [360, 700, 1360])
def test_plots_fit_the_window(opened, width):
    page = opened(viewport={"width": width, "height": 900})
    figures = section(page, "all-zero").locator("figure")
    sizes = figures.evaluate_all(
        "all => all.map((e) => [e.querySelector('.uplot').clientWidth, e.clientWidth])"
    )
    assert len(sizes) == 4
    assert all(plot == place for plot, place in sizes)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_dark_window_has_a_dark_page(opened):
    page = opened(color_scheme="dark")
    section(page, "single-inf")
    red, green, blue = page.evaluate(
        "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
    )
    assert max(red, green, blue) < 60


def test_text_of_a_scenario_is_shown_and_not_run(opened):
    hostile = "</script><img src=x onerror=alert(1)>"
    stream = dataclasses.replace(SCENARIOS["all-zero"], about=hostile, expected=SCENARIOS["clean"].expected)
    page = opened(run_scenario(stream, [BACKENDS["numpy"]]))
    expect(section(page, "all-zero")).to_contain_text(hostile)
    expect(page.locator("img")).to_have_count(0)
    expect(page.locator("script")).to_have_count(2)


def test_the_verdicts_need_no_script(opened):
    page = opened(java_script_enabled=False)
    expect(page.locator("noscript p")).to_be_visible()
    expect(page.locator("table.verdicts")).to_contain_text("survives")
