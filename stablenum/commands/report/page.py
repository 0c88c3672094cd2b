"""The logs of runs as one self-contained page: plots over the steps, skips, parameters and settings.

uPlot draws the plots on canvases: a dense line is reduced to its extremes in each column of pixels, so that
no spike is lost at any zoom.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files

from stablenum.commands.report.page_data import payload
from stablenum.commands.report.tables import settings_table, skips_table, summary, worst_table
from stablenum.diagnosis.report.html import page, sealed_head
from stablenum.runlog.reading import Run

__all__ = ["as_html", "is_own"]

SCRIPTS = ("data", "plots", "view", "tip", "start")
_MARK = '<meta name="generator" content="stablenum report">'

_CONTROLS = """<div id="controls">
<div class="buttons" role="group" aria-label="Steps shown">
<button id="all">Whole run</button><button id="in">Zoom in</button><button id="out">Zoom out</button>
<button id="back" aria-label="Earlier steps">◀</button>
<button id="on" aria-label="Later steps">▶</button></div>
<output id="range"></output></div>"""
_HELP = """<p class="soft hint">Drag across a plot to zoom, double-click to see the whole run,
or use the keys <kbd>+</kbd> <kbd>-</kbd> <kbd>←</kbd> <kbd>→</kbd> <kbd>0</kbd> on the plots.
A <span class="tick">tick</span> at the top is a skipped step: point at it to see why.
What is grey was undone: the run went back and took these steps again.</p>"""
_FOOT = """<footer>Written by <code>stablenum report</code>.
Plots by <a href="https://github.com/leeoniya/uPlot">uPlot</a>.</footer></main>"""


def as_html(runs: Sequence[Run]) -> str:
    """Return the whole page; everything that comes from the logs is escaped."""
    script = _script()
    title = ", ".join(run.name for run in runs)
    body = [
        '<main class="runs">',
        f"<h1>{escape(title)}</h1>",
        '<fieldset id="legend"><legend class="unseen">Runs</legend>',
        *(_choice(i, run) for i, run in enumerate(runs)),
        "</fieldset>",
        '<noscript><p class="soft">The plots need JavaScript; the tables below do not.</p></noscript>',
        _CONTROLS,
        '<div id="plots" tabindex="0" role="group" aria-label="Plots over the steps"></div>',
        _HELP,
        f"<h2>Skipped steps</h2>{skips_table(runs)}",
        f"<h2>Worst parameters</h2>{worst_table(runs)}",
        f"<h2>Settings and versions</h2>{settings_table(runs)}",
        _FOOT,
        f'<script type="application/json" id="data">{payload(runs)}</script>',
        f"<script>{script}</script>",
    ]
    text = page(title, body, head=_MARK + sealed_head(script, _asset("uplot.css") + _asset("page.css")))
    return text.encode("utf-8", "replace").decode("utf-8")  # a lone surrogate cannot be written


def is_own(text: str) -> bool:
    """Return whether a file begins as such a page does."""
    return _MARK in text


def _choice(i: int, run: Run) -> str:
    return (
        f'<label class="run run-{i % 8}"><input type="checkbox" checked data-run="{i}"><span class="swatch">'
        f"</span><b>{escape(run.name)}</b> <small>{summary(run)}</small></label>"
    )


def _script() -> str:
    parts = "\n".join(_asset(f"{name}.js") for name in SCRIPTS)
    return f'{_asset("uplot.js")}\n(() => {{\n"use strict";\n{parts}}})();'


def _asset(name: str) -> str:
    return files("stablenum.commands.report").joinpath("assets", name).read_text(encoding="utf-8")
