"""The plot of a comparison: loss, gradient norm, loss scale and skips over the steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from stablenum.commands.compare.agreement import Trace
from stablenum.commands.compare.backends import BACKENDS, REFERENCE
from stablenum.commands.compare.runner import Result
from stablenum.commands.compare.scenarios import Training
from stablenum.guard.reasons import SPIKES, Reason

__all__ = ["choose", "draw"]

# The most instructive of the built-in scenarios, the best first.
_INSTRUCTIVE = ("digits-mlp", "spike-skip", "fp16-leaves", "bad-200", "digits-conv", "growth-boundary")
_COLUMNS = 3
# NumPy is drawn as a broad, pale line. The other backends are drawn as dashes of equal length that alternate
# along it, so that each is visible where all agree, and a backend that deviates stands out.
_PALE = "#cfd6dd"
_COLOURS = ("#e08a00", "#159a8c", "#7b3fc4", "#1f77d0", "#111111")
_DASH = 4.0
# The colours of the ticks under the count of skips, which show why steps were skipped or shrunk.
_NONFINITE, _SPIKE, _SHRUNK, _HOPELESS = "#d62728", "#0b3fd1", "#2ca02c", "#111111"
_CAUSES = {
    "skipped: not finite": (
        _NONFINITE,
        (
            Reason.NAN_GRADIENT,
            Reason.INF_GRADIENT,
            Reason.NONFINITE_LOSS,
            Reason.FOUND_INF,
            Reason.NONFINITE_SETTING,
            Reason.NONFINITE_UPDATE,
        ),
    ),
    "skipped: no loss scale can help": (_HOPELESS, (Reason.NOT_A_SCALE_PROBLEM,)),
    "skipped: spike": (_SPIKE, SPIKES),
    "applied: spike, shrunk": (_SHRUNK, (Reason.SPIKE_CLIPPED,)),
}
_LABEL_PANEL = ("loss", "gradient norm", "loss scale", "skipped so far")


def choose(results: Sequence[Result], names: Sequence[str] = ()) -> list[Result]:
    """Return at most three results to draw: those requested by name, otherwise the most instructive ones.

    If there are none of these, return the results with the most skips.
    """
    by_name = {result.scenario.name: result for result in results}
    wanted = [by_name[name] for name in names if name in by_name] or [
        by_name[name] for name in _INSTRUCTIVE if name in by_name
    ]
    if not wanted:
        wanted = sorted(results, key=lambda r: -r.guarded[REFERENCE].skipped)
    return wanted[:_COLUMNS]


def draw(results: Sequence[Result], path: Path) -> None:
    """Draw one column per result and write a PNG.

    Args:
        results: the results that :func:`choose` returns, at least one.
        path: where to write the file.
    """
    figure, axes = plt.subplots(
        4,
        len(results),
        figsize=(1.2 + 4.6 * len(results), 9.2),
        sharex="col",
        squeeze=False,
        layout="constrained",
    )
    try:
        for column, result in enumerate(results):
            _column(axes[:, column], result)
            axes[0, column].set_title(result.scenario.name, fontsize=12, fontweight="bold", parse_math=False)
            axes[-1, column].set_xlabel("step")
        for row, label in enumerate(_LABEL_PANEL):
            axes[row, 0].set_ylabel(label)
        _legend(figure, axes)
        figure.suptitle(
            "Guarded training: one dash per backend; on one line, they agree",
            fontsize=10,
            color="#555555",
        )
        figure.savefig(path, dpi=120, format="png")
    finally:
        plt.close(figure)


def _column(axes: Any, result: Result) -> None:
    """Draw the four panels of one scenario."""
    traces = list(result.guarded.values())
    for trace in traces:
        style = _style(trace, list(result.guarded))
        _line(axes[0], [row.loss for row in trace.rows], style)
        _line(axes[1], [row.grad_norm for row in trace.rows], style)
        axes[2].step(range(len(trace.rows)), [row.loss_scale for row in trace.rows], where="post", **style)
        axes[3].step(range(len(trace.rows)), _running_skips(trace), where="post", **style)
    if isinstance(result.scenario, Training):
        _plain_line(axes[0], result.plain[REFERENCE])
    for panel, values in (
        (axes[0], [row.loss for t in traces for row in t.rows]),
        (axes[1], [row.grad_norm for t in traces for row in t.rows]),
    ):
        _scale_of(panel, values)
    _mark_nonfinite(axes[0], traces[0], "loss")
    _mark_nonfinite(axes[1], traces[0], "grad_norm")
    _circle_spikes(axes[0], traces[0], "loss", (Reason.SPIKE_LOSS,))
    _circle_spikes(axes[1], traces[0], "grad_norm", (Reason.SPIKE_GRAD_NORM,))
    _mark_causes(axes[3], traces[0])
    axes[2].set_yscale("log", base=2)
    axes[3].yaxis.set_major_locator(MaxNLocator(integer=True))
    axes[3].margins(y=0.12)  # room for the ticks
    for panel in axes:
        panel.grid(visible=True, color="#e6e6e6", linewidth=0.6)
        panel.set_axisbelow(True)


def _style(trace: Trace, drawn: Sequence[str]) -> dict[str, Any]:
    if trace.backend == REFERENCE:
        return {"color": _PALE, "linewidth": 5.0, "label": trace.backend, "solid_capstyle": "butt"}
    others = [name for name in drawn if name != REFERENCE]
    place, turns = others.index(trace.backend), len(others)
    return {
        "color": dict(zip([name for name in BACKENDS if name != REFERENCE], _COLOURS))[trace.backend],
        "linewidth": 1.6,
        "label": trace.backend,
        "linestyle": (-_DASH * place, (_DASH, _DASH * (turns - 1))),
        "dash_capstyle": "butt",
    }


def _line(panel: Any, values: Sequence[float], style: dict[str, Any]) -> None:
    """Draw a line with gaps where a value is not finite."""
    panel.plot(range(len(values)), [v if math.isfinite(v) else math.nan for v in values], **style)


def _plain_line(panel: Any, trace: Trace) -> None:
    """Draw the loss without a guard, up to its last finite value."""
    bad = [step for step, loss in enumerate(trace.losses) if not math.isfinite(loss)]
    end = bad[0] if bad else len(trace.losses)
    losses = trace.losses[:end]
    panel.plot(
        range(end), losses, color="#d62728", linewidth=1.2, linestyle=(0, (2, 1.5)), label="numpy, no guard"
    )
    if bad and losses:
        panel.plot(
            [end - 1],
            [losses[-1]],
            marker="X",
            color="#d62728",
            markersize=9,
            linestyle="none",
            label="the last step before it is NaN",
        )


def _scale_of(panel: Any, values: Sequence[float]) -> None:
    """Set a log axis for positive values that span more than a factor of ten."""
    finite = [v for v in values if math.isfinite(v)]
    if finite and min(finite) > 0 and max(finite) > 10 * min(finite):
        panel.set_yscale("log")


def _mark_nonfinite(panel: Any, trace: Trace, name: str) -> None:
    """Draw triangles at the top of the panel where a value was inf or NaN."""
    values = [getattr(row, name) for row in trace.rows]
    for kind, marker, colour, steps in (
        ("inf", "^", "#d62728", [i for i, v in enumerate(values) if math.isinf(v)]),
        ("NaN", "v", "#8c1a8c", [i for i, v in enumerate(values) if math.isnan(v)]),
    ):
        if steps:
            panel.plot(steps, [0.95] * len(steps), transform=panel.get_xaxis_transform(), marker=marker,
                       color=colour, markersize=6, linestyle="none", label=kind, clip_on=False)  # fmt: skip


def _circle_spikes(panel: Any, trace: Trace, name: str, reasons: Sequence[Reason]) -> None:
    """Draw a ring around each value for which a step was skipped, and around all values of shrunk steps."""
    for colour, kinds in ((_SPIKE, reasons), (_SHRUNK, (Reason.SPIKE_CLIPPED,))):
        found = [(i, getattr(row, name)) for i, row in enumerate(trace.rows) if row.reason in kinds]
        if found:
            panel.plot(*zip(*found), marker="o", markerfacecolor="none", color=colour, markersize=8,
                       markeredgewidth=1.6, linestyle="none", zorder=4)  # fmt: skip


def _mark_causes(panel: Any, trace: Trace) -> None:
    """Draw a tick at the bottom for each skipped or shrunk step, in the colour of its reason."""
    for label, (colour, reasons) in _CAUSES.items():
        steps = [i for i, row in enumerate(trace.rows) if row.reason in reasons]
        if steps:
            panel.plot(steps, [0.04] * len(steps), transform=panel.get_xaxis_transform(), marker="|",
                       color=colour, markersize=12, markeredgewidth=2.0, linestyle="none", label=label,
                       zorder=4)  # fmt: skip


def _running_skips(trace: Trace) -> list[int]:
    total, running = 0, []
    for row in trace.rows:
        total += not row.applied
        running.append(total)
    return running


def _solid(line: Any) -> Any:
    """Return a solid line for the legend, where lines are too short for alternating dashes."""
    if line.get_marker() not in (None, "None", "none", "") or line.get_label() not in BACKENDS:
        return line
    return Line2D([], [], color=line.get_color(), linewidth=max(2.0, line.get_linewidth()))


def _legend(figure: Any, axes: Any) -> None:
    """Draw one legend for all panels, with each label once."""
    found: dict[str, Any] = {}
    for panel in axes.flat:
        for handle, label in zip(*panel.get_legend_handles_labels()):
            found.setdefault(label, _solid(handle))
    figure.legend(
        found.values(), found.keys(), loc="outside lower center", ncols=min(len(found), 5), frameon=False
    )
