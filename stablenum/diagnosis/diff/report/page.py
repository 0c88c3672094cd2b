"""A comparison as one self-contained page: verdict, plot, both programs side by side, and weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from importlib.resources import files

from stablenum._support.outside_text import in_html
from stablenum.diagnosis.diff.differences import Cause, Difference, Location, Off
from stablenum.diagnosis.diff.report.page_data import payload
from stablenum.diagnosis.diff.report.rendering import (
    Shown,
    amount,
    headline,
    several,
    title,
    weights_title,
    within,
)
from stablenum.diagnosis.edits.fix import Fix
from stablenum.diagnosis.report.html import listed, page, sealed_head

__all__ = ["as_html"]

SCRIPTS = ("data", "tree", "detail", "grid", "keys", "filters", "plot", "weights", "start")
STATES = {"different": "≠", "follows": "↳", "unmatched": "∘", "rounding": "≈", "equal": "="}
PHASES = ("forward", "backward", "update")


def as_html(report: Shown) -> str:
    """Return the whole page; everything that comes from the users' code is escaped."""
    script = _script()
    rows = bool(report.left_rows or report.right_rows)
    body = [
        '<main class="diff">',
        _verdict(report),
        _rounding({"left": report.left_off, "right": report.right_off}),
        *(
            _difference(number, one, with_step=several(report))
            for number, one in enumerate(report.differences, 1)
        ),
        *map(_fix, report.fixes),
        *([_plot(), _operations(report)] if rows else []),
        _weights(report),
        listed("Notes", report.notes),
        "</main>",
        *([_data(report), f"<script>{script}</script>"] if rows or report.weights else []),
    ]
    return page("Comparison of two programs", body, head=sealed_head(script, _asset("page.css")))


def _script() -> str:
    parts = "\n".join(_asset(f"{name}.js") for name in SCRIPTS)
    return f'(() => {{\n"use strict";\n{parts}}})();'


def _asset(name: str) -> str:
    return files("stablenum.diagnosis.diff.report").joinpath("assets", name).read_text(encoding="utf-8")


def _data(report: Shown) -> str:
    first = report.differences[0] if report.differences else None
    data = payload(report.left_rows, report.right_rows, first)
    return f'<script type="application/json" id="data">{data}</script>'


def _verdict(report: Shown) -> str:
    good = not report.differences
    chip = f'<span class="cause{" ok" if good else ""}">{"✓ agree" if good else "≠ differ"}</span>'
    return f"<h1>{chip}{in_html(headline(report))}</h1>"


def _rounding(sides: Mapping[str, Off | None]) -> str:
    rows = [
        f'<tr><th scope="row">{side}</th><td class="number">{off.error:.1e}</td>'
        f"<td>{_code(off.operation)}</td><td>{_code(off.where, 'place')}</td>"
        f'<td class="number">{off.added:.1e}</td></tr>{_compiled(side, off)}'
        for side, off in sides.items()
        if off is not None
    ]
    head = (
        '<tr><td></td><th scope="col">off its float64 twin by</th><th scope="col">rounds most</th>'
        '<th scope="col">at</th><th scope="col">adds</th></tr>'
    )
    table = "\n".join(['<div class="scroll narrow"><table>', head, *rows, "</table></div>"])
    return f"<h2>Rounding</h2>\n{table}" if rows else ""


def _compiled(side: str, off: Off) -> str:
    if off.compiled is None:
        return ""
    shown = ", ".join(f"{kind} by {error:.1e}" for kind, error in off.compiled.items())
    return f'\n<tr><th scope="row">{side}, compiled</th><td colspan="4">{shown}</td></tr>'


def _code(text: str, kind: str = "") -> str:
    shown = f' class="{kind}"' if kind else ""
    return f"<code{shown}>{in_html(text)}</code>" if text else ""


def _difference(number: int, one: Difference, *, with_step: bool) -> str:
    amounts = f'<p class="soft">{in_html(amount(one))}</p>' if number > 1 else ""
    causes = "".join(map(_cause, one.causes))
    heading = in_html(title(number, one, with_step=with_step))
    return "\n".join(
        [
            f'<section class="difference"><h2>{heading}</h2>{amounts}',
            f'<div class="sides">{_side("Left", one.left)}{_side("Right", one.right)}</div>',
            f'<ol class="causes">{causes}</ol>' if causes else "",
            f"<p>{in_html(within(one).strip())}</p>" if within(one) else "",
            *(f"<p>Also at {_place(left)} and {_place(right)}</p>" for left, right in one.also),
            "</section>",
        ]
    )


def _fix(fix: Fix) -> str:
    heading = "Mended, proven" if fix.proven else "Not proven"
    return "\n".join(
        [
            f'<section class="difference"><h2>{heading}</h2><p>{in_html(fix.explanation)}</p>',
            f'<p class="soft">{in_html(fix.evidence)}</p>',
            f'<div class="scroll"><pre>{in_html(fix.patch)}</pre></div></section>',
        ]
    )


def _place(location: Location | None) -> str:
    return "no line" if location is None else _code(location.where, "place")


def _side(name: str, location: Location | None) -> str:
    return f"<article><h3>{name}</h3>{''.join(_location(location))}</article>"


def _location(location: Location | None) -> Iterator[str]:
    if location is None:
        yield '<p class="soft">nothing leads to it</p>'
        return
    what = f"<b>{in_html(location.operation)}</b>" if location.operation else "no such operation in this line"
    module = f" in {_code(location.module)}" if location.module else ""
    called = f", called at {_code(location.called_at, 'place')}" if location.called_at else ""
    yield f"<p>{_code(location.where, 'place')} {what}{module}{called}</p>"
    if location.code:
        yield f'<pre class="bad">{in_html(location.code)}</pre>'


def _cause(cause: Cause) -> str:
    tried = "confirmed" if cause.confirmed else "likely"
    lines = {"Why": cause.sentence, "Evidence": cause.evidence, "Remedy": cause.remedy}
    terms = "".join(f"<dt>{term}</dt><dd>{in_html(text)}</dd>" for term, text in lines.items() if text)
    chip = f'<span class="chip {tried}">{"✓ " if cause.confirmed else ""}{tried}</span>'
    return f"<li><p>{chip} {_code(cause.code)}</p><dl>{terms}</dl></li>"


def _plot() -> str:
    return """<section class="live"><h2 id="plot-title">Error by position</h2>
<div class="plot" id="plot" tabindex="0" role="slider" aria-labelledby="plot-title" aria-valuemin="1"></div>
<p class="soft keys">Left and right arrow keys move along the operations; Enter or a click shows one in the
list.</p>
</section>"""


def _operations(report: Shown) -> str:
    rows = (*report.left_rows, *report.right_rows)
    states = _choices("state", {f"{STATES[s]} {s}": s for s in STATES}, Counter(row.state for row in rows))
    phases = _choices("phase", {p: p for p in PHASES}, Counter(row.phase for row in rows))
    first = '<button type="button" id="show-first">First difference</button>' if report.differences else ""
    return f"""<section class="live"><h2 id="tree-title">Operations</h2>
<form id="filters" role="search" aria-label="Operations">
<label class="text">Filter <input type="search" id="filter-text" autocomplete="off" spellcheck="false"
  placeholder="operation, module, file or code"></label>
<fieldset><legend>Only</legend>{states}</fieldset>
<fieldset><legend>In</legend>{phases}</fieldset>
<span class="buttons">{first}<button type="button" id="unfold">Unfold all</button>
<button type="button" id="fold">Fold all</button></span>
<output id="count" class="soft"></output>
</form>
<div class="box">
<div id="tree" role="treegrid" aria-labelledby="tree-title" aria-describedby="tree-keys"
  aria-colcount="2"></div>
<div id="detail" role="group" aria-label="Details of the operation"></div>
</div>
<p class="soft keys" id="tree-keys">Arrow keys move; right and left unfold and fold a module, or change the
side; Enter goes to the partner on the other side.</p>
</section>
<noscript><p class="soft">The plot and the list of operations need JavaScript.</p>
<style>.live {{ display: none; }}</style></noscript>"""


def _choices(name: str, values: Mapping[str, str], counts: Mapping[str, int]) -> str:
    return "".join(
        f'<label class="choice {value}"><input type="checkbox" name="{name}" value="{value}">{label} '
        f"<small>{counts[value]:,}</small></label>"
        for label, value in values.items()
        if counts[value]
    )


def _weights(report: Shown) -> str:
    weights, title = report.weights, in_html(weights_title(report).rstrip(":"))
    if not weights:
        return "" if report.carried_over else f"<section><h2>{title}</h2></section>"
    rows = [f"<tr><td>{_code(name)}</td><td>{_code(of)}</td></tr>" for name, of in weights.items()]
    origin = "comes from the left" if report.carried_over else "left"
    return f"""<section><h2 id="weights-title">{title}</h2>
<p class="live"><label class="text">Filter <input type="search" id="weights-filter" autocomplete="off"
  spellcheck="false" placeholder="name of a parameter"></label>
<output id="weights-count" class="soft"></output></p>
<div class="scroll tall" tabindex="0" role="region" aria-labelledby="weights-title"><table id="weights">
<thead><tr><th scope="col">right</th><th scope="col">{origin}</th></tr></thead>
<tbody>{"".join(rows)}</tbody></table></div></section>"""
