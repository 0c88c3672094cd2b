"""The results of a comparison as one self-contained page: all verdicts, and the plots of every scenario."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files

from stablenum._support.outside_text import in_html, in_script
from stablenum.commands.compare.agreement import Trace
from stablenum.commands.compare.backends import REFERENCE, Backend
from stablenum.commands.compare.page_data import drawn_runs
from stablenum.commands.compare.report import notes, problems, summary
from stablenum.commands.compare.runner import Result
from stablenum.commands.compare.scenarios import Training
from stablenum.commands.run_plots.page_data import plotted
from stablenum.commands.run_plots.script import script, style
from stablenum.diagnosis.report.html import listed, page, sealed_head
from stablenum.guard.reasons import EXPLANATIONS, Reason

__all__ = ["as_html"]

_TITLE = "The same training without and with a guard, on every backend"
_HELP = """<p class="soft hint">The blue line is the run with the guard: a single line for all backends that
agree, and one more for each that does not. Red is the run without a guard. A line ends where values are no
longer finite. A <span class="tick">tick</span> at the top is a skipped step: point at it to see why. Drag
across a plot to zoom, double-click to see the whole run.</p>"""
_FOOT = """<footer>Written by <code>stablenum compare</code>.
Plots by <a href="https://github.com/leeoniya/uPlot">uPlot</a>.</footer></main>"""


def as_html(
    results: Sequence[Result],
    backends: Sequence[Backend],
    absent: Mapping[str, list[str]],
    unfit: Mapping[str, str],
) -> str:
    """Return the whole page; everything that comes from a scenario is escaped.

    Args: as for :func:`stablenum.commands.compare.report.print_report`.
    """
    data = plotted([]) | {"scenarios": [drawn_runs(result) for result in results]}
    code = script(_asset("page.js"))
    trained = [r for r in results if isinstance(r.scenario, Training) and r.clean]
    body = [
        '<main class="compare">',
        f"<h1>{_TITLE}</h1>",
        f"<p>{in_html(summary(results, backends))}</p>",
        *(f'<p class="no">{in_html(line)}</p>' for line in problems(results)),
        _verdicts(results, backends),
        _accuracies(trained),
        listed("Notes", tuple(notes(results, absent, unfit))),
        "<h2>Scenarios</h2>",
        _HELP,
        '<noscript><p class="soft">The plots need JavaScript; the rest of the page does not.</p></noscript>',
        *(_scenario(k, result) for k, result in enumerate(results)),
        _FOOT,
        f'<script type="application/json" id="data">{in_script(data)}</script>',
        f"<script>{code}</script>",
    ]
    text = page(_TITLE, body, head=sealed_head(code, style() + _asset("page.css")))
    return text.encode("utf-8", "replace").decode("utf-8")  # a lone surrogate cannot be written


def _asset(name: str) -> str:
    return files("stablenum.commands.compare").joinpath("assets", name).read_text(encoding="utf-8")


# ---------------------------------------------------------------------------------------- tables


def _verdicts(results: Sequence[Result], backends: Sequence[Backend]) -> str:
    names = [b.name for b in backends]
    head = "".join(f"<th>{name}</th>" for name in ("scenario", "without", "with a guard", "skipped", *names))
    rows = (
        f'<tr><td><a href="#scenario-{k}">{in_html(r.scenario.name)}</a></td>'
        f"<td>{_outcomes(r, r.plain)}</td><td>{_outcomes(r, r.guarded)}</td>"
        f'<td class="number">{r.guarded[REFERENCE].skipped:,} of {len(r.guarded[REFERENCE].rows):,}</td>'
        f"{''.join(_agreement(r, name) for name in names)}</tr>"
        for k, r in enumerate(results)
    )
    return (
        '<p class="soft">Each backend is compared with NumPy step by step: ✓ means equal decisions, with the '
        "largest relative difference of norms and parameters; – means that the backend was left out (see the "
        f'notes).</p><div class="scroll"><table class="verdicts"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _outcomes(result: Result, traces: Mapping[str, Trace]) -> str:
    found = sorted({result.outcome(trace) for trace in traces.values()})
    return " / ".join(f'<span class="{outcome}">{outcome}</span>' for outcome in found)


def _agreement(result: Result, backend: str) -> str:
    if backend in result.left_out:
        return f'<td class="soft" title="{in_html(result.left_out[backend])}">–</td>'
    if backend not in result.comparisons:
        return '<td class="soft">reference</td>'
    comparison = result.comparisons[backend]
    if comparison.disagreement is not None:
        return f'<td class="no" title="{in_html(str(comparison.disagreement))}">✗ disagrees</td>'
    worst = max(comparison.worst_norm, comparison.worst_params)
    return f'<td class="number"><span class="yes">✓</span> {f"{worst:.0e}" if worst else "0"}</td>'


def _accuracies(results: Sequence[Result]) -> str:
    if not results:
        return ""
    head = "<th>scenario</th><th>without a guard</th><th>with the guard</th><th>no bad batches</th>"
    rows = (
        f"<tr><td>{in_html(r.scenario.name)}</td>"
        + "".join(f'<td class="number">{_percent(runs)}</td>' for runs in (r.plain, r.guarded, r.clean))
        + "</tr>"
        for r in results
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f'<h2>Accuracy on held-out digits, over all backends</h2><div class="scroll">{table}</div>'


def _percent(runs: Mapping[str, Trace]) -> str:
    scores = [100 * trace.score for trace in runs.values() if trace.score is not None]
    least, most = f"{min(scores):.1f}", f"{max(scores):.1f}"
    return f"{least} %" if least == most else f"{least} to {most} %"


# ------------------------------------------------------------------------------------- scenarios


def _scenario(k: int, result: Result) -> str:
    scenario, runs = result.scenario, drawn_runs(result)
    verdict = f"{_outcomes(result, result.plain)} without, {_outcomes(result, result.guarded)} with a guard"
    label = in_html(f"Plots of {scenario.name} over its steps")
    return "\n".join(
        [
            f'<section class="scenario" id="scenario-{k}">',
            f"<h3>{in_html(scenario.name)}<small>{verdict}</small></h3>",
            f"<p>{in_html(scenario.about)}</p>",
            *(f'<p class="soft">{line}</p>' for line in _skips(result)),
            '<fieldset class="legend"><legend class="unseen">Runs</legend>',
            *(_choice(i, run["name"], bare="bare" in run) for i, run in enumerate(runs)),
            "</fieldset>",
            f'<div class="plots" data-height="170" tabindex="0" role="group" aria-label="{label}"></div>',
            "</section>",
        ]
    )


def _choice(i: int, name: str, *, bare: bool) -> str:
    kind = "bare" if bare else f"run-{i % 8}"
    return (
        f'<label class="run {kind}"><input type="checkbox" checked data-run="{i}">'
        f'<span class="swatch"></span>{in_html(name)}</label>'
    )


def _skips(result: Result) -> Iterator[str]:
    """Yield a line for each reason for which the guard skipped steps, as HTML."""
    trace = result.guarded[REFERENCE]
    steps: dict[Reason, list[int]] = {}
    for number, row in enumerate(trace.rows):
        if not row.applied:
            steps.setdefault(row.reason, []).append(number)
    for reason, at in steps.items():
        what = in_html(EXPLANATIONS[reason].what)
        yield f"Skipped: {_ranges(at)} (<code>{reason.name}</code>: {what})."
    if trace.stopped is not None:
        yield f"Stopped: {in_html(trace.stopped)}"


def _ranges(steps: Sequence[int]) -> str:
    """Return steps as ranges, the first few of them."""
    firsts = [i for i in steps if i - 1 not in set(steps)]
    lasts = [i for i in steps if i + 1 not in set(steps)]
    parts = [str(a) if a == b else f"{a} to {b}" for a, b in zip(firsts, lasts, strict=True)]
    shown = parts if len(parts) <= 8 else [*parts[:8], "…"]
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(shown)}"
