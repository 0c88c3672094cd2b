"""How a report is shown: every form has the same content, and the user's code is escaped."""

from __future__ import annotations

import io
import json
import math
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from rich.console import Console

from stablenum.diagnosis import Finding, Place, Report, TensorStats
from stablenum.diagnosis.replay.judge import Evidence
from stablenum.diagnosis.replay.source_files import lines_around

HOSTILE = "<script>alert('1')</script> & [bold red]x[/] \x1b[0m"


def stats(**more: Any) -> TensorStats:
    plain = {"dtype": "float32", "shape": (2, 3), "size": 6, "min": 0.0, "max": 1.5, "amax": 1.5}
    return TensorStats(**(plain | more))


def log_of_zero(**more: Any) -> Finding:
    lines = [
        Place("train.py", 30, "<module>", "step(x)"),
        Place("model.py", 7, "forward", "return x.log().mean()"),
    ]
    plain: dict[str, Any] = {
        "operation": "log",
        "phase": "forward",
        "kind": "inf",
        "primitive": "aten.log.default",
        "module": "net.head",
        "place": lines[-1],
        "frames": tuple(lines),
        "inputs": (stats(zero=2, name="x"),),
        "outputs": (stats(min=-1.0, neginf=2),),
    }
    return Finding(**(plain | more))


def report_of(*findings: Finding, **more: Any) -> Report:
    rest = {k: more.pop(k) for k in ("notes", "seconds") if k in more}
    evidence = {"framework": "torch", "findings": findings, "loss_finite": False} | more
    return Report.of(Evidence(**evidence), **rest)


def shown(report: Report, width: int = 100, colour: bool = False) -> str:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=colour, legacy_windows=False).print(report)
    return out.getvalue()


class Page(HTMLParser):
    """Checks that tags are closed in order; collects the text and all references out of the page."""

    VOID = ("meta", "!doctype")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.text = ""
        self.reaching: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.reaching += [name for name, _ in attrs if name in ("src", "href", "srcset") or name[:2] == "on"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += data


# ---------------------------------------------------------------------------------- text


def test_the_first_named_place_is_the_first_cause():
    other = log_of_zero(operation="sqrt", place=Place("other.py", 9))
    text = str(report_of(log_of_zero(), other))
    assert re.search(r"(\S+\.py):(\d+)", text).groups() == ("model.py", "7")
    assert text.splitlines()[:2] == [
        "model.py:7: log gives -inf (forward, in net.head)",
        "    return x.log().mean()",
    ]
    assert "Later: other.py:9: sqrt gives -inf" in text


def test_the_statistics_stand_below_one_another():
    lines = str(report_of(log_of_zero())).splitlines()
    assert lines[2] == "  in   x float32[2, 3]  in [0, 1.5]   2 zero"
    assert lines[3] == "  out  float32[2, 3]    in [-1, 1.5]  2 -inf"


def test_all_parts_are_there_and_nothing_twice():
    text = str(report_of(log_of_zero(), reproduced=True, notes=("compiled modules ran eagerly",)))
    for part in (
        "Cause: domain. The function was called at or beyond the edge",
        "  - a second run failed in the same way",
        "Remedy: Use its safe form.\n    stablenum_torch.numerics.log(x)",
        "Called from\n  train.py:30  <module>  step(x)\n  model.py:7   forward   return x.log().mean()",
        "Note: Compiled modules ran eagerly.",
    ):
        assert text.count(part) == 1, text
    assert text.count("2 zero") == 1


def test_a_report_fits_on_a_screen():
    frames = tuple(Place(f"file{i}.py", i, "f" * 10, "g()") for i in range(60))
    tensors = tuple(stats(name=f"t{i}") for i in range(60))
    crowded = log_of_zero(frames=frames, inputs=tensors, outputs=tensors)
    report = report_of(
        *[crowded] * 60,
        notes=("a note " * 30,) * 20,
        bad_gradients=tuple(f"layer{i}.weight" for i in range(500)),
    )
    text = str(report)
    assert len(text.splitlines()) <= 50
    assert max(map(len, text.splitlines())) <= 92
    assert "and 56 more" in text
    assert len(report.to_html()) < 30_000


@pytest.mark.parametrize("width", [91, 92, 93])
def test_a_line_of_code_is_cut_beyond_92_columns(width):
    call = Place("train.py", 30, "f", "x" * (width - len("  train.py:30  f  ")))
    lines = str(report_of(log_of_zero(frames=(call, call)))).splitlines()
    line = f"  train.py:30  f  {call.code}"
    assert len(line) == width
    assert lines[lines.index("Called from") + 1] == (line if width <= 92 else f"{line[:89]}...")


def test_sentences_are_wrapped_at_92_columns():
    lines = str(report_of(log_of_zero(), notes=("a " * 200,))).splitlines()
    note = lines[next(i for i, line in enumerate(lines) if line.startswith("Note: ")) :]
    assert len(note) > 2
    # One more word, of a letter, would not fit.
    assert {len(line) for line in note[:-1]} <= {91, 92}


def test_a_report_without_findings_is_one_line():
    report = Report.of(Evidence(framework="jax", loss_finite=True))
    assert report.ok
    assert str(report).startswith("Nothing wrong: loss, gradients and parameters are finite")
    assert len(str(report).splitlines()) == 1
    assert " ".join(shown(report).split()) == " ".join(str(report).split())


@pytest.mark.parametrize(
    "report",
    [
        report_of(reproduced=False),
        report_of(labels="7 is not one of 5 classes"),
        report_of(log_of_zero(place=None, frames=())),
        report_of(log_of_zero(inputs=(), outputs=())),
        report_of(loss_finite=True, bad_updates=("w",)),
        report_of(log_of_zero(operation="input", phase="before", kind="nan", name="batch", inputs=())),
    ],
)
def test_a_report_with_parts_missing_is_shown(report):
    text = str(report)
    assert text == text.strip()
    assert "\n\n\n" not in text
    assert f"Cause: {report.verdict.cause.value}" in text
    for form in (shown(report), Page(report.to_html()).text):
        assert report.verdict.cause.value in form


# ---------------------------------------------------------------------------------- valid and harmless

NOT_FINITE = stats(min=math.nan, max=math.nan, amax=math.inf, nan=6, values=(math.nan, math.inf, -math.inf))


def test_statistics_that_are_not_finite_stay_valid_and_come_back():
    report = report_of(
        log_of_zero(inputs=(NOT_FINITE,), outputs=(stats(shape=(), size=0),)),
        loss_scale=math.inf,
        bad_gradients=("w",),
        seconds=0.5,
    )

    def reject(constant: str) -> None:
        raise AssertionError(f"not strict JSON: {constant}")

    plain = json.loads(report.to_json(), parse_constant=reject)
    back = Report.from_dict(plain)
    assert back.to_json() == report.to_json()
    assert str(back) == str(report)
    assert back.verdict == report.verdict
    assert "6 NaN" in str(report)
    assert "[nan" not in str(report)
    assert "6 NaN" in Page(report.to_html()).text


def test_the_page_is_valid_and_self_contained():
    text = report_of(log_of_zero(), seconds=1.25, notes=("replayed eagerly",)).to_html()
    page = Page(text)
    assert not page.open
    assert not page.reaching
    assert page.tags.isdisjoint({"script", "link", "img", "iframe", "object"})
    assert "http" not in text
    assert "url(" not in text
    assert "prefers-color-scheme: dark" in text
    for part in ("model.py:7", "return x.log().mean()", "domain", "2 -inf", "Replayed eagerly.", "1.2 s"):
        assert part in page.text


@pytest.mark.parametrize(
    ("report", "title"),
    [
        (Report.of(Evidence(framework="jax", loss_finite=True)), "Nothing wrong"),
        (report_of(log_of_zero()), "model.py:7: log gives -inf (forward, in net.head)"),
        (report_of(labels="7 is not one of 5 classes"), "Cause: labels"),
    ],
)
def test_the_title_of_the_page_says_what_was_found(report, title):
    assert f"<title>{title}</title>" in report.to_html()


def hostile() -> Report:
    place = Place(f"{HOSTILE}.py", 3, HOSTILE, HOSTILE)
    finding = log_of_zero(
        place=place,
        frames=(place, place),
        module=HOSTILE,
        where=HOSTILE,
        primitive=HOSTILE,
        name=HOSTILE,
        inputs=(stats(name=HOSTILE),),
        operation=HOSTILE,
    )
    return report_of(finding, finding, notes=(HOSTILE,), bad_gradients=(HOSTILE,), labels=HOSTILE)


def test_the_users_code_is_escaped_in_the_page():
    text = hostile().to_html()
    page = Page(text)
    assert "<script" not in text
    assert "script" not in page.tags
    assert "alert('1')</script> & [bold red]x" in page.text
    assert "&lt;iframe" not in text
    frame = hostile()._repr_html_()
    assert frame.count("<") == 2
    assert Page(frame).tags == {"iframe"}


def test_the_users_code_is_escaped_in_the_terminal():
    report = hostile()
    for text in (str(report), shown(report), report.to_html()):
        assert "\x1b" not in text
        assert "[bold red]x[/]" in text


def test_the_terminal_shows_the_same_as_the_text():
    report = report_of(log_of_zero(), log_of_zero(operation="sqrt"), notes=("a note",))
    words = [re.sub(r"\s+", "", form) for form in (shown(report, 140), str(report))]
    assert words[0] == words[1]
    assert "\x1b[" in shown(report, colour=True)
    assert "domain" in shown(report, width=30)


@pytest.mark.parametrize(
    "report",
    [
        report_of(log_of_zero(), notes=("a note", "another note")),
        report_of(log_of_zero(), log_of_zero(operation="sqrt")),
        report_of(log_of_zero(inputs=(), outputs=())),
        report_of(log_of_zero(place=None)),
        report_of(log_of_zero(), reproduced=True),
    ],
)
def test_a_wide_terminal_shows_the_lines_of_the_text(report):
    """The indents and the blank lines between the parts are the same, too."""
    assert [line.rstrip() for line in shown(report, 140).splitlines()] == str(report).splitlines()


def test_a_narrow_terminal_wraps_the_code_and_cuts_nothing_off():
    code = "return " + " + ".join(f"term{i}" for i in range(12))
    lines = shown(report_of(log_of_zero(place=Place("model.py", 7, "forward", code))), width=40).splitlines()
    assert max(map(len, lines)) <= 40
    assert code in " ".join(" ".join(lines).split())


@pytest.mark.parametrize("suffix", [".html", ".json", ".txt", ".HTML"])
def test_the_suffix_chooses_the_saved_format(tmp_path, suffix):
    report = report_of(log_of_zero())
    target = tmp_path / f"report{suffix}"
    report.save(target)
    text = target.read_text(encoding="utf-8")
    forms = {".html": report.to_html(), ".json": report.to_json(), ".txt": str(report)}
    assert text.rstrip("\n") == forms[suffix.lower()].rstrip("\n")
    assert text.endswith("\n")


def test_another_suffix_is_rejected(tmp_path):
    with pytest.raises(ValueError, match=r"\.html, \.json or \.txt; got .*report\.pdf"):
        report_of(log_of_zero()).save(tmp_path / "report.pdf")
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------------- source and frames


def test_the_line_is_shown_between_its_neighbours(tmp_path):
    file = tmp_path / "model.py"
    file.write_text("def forward(x):\n    y = x - x\n    return y.log()\n\n\nz = 1\n", encoding="utf-8")

    def at(place: Place) -> Finding:
        return log_of_zero(place=place, around=lines_around(place))

    report = report_of(at(Place(str(file), 2, "forward", "y = x - x")))
    lines = str(report).splitlines()
    assert lines[1:4] == ["    1  def forward(x):", "  > 2      y = x - x", "    3      return y.log()"]
    for form in (shown(report, width=200), Page(report.to_html()).text):
        assert "def forward(x):" in form
        assert "return y.log()" in form
    file.unlink()  # the report has kept the lines
    assert str(Report.from_dict(json.loads(report.to_json()))) == str(report)
    file.write_text("def forward(x):\n    y = x - x\n    return y.log()\n\n\nz = 1\n", encoding="utf-8")
    # The last line of a block has no neighbour below.
    last = report_of(at(Place(str(file), 6, "<module>", "z = 1")))
    assert str(last).splitlines()[1] == "  > 6  z = 1"
    # A file that has changed since is not shown: its lines are others.
    changed = report_of(at(Place(str(file), 3, "forward", "y = x - x")))
    assert str(changed).splitlines()[1] == "    y = x - x"


def test_a_place_and_its_function_are_never_cut():
    long = Place("/" + "a" * 100 + "/train.py", 30, "a_function_with_a_long_name", "x = f(x)")
    report = report_of(log_of_zero(frames=(long, Place("b.py", 1, "g", "y"))))
    text = str(report)
    assert f"  {long}  a_function_with_a_long_name\n" in text
    narrow = re.sub(r"\s", "", shown(report, width=60))
    assert f"{long}a_function_with_a_long_namex=f(x)" in narrow


def test_the_users_own_frames_stay_when_a_library_has_many():
    own = [Place(f"own{i}.py", i, "f", "g()") for i in range(2)]
    library = [Place(f"/lib/python3/site-packages/timm/block{i}.py", i, "forward", "h()") for i in range(20)]
    text = str(report_of(log_of_zero(frames=(*own, *library))))
    called = text[text.index("Called from") :]
    assert called.count(".py:") == 6
    assert "own0.py:0" in called
    assert "own1.py:1" in called
    assert called.index("own0.py") < called.index("own1.py") < called.index("block19.py")


def test_the_shard_is_in_every_form_and_comes_back():
    """So is the rank of a process, which is a number as well, and the way to the others."""
    finding = log_of_zero(shard="rank 3", rank=3, spread=("all_reduce (line 9)",))
    report = report_of(finding)
    assert str(finding) == "model.py:7: log gives -inf (forward, in net.head) on rank 3"
    assert "from rank 3 it spread through all_reduce (line 9)" in report.verdict.evidence
    for form in (str(report), shown(report), report.to_html()):
        assert "on rank 3" in form
        assert "from rank 3 it spread through all_reduce (line 9)" in form
    found = json.loads(report.to_json())["evidence"]["findings"][0]
    assert (found["shard"], found["rank"], found["spread"]) == ("rank 3", 3, ["all_reduce (line 9)"])
    assert Report.from_dict(json.loads(report.to_json())).findings == (finding,)
