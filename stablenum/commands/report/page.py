"""The logs of runs as one self-contained page: plots over the steps, skips, parameters and settings."""

from __future__ import annotations

from collections.abc import Sequence

from stablenum._support.outside_text import in_html, in_script
from stablenum.commands.report.tables import (
    rewinds_table,
    settings_table,
    skips_table,
    summary,
    worst_table,
)
from stablenum.commands.run_plots.page_data import MOST, plotted, plotted_run
from stablenum.commands.run_plots.script import script, style
from stablenum.diagnosis.report.html import page, sealed_head
from stablenum.runlog.reading import Run

__all__ = ["as_html", "is_own"]

_MARK = '<meta name="generator" content="stablenum report">'

_MAIN = 'drawRuns(JSON.parse(document.getElementById("data").textContent), document);'
_CONTROLS = """<div class="controls">
<div class="buttons" role="group" aria-label="Steps shown">
<button data-action="all">Whole run</button>
<button data-action="in">Zoom in</button><button data-action="out">Zoom out</button>
<button data-action="back" aria-label="Earlier steps">◀</button>
<button data-action="on" aria-label="Later steps">▶</button></div>
<output class="range"></output></div>"""
_HELP = """<p class="soft hint">Drag across a plot to zoom, double-click to see the whole run,
or use the keys <kbd>+</kbd> <kbd>-</kbd> <kbd>←</kbd> <kbd>→</kbd> <kbd>0</kbd> on the plots.
A <span class="tick">tick</span> at the top is a skipped step: point at it to see why.
What is grey was undone: the run went back and took these steps again.{lines}{bands}</p>"""
_LINES = """
A <span class="line">dashed line</span> is at the first step that was written after the run was started again
or went back. It may have gone on from an earlier one: steps that came out as before are not written twice;
or from a later one: a checkpoint brings back steps that a killed process had not written."""
_BANDS = '\nPoint at a <span class="band">grey band</span> to see why.'
_THINNED = f"""<p class="soft hint">Of runs with more than {MOST:,} steps not every step is drawn: in each of
5,000 stretches the first and the last, those with the smallest and the largest loss, gradient norm and loss
scale, and the first and the last skipped one. The tables count all.</p>"""
_FOOT = """<footer>Written by <code>stablenum report</code>.
Plots by <a href="https://github.com/leeoniya/uPlot">uPlot</a>.</footer></main>"""


def as_html(runs: Sequence[Run]) -> str:
    """Return the whole page; everything that comes from the logs is escaped."""
    code = script(_MAIN)
    data = in_script(plotted([plotted_run(run) for run in runs]))
    told = any(run.events for run in runs)
    lines = any(run.restarts or run.rewinds for run in runs)
    title = ", ".join(run.name for run in runs)
    body = [
        '<main class="runs">',
        f"<h1>{in_html(title)}</h1>",
        '<fieldset class="legend"><legend class="unseen">Runs</legend>',
        *(_choice(i, run) for i, run in enumerate(runs)),
        "</fieldset>",
        '<noscript><p class="soft">The plots need JavaScript; the tables below do not.</p></noscript>',
        _CONTROLS,
        '<div class="plots" tabindex="0" role="group" aria-label="Plots over the steps"></div>',
        _THINNED if any(len(run) > MOST for run in runs) else "",
        _HELP.format(lines=_LINES if lines else "", bands=_BANDS if told else ""),
        f"<h2>Rewinds</h2>{rewinds_table(runs)}" if told else "",
        f"<h2>Skipped steps</h2>{skips_table(runs)}",
        f"<h2>Worst parameters</h2>{worst_table(runs)}",
        f"<h2>Settings and versions</h2>{settings_table(runs)}",
        _FOOT,
        f'<script type="application/json" id="data">{data}</script>',
        f"<script>{code}</script>",
    ]
    return page(title, body, head=_MARK + sealed_head(code, style()))


def is_own(text: str) -> bool:
    """Return whether a file begins as such a page does."""
    return _MARK in text


def _choice(i: int, run: Run) -> str:
    return (
        f'<label class="run run-{i % 8}"><input type="checkbox" checked data-run="{i}"><span class="swatch">'
        f"</span><b>{in_html(run.name)}</b> <small>{summary(run)}</small></label>"
    )
