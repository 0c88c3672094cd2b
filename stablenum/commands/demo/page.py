"""The demo as one self-contained page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from stablenum._support.outside_text import in_html
from stablenum.commands.demo.picture import svg_of
from stablenum.commands.demo.story import agreement, events, outcome
from stablenum.commands.demo.tour import BACKENDS, SHOWN, Shown, Tour
from stablenum.commands.demo.training import Training
from stablenum.diagnosis.report.html import page, sealed_head

__all__ = ["as_html"]

_TITLE = "stablenum in two minutes"
_FOOT = """<footer>Written by <code>stablenum demo</code>. <code>stablenum demo --scripts DIR</code> writes
the scripts, to try the commands yourself.</footer>"""
_STYLE = """
.pictures { display: flex; flex-wrap: wrap; gap: 1rem; }
.pictures figure { flex: 1 1 20rem; min-width: 0; margin: 0; background: #fff; border-radius: .3rem; }
.pictures svg { width: 100%; height: auto; display: block; }
pre.output { overflow-x: auto; }
h2 code { text-transform: none; letter-spacing: 0; }
"""


def as_html(tour: Tour) -> str:
    """Return the whole page."""
    body = [
        f"<main><h1>{_TITLE}</h1>",
        *_trainings(tour.trainings),
        *(part for shown in SHOWN if shown.line in tour.outputs for part in _command(shown, tour)),
        *(f'<p class="soft">Not shown: {in_html(why)}</p>' for why in tour.failed),
        f"{_FOOT}</main>",
    ]
    return page(_TITLE, body, head=sealed_head("", _STYLE))


def _trainings(trainings: Mapping[str, Training]) -> Iterator[str]:
    if not trainings:
        return
    yield "<h2>A run that dies, and the same run with a guard</h2>"
    yield f"<p>{in_html(outcome(trainings))}</p>"
    pictures = (f"<figure>{svg_of(t, BACKENDS[name][1])}</figure>" for name, t in trainings.items())
    yield f'<div class="pictures">{"".join(pictures)}</div>'
    yield "<h2>The same decisions in both frameworks</h2>" if len(trainings) > 1 else "<h2>The decisions</h2>"
    yield f"<p>{in_html(agreement(trainings))}</p>"
    head = "".join(f"<th>{BACKENDS[name][1]}</th>" for name in trainings)
    rows = "".join(
        f'<tr><td class="number">{step}</td>{"".join(f"<td>{in_html(c)}</td>" for c in cells)}</tr>'
        for step, cells in events(trainings)
    )
    yield f'<div class="scroll"><table><tr><th>step</th>{head}</tr>{rows}</table></div>'


def _command(shown: Shown, tour: Tour) -> Iterator[str]:
    line, about = shown.line, shown.about
    yield f"<h2><code>{in_html(line)}</code></h2><p>{in_html(about)}</p>"
    yield f'<pre class="output">{in_html(tour.outputs[line])}</pre>'
