"""The page of ``stablenum report`` in a browser: what it shows, zooming, and pointing at steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stablenum import GuardConfig, Reason
from stablenum.commands.report.page import as_html
from stablenum.guard.readout import Worst
from stablenum.runlog.lines import Rewind, Update
from stablenum.runlog.reading import Run, read_run
from tests.report.logs import begun, log_of, long_log, record
from tests.report.test_page import HOSTILE

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = playwright.expect

Opened = Callable[..., Any]

# The pixels of the first plot, by way of another canvas, from which reading is fast.
PIXELS = """() => {
  const canvas = document.querySelector("figure canvas");
  const other = new OffscreenCanvas(canvas.width, canvas.height);
  const copy = other.getContext("2d", { willReadFrequently: true });
  copy.drawImage(canvas, 0, 0);
  return copy.getImageData(0, 0, canvas.width, canvas.height);
}"""
FITS = """() => [...document.querySelectorAll(".uplot")].every(
  (e) => e.clientWidth === document.querySelector(".plots").clientWidth)"""


@pytest.fixture
def opened(opened_file: Opened, tmp_path: Path) -> Opened:
    """Opens the page of some runs."""

    def open_page(*runs: Run, **options: Any) -> Any:
        file = tmp_path / "report.html"
        file.write_text(as_html(runs), encoding="utf-8")
        page = opened_file(file, **options)
        # A function: the page's policy would not let a string be evaluated a second time.
        page.wait_for_function("() => performance.getEntriesByName('interactive').length === 1")
        return page

    return open_page


def short(path: Path, steps: int = 200, **changes: Any) -> Run:
    """A run with a skip at step 50, a spike at step 101, and one update."""
    rows = [record(i, loss=2.0 - i / steps, loss_scale=4.0, **changes) for i in range(steps)]
    rows[50] = record(
        50,
        loss=math.nan,
        grad_norm=math.nan,
        reason=Reason.NONFINITE_LOSS,
        worst=Worst(1, "head"),
        loss_scale=4.0,
    )
    rows[101] = record(101, grad_norm=700.0, loss_scale=2.0, reason=Reason.CLIPPED, clip_coefficient=1 / 700)
    return read_run(log_of(path, rows, [Update(63, 1e-3, 0.25, "head")]))


def shown(page: Any) -> tuple[float, float]:
    return tuple(
        page.evaluate(
            "[0, 1].map((k) => document.querySelector('.range').textContent"
            ".replaceAll(',', '').match(/\\d+/g)[k]).map(Number)"
        )
    )


def plot(page: Any, name: str) -> Any:
    return page.locator("figure", has_text=name).first.locator(".u-over")


def point_at(page: Any, place: Any, share: float, down: float = 0.5) -> None:
    place.scroll_into_view_if_needed()
    box = place.bounding_box()
    page.mouse.move(box["x"] + share * box["width"], box["y"] + down * box["height"])


def drag(page: Any, place: Any, start: float, stop: float) -> None:
    point_at(page, place, start)
    page.mouse.down()
    point_at(page, place, stop)
    page.mouse.up()


# --- opening -----------------------------------------------------------------------------------------------


def test_a_run_is_drawn_and_described(opened, tmp_path):
    page = opened(short(tmp_path / "run.jsonl"))
    expect(page.locator("h1")).to_have_text("run.jsonl")
    names = page.locator("figcaption b").all_inner_texts()
    assert names == ["Loss", "Gradient norm", "Loss scale", "Update, relative to the parameters"]
    captions = page.locator("figcaption").all_inner_texts()
    assert "dashed: clip threshold" in captions[1]
    assert "dotted: largest of a parameter" in captions[3]
    expect(page.locator("canvas")).to_have_count(4)
    expect(page.locator(".legend label")).to_contain_text("200 steps · 1 skipped")
    expect(page.get_by_role("heading", name="Settings and versions")).to_be_visible()
    assert shown(page) == (0, 199)


def test_a_line_is_on_the_canvas(opened, tmp_path):
    """As many pixels of the run's colour as a line across the plot has, and fewer when the run is hidden."""
    page = opened(short(tmp_path / "run.jsonl"))
    count = f"""() => {{
      const {{ data, width }} = ({PIXELS})();
      let found = 0;
      for (let i = 0; i < data.length; i += 4) {{
        if (data[i + 3] > 100 && data[i + 2] > data[i] + 90) found += 1;
      }}
      return [found, width];
    }}"""
    found, width = page.evaluate(count)
    assert found > width / 2
    page.locator(".legend input").uncheck()
    page.wait_for_function(f"() => ({count})()[0] === 0")


def test_a_skipped_step_has_a_tick_at_the_top(opened, tmp_path):
    page = opened(short(tmp_path / "run.jsonl"))
    red = page.evaluate(f"""() => {{
      const {{ data, width }} = ({PIXELS})();
      const found = [];
      for (let i = 0; i < 20 * 4 * width; i += 4) {{
        if (data[i + 3] > 100 && data[i] > data[i + 2] + 90) found.push((i / 4) % width);
      }}
      return found;
    }}""")
    over = page.locator(".u-over").first
    left, width = over.evaluate("e => [e.offsetLeft, e.clientWidth]")
    assert len(red) >= 5
    assert [x == pytest.approx(left + 50 / 199 * width, abs=2) for x in red] == [True] * len(red)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_run_of_few_steps_opens(opened, tmp_path, steps):
    path = begun(tmp_path / "run.jsonl").path
    log_of(path, [record(i) for i in range(steps)])
    page = opened(read_run(path))
    expect(page.locator(".legend label")).to_contain_text(f"{steps} step")
    page.get_by_role("button", name="Zoom in").click()


def test_a_run_without_a_loss_or_a_number_opens(opened, tmp_path):
    rows = [record(i, loss=math.nan, grad_norm=math.nan, reason=Reason.NAN_GRADIENT) for i in range(20)]
    page = opened(read_run(log_of(tmp_path / "run.jsonl", rows)))
    point_at(page, plot(page, "Loss"), 0.5)
    expect(page.locator(".tip")).to_contain_text("NAN_GRADIENT: the step was skipped: a gradient holds NaN")
    expect(page.locator(".tip")).not_to_contain_text("loss")


def test_what_comes_from_a_log_is_shown_and_not_run(opened, tmp_path):
    rows = [record(i, worst=Worst(0, HOSTILE)) for i in range(3)]
    path = log_of(tmp_path / "run.jsonl", rows, settings={HOSTILE: HOSTILE}, versions={HOSTILE: HOSTILE})
    run = read_run(path)
    run.name = HOSTILE
    page = opened(run)
    point_at(page, plot(page, "Loss"), 0.5)
    visible = HOSTILE[: HOSTILE.index("\u2028")].strip()
    expect(page.locator(".tip")).to_contain_text(visible)
    expect(page.locator("h1")).to_contain_text(visible)
    expect(page.locator("img")).to_have_count(0)
    expect(page.locator("script")).to_have_count(2)


def test_the_themes_differ(opened, tmp_path):
    run = short(tmp_path / "run.jsonl")
    colours = []
    for scheme in ("light", "dark"):
        page = opened(run, color_scheme=scheme)
        colours.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert colours[0] != colours[1]


def test_the_plots_follow_a_change_of_the_theme(opened, tmp_path):
    page = opened(short(tmp_path / "run.jsonl"), color_scheme="light")
    picture = "document.querySelector('figure canvas').toDataURL()"
    before = page.evaluate(picture)
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(f"(before) => {picture} !== before", arg=before)


@pytest.mark.parametrize("width", [360, 400])
def test_a_narrow_window_needs_no_scrolling_to_the_side(opened, tmp_path, width):
    page = opened(short(tmp_path / "run.jsonl"), viewport={"width": width, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_settings_of_three_runs_fit_the_page(opened, tmp_path):
    settings = GuardConfig(clip=1.0, spike="skip", loss_scale="dynamic").to_dict()
    names = (f"run-with-a-long-name-{i}-seed-12345.jsonl" for i in range(3))
    runs = [read_run(log_of(tmp_path / name, [record(0)], settings=settings)) for name in names]
    page = opened(*runs, viewport={"width": 1000, "height": 740})
    assert page.locator(".scroll").last.evaluate("e => e.scrollWidth - e.clientWidth") == 0


def test_the_plots_fit_another_width(opened, tmp_path):
    page = opened(short(tmp_path / "run.jsonl"))
    page.set_viewport_size({"width": 500, "height": 700})
    page.wait_for_function(FITS)
    assert page.evaluate("document.documentElement.scrollWidth") <= 500


def test_the_tables_need_no_script(opened_file, tmp_path):
    file = tmp_path / "report.html"
    file.write_text(as_html([short(tmp_path / "run.jsonl")]), encoding="utf-8")
    page = opened_file(file, java_script_enabled=False)
    expect(page.locator("noscript p")).to_be_visible()
    expect(page.get_by_role("cell", name="NONFINITE_LOSS")).to_be_visible()


# --- zooming -----------------------------------------------------------------------------------------------


def test_dragging_across_one_plot_zooms_all(opened, tmp_path):
    page = opened(short(tmp_path / "run.jsonl"))
    drag(page, plot(page, "Gradient norm"), 0.25, 0.5)
    least, most = shown(page)
    assert (abs(least - 50) < 3, abs(most - 99) < 3) == (True, True)
    # The spike at 101 is outside: each plot has its own vertical axis for what is shown.
    before = page.evaluate("document.querySelectorAll('figure canvas')[0].toDataURL()")
    plot(page, "Loss").dblclick()
    assert shown(page) == (0, 199)
    assert page.evaluate("document.querySelectorAll('figure canvas')[0].toDataURL()") != before


def test_buttons_and_keys_zoom_and_move(opened, tmp_path):
    page = opened(short(tmp_path / "run.jsonl"))
    click = lambda name: page.get_by_role("button", name=name).click()  # noqa: E731
    click("Zoom in")
    assert shown(page) == (50, 149)
    click("Later steps")
    assert shown(page) == (75, 174)
    click("Later steps")
    click("Later steps")
    assert shown(page) == (100, 199)  # the end
    click("Zoom out")
    assert shown(page) == (0, 199)
    page.locator(".plots").focus()
    page.keyboard.press("+")
    assert shown(page) == (50, 149)
    page.keyboard.press("ArrowLeft")
    assert shown(page) == (25, 124)
    page.keyboard.press("0")
    assert shown(page) == (0, 199)
    for _ in range(20):
        page.keyboard.press("+")
    least, most = shown(page)
    assert most - least <= 2


def test_an_axis_is_logarithmic_or_not(opened, tmp_path):
    page = opened(short(tmp_path / "run.jsonl"))
    box = page.locator("figure", has_text="Gradient norm").get_by_role("checkbox")
    expect(box).to_be_checked()
    drag(page, plot(page, "Loss"), 0.25, 0.75)
    before = shown(page)
    canvas = "document.querySelectorAll('figure canvas')[1].toDataURL()"
    picture = page.evaluate(canvas)
    box.uncheck()
    page.wait_for_function(f"(picture) => {canvas} !== picture", arg=picture)
    assert shown(page) == before
    expect(page.locator("canvas")).to_have_count(4)


def test_values_that_have_no_logarithm_are_left_out(opened, tmp_path):
    """The line goes on over them, and not down to the bottom of the plot."""
    rows = [record(i, loss=10.0 ** (-3 * i / 199)) for i in range(200)]
    rows[100], rows[120] = record(100, loss=0.0), record(120, loss=-5.0)
    page = opened(read_run(log_of(tmp_path / "run.jsonl", rows)))
    box = page.locator("figure", has_text="Loss").first.get_by_role("checkbox")
    expect(box).not_to_be_checked()
    box.check()
    over = page.locator(".u-over").first
    left, top, width, height = over.evaluate(
        "e => [e.offsetLeft, e.offsetTop, e.clientWidth, e.clientHeight]"
    )
    found = page.evaluate(f"""async () => {{
      await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
      const {{ data, width }} = ({PIXELS})();
      const found = [];
      for (let i = 0; i < data.length; i += 4) {{
        const there = data[i + 3] > 100 && data[i + 2] > data[i] + 90;
        if (there) found.push([(i / 4) % width, Math.floor(i / 4 / width)]);
      }}
      return found;
    }}""")
    places = [((x - left) / width * 199, (y - top) / height) for x, y in found]  # by step, from the top down
    assert max(depth for step, depth in places if 90 < step < 130) < 0.75
    assert max(depth for step, depth in places if step > 190) > 0.9


# --- pointing ----------------------------------------------------------------------------------------------


def test_pointing_near_a_skip_says_why(opened, tmp_path):
    page = opened(short(tmp_path / "run.jsonl"))
    point_at(page, plot(page, "Loss"), 51 / 199)
    tip = page.locator(".tip")
    expect(tip).to_contain_text("step 50")
    expect(tip).to_contain_text("NONFINITE_LOSS: the step was skipped: the unscaled loss is NaN or inf")
    expect(tip).to_contain_text("loss not finite")
    expect(tip).to_contain_text("worst parameter: head")
    page.locator("figcaption b").first.hover()
    expect(tip).to_be_hidden()


def test_pointing_at_a_step_says_what_it_was(opened, tmp_path):
    page = opened(short(tmp_path / "run.jsonl"))
    point_at(page, plot(page, "Gradient norm"), 101 / 199)
    tip = page.locator(".tip")
    expect(tip).to_contain_text("step 101")
    expect(tip).to_contain_text("CLIPPED")
    expect(tip).to_contain_text("gradient norm 700 (clipped at 1)")
    expect(tip).to_contain_text("loss scale 2")
    point_at(page, plot(page, "Update"), 63 / 199)
    expect(tip).to_contain_text("update 0.001 (largest 0.25, head)")


def test_pointing_at_a_restart_says_so(opened, tmp_path):
    path = log_of(tmp_path / "run.jsonl", [record(i) for i in range(100)])
    begun(path).write([record(i, loss=1.5) for i in range(50, 100)])
    page = opened(read_run(path))
    point_at(page, plot(page, "Loss"), 50 / 99)
    expect(page.locator(".tip")).to_contain_text("started again")


def rewound(path: Path) -> Run:
    """Steps 60 to 89 were undone; of these, the loss rose from 70 on, and 80 to 89 were skipped."""
    bad = {
        "loss": math.nan,
        "grad_norm": math.nan,
        "reason": Reason.NONFINITE_LOSS,
        "worst": Worst(1, "head"),
    }
    rows = [record(i, loss=3.0 - i / 100 if i < 70 else i / 2) for i in range(80)]
    file = begun(path)
    file.write([*rows, *(record(i, **bad) for i in range(80, 90))])
    file.write([record(i, loss=2.4 - i / 100) for i in range(60, 100)])
    return read_run(path)


# How many grey pixels there are, to the left and to the right of step 82.
GREY = """() => {
  const { data, width } = (PIXELS)();
  const count = [0, 0];
  for (let i = 0; i < data.length; i += 4) {
    const grey = data[i + 3] === 255 && [data[i], data[i + 1], data[i + 2]].every((value) => value === 0x9a);
    count[Number((i / 4) % width > 0.83 * width)] += grey;
  }
  return count;
}""".replace("PIXELS", PIXELS)


def test_steps_that_were_undone_are_grey_and_can_be_pointed_at(opened, tmp_path):
    page = opened(rewound(tmp_path / "run.jsonl"))
    expect(page.locator(".legend")).to_contain_text(
        "100 steps · 0 skipped · 30 steps undone by a rewind, of which 10 were skipped"
    )
    expect(page.locator("figure", has_text="Loss").first).to_contain_text("grey: undone")
    line, ticks = page.evaluate(GREY)
    assert line > 100
    assert ticks > 50
    point_at(page, plot(page, "Loss"), 85 / 99)
    tip = page.locator(".tip")
    expect(tip).to_contain_text("loss 1.55")
    expect(tip).to_contain_text("before the run went back: loss not finite")
    expect(tip).to_contain_text("worst parameter: head, skipped for NONFINITE_LOSS")
    point_at(page, plot(page, "Loss"), 75 / 99)
    expect(tip).to_contain_text("before the run went back: loss 37.5, gradient norm 0.5")


WHY = Rewind("reported", 60, 89, "smoke came out", "Attempt 1: batches 60 to 189 left out")


def told(path: Path) -> Run:
    """As :func:`rewound`, and the log says why the run went back."""
    file = begun(path)
    file.write([record(i, loss=3.0 - i / 100 if i < 70 else i / 2) for i in range(90)])
    file.go_back(WHY, [record(i, loss=3.0 - i / 100) for i in range(60)])
    file.write([record(i, loss=2.4 - i / 100) for i in range(60, 100)])
    return read_run(path)


# Where a band is in a row of pixels at the bottom of the first plot, below its lines.
BAND = """() => {
  const { data, width } = (PIXELS)();
  const { offsetTop, offsetLeft, clientHeight, clientWidth } = document.querySelector(".u-over");
  const row = offsetTop + clientHeight - 3; // one pixel of the canvas is one of the page here
  const found = [];
  for (let x = offsetLeft + 1; x < offsetLeft + clientWidth; x++) {
    const alpha = data[4 * (row * width + x) + 3];
    if (alpha > 30 && alpha < 60) found.push(x);
  }
  return found;
}""".replace("PIXELS", PIXELS)


def test_a_rewind_is_a_band_that_says_why(opened, tmp_path):
    page = opened(told(tmp_path / "run.jsonl"))
    expect(page.locator(".legend")).to_contain_text("30 steps undone by a rewind")
    expect(page.locator(".legend")).to_contain_text("went back once")
    left, width = page.locator(".u-over").first.evaluate("e => [e.offsetLeft, e.clientWidth]")
    band = page.evaluate(BAND)
    assert band[0] == pytest.approx(left + 60 / 99 * width, abs=3)
    assert band[-1] == pytest.approx(left + 89 / 99 * width, abs=3)
    assert len(band) > 0.8 * (band[-1] - band[0])  # but for the lines of the grid
    tip = page.locator(".tip")
    said = "back from step 89 to step 60: smoke came out. Attempt 1: batches 60 to 189 left out"
    for step in (60, 75, 89):
        point_at(page, plot(page, "Gradient norm"), step / 99)
        expect(tip).to_contain_text(f"step {step}")
        expect(tip).to_contain_text(said)
    for step in (58, 91):
        point_at(page, plot(page, "Gradient norm"), step / 99)
        expect(tip).to_contain_text(f"step {step}")
        expect(tip).not_to_contain_text("back from")
    row = page.locator("tr", has_text="smoke came out")
    assert row.locator("td").all_inner_texts() == [
        "89", "60", "reported\nsmoke came out.", "Attempt 1: batches 60 to 189 left out."
    ]  # fmt: skip
    page.locator(".legend input").uncheck()
    page.wait_for_function(f"() => ({BAND})().length === 0")


def test_of_many_rewinds_the_last_are_told_at_a_step(opened, tmp_path):
    path = tmp_path / "run.jsonl"
    file = begun(path)
    for attempt in range(1, 6):
        file.write([record(i, loss=float(attempt)) for i in range(20)])
        file.go_back(Rewind("reported", 0, 19, "smoke", f"Attempt {attempt}: nothing"), [])
    file.write([record(i) for i in range(20)])
    page = opened(read_run(path))
    point_at(page, plot(page, "Loss"), 0.5)
    assert [text.split()[-2] for text in page.locator(".tip .why").all_inner_texts()] == ["3:", "4:", "5:"]


@pytest.mark.parametrize("width", [360, 1000])
def test_the_rewinds_fit_the_page(opened, tmp_path, width):
    page = opened(told(tmp_path / "run.jsonl"), viewport={"width": width, "height": 740})
    table = page.locator(".scroll", has_text="smoke came out")
    assert table.evaluate("e => e.scrollWidth - e.clientWidth") == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_run_of_which_no_step_is_left_opens(opened, tmp_path):
    file = begun(tmp_path / "run.jsonl")
    file.write([record(i) for i in range(20)])
    file.go_back(WHY._replace(first=0, last=19), [])
    page = opened(read_run(file.path))
    assert shown(page) == (0, 19)
    point_at(page, plot(page, "Loss"), 0.5)
    expect(page.locator(".tip")).to_contain_text("before the run went back: loss 2")
    expect(page.locator(".tip")).to_contain_text("back from step 19 to step 0: smoke came out")


def test_there_is_no_band_where_the_log_does_not_say_why(opened, tmp_path):
    page = opened(rewound(tmp_path / "run.jsonl"))
    assert page.evaluate(BAND) == []
    expect(page.get_by_role("heading", name="Rewinds")).to_have_count(0)
    point_at(page, plot(page, "Loss"), 60 / 99)
    expect(page.locator(".tip")).to_contain_text("went back to this step")


def test_nothing_is_grey_where_nothing_was_undone(opened, tmp_path):
    page = opened(short(tmp_path / "run.jsonl"))
    assert page.evaluate(GREY) == [0, 0]
    expect(page.locator("figure").first).not_to_contain_text("undone")


def test_a_skip_is_found_among_many_steps(opened, tmp_path):
    """At 100 steps in a pixel, the pointer cannot hit the one that was skipped."""
    run = read_run(long_log(tmp_path / "run.jsonl", 100_000))
    page = opened(run)
    i = run.skipped[len(run.skipped) // 2]
    point_at(page, plot(page, "Loss"), (run.steps[i] + 150) / 99_999)
    expect(page.locator(".tip")).to_contain_text(f"step {run.steps[i]:,}")
    expect(page.locator(".tip")).to_contain_text(run.reason[i].name)


def test_no_spike_is_lost_among_many_steps(opened, tmp_path):
    """The line of one step among 100,000 goes up to the top of the plot."""
    rows = [record(i, loss=1.0) for i in range(100_000)]
    rows[61_803] = record(61_803, loss=30.0)
    page = opened(read_run(log_of(tmp_path / "run.jsonl", rows)))
    heights = page.evaluate(f"""() => {{
      const {{ data, width, height }} = ({PIXELS})();
      const found = new Array(width).fill(0);
      for (let y = 0; y < height; y++) for (let x = 0; x < width; x++) {{
        const i = 4 * (y * width + x);
        if (data[i + 3] > 60 && data[i + 2] > data[i] + 60) found[x] += 1;
      }}
      return found;
    }}""")
    tall = [x for x, height in enumerate(heights) if height > 80]
    assert 1 <= len(tall) <= 3
    left = page.locator(".u-over").first.evaluate("e => e.offsetLeft")
    width = page.locator(".u-over").first.evaluate("e => e.clientWidth")
    assert tall[0] == pytest.approx(left + 0.61803 * width, abs=3)


# --- several runs ------------------------------------------------------------------------------------------


def test_runs_over_one_another(opened, tmp_path):
    a = short(tmp_path / "a.jsonl")
    b = read_run(log_of(tmp_path / "b.jsonl", [record(i, loss=1.0) for i in range(100, 300, 2)]))
    page = opened(a, b)
    expect(page.locator("h1")).to_have_text("a.jsonl, b.jsonl")
    assert shown(page) == (0, 298)
    orange = page.evaluate(f"""() => {{
      const {{ data, width }} = ({PIXELS})();
      let least = width;
      for (let i = 0; i < data.length; i += 4) {{
        if (data[i + 3] > 100 && data[i] > data[i + 2] + 90) least = Math.min(least, (i / 4) % width);
      }}
      return least;
    }}""")
    left, width = page.locator(".u-over").first.evaluate("e => [e.offsetLeft, e.clientWidth]")
    assert orange == pytest.approx(left + 100 / 298 * width, abs=6)
    tip = page.locator(".tip")
    point_at(page, plot(page, "Loss"), 150 / 298)
    expect(tip).to_contain_text("a.jsonl")
    expect(tip).to_contain_text("b.jsonl")
    point_at(page, plot(page, "Loss"), 20 / 298)
    expect(tip).not_to_contain_text("b.jsonl")
    page.get_by_role("checkbox", name="a.jsonl").uncheck()
    point_at(page, plot(page, "Loss"), 150 / 298)
    expect(tip).not_to_contain_text("a.jsonl")
    expect(tip).to_contain_text("b.jsonl")
