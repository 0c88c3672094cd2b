"""A run on the terminal, while it goes on."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from stablenum.commands.run_plots.undone import rewind_sentence, undone_phrases
from stablenum.diagnosis.report.rich_lines import line
from stablenum.guard.reasons import APPLIED
from stablenum.runlog.reading import LONGEST, Run, RunReader

__all__ = ["begun", "shown", "watched"]

_EVERY = 1.0  # seconds
_ROWS = 8
_REWINDS = 4
_BARS = "▁▂▃▄▅▆▇█"
_WIDE = 30.0


def begun(path: Path, console: Console) -> bool:
    """Wait for the log of a run to begin; return whether it has: Ctrl-C ends the waiting.

    Raises:
        OSError: the log is there and cannot be read.
    """
    try:
        if not _has_begun(path):
            console.print(line(f"Waiting for the log {path} to begin; Ctrl-C ends this."), soft_wrap=True)
        while not _has_begun(path):
            time.sleep(_EVERY)
    except KeyboardInterrupt:
        return False
    return True


def _has_begun(path: Path) -> bool:
    """Return whether the first line is there, or something that is not the beginning of a log."""
    try:
        with path.open("rb") as file:
            first = file.readline(LONGEST)
    except FileNotFoundError:
        return False
    return first.endswith(b"\n") or len(first) == LONGEST or not b"{".startswith(first[:1])


def watched(reader: RunReader, console: Console) -> None:
    """Show a run until Ctrl-C: its last steps, its skips, and the course of loss and gradient norm.

    Raises:
        OSError: the log cannot be read any more.
    """
    try:
        with Live(shown(reader.run, console.width), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(_EVERY)
                if reader.read():
                    live.update(shown(reader.run, console.width), refresh=True)
    except KeyboardInterrupt:
        return


def shown(run: Run, width: int) -> RenderableType:
    """Return what the terminal shows of a run."""
    if not len(run):
        none, next_ones = ("no step is left", "next") if run.events else ("no step yet", "first")
        text = line(f"{run.name}: {none}. Waiting for the {next_ones} ones; Ctrl-C ends this.")
        return Group(text, *_rewinds(run, width))
    bars = max(16, min(64, width - 40))
    return Group(_headline(run), *_rewinds(run, width), _courses(run, bars), _last(run), _skips(run))


def _headline(run: Run) -> Text:
    text = line(f"{run.name}: step {run.steps[-1]:,}", style="bold")
    skipped = len(run.skipped)
    text.append(f", {skipped:,} of {len(run):,} skipped", style="red" if skipped else "green")
    return text.append("".join(f"; {phrase}" for phrase in undone_phrases(run)), style="red")


def _rewinds(run: Run, width: int) -> Iterator[Text]:
    """Yield a line for each of the last rewinds; with the symptom's name where the clause has no room."""
    earlier = len(run.events) - _REWINDS
    if earlier > 0:
        yield line(f"{earlier:,} earlier rewind{'' if earlier == 1 else 's'}")
    for rewind in run.events[-_REWINDS:]:
        whole = rewind_sentence(rewind)
        said = whole if len(whole) <= width else rewind_sentence(rewind._replace(seen=rewind.symptom))
        yield line(said, style="red", no_wrap=True, overflow="ellipsis")


def _courses(run: Run, bars: int) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, values in (("loss", run.loss), ("gradient norm", run.grad_norm)):
        table.add_row(name, line(sparkline(values, bars)), _range(values))
    return table


def sparkline(values: Sequence[float], bars: int) -> str:
    """Return the course of a column in so many characters: the largest value of each part; x for none.

    The bars are those of logarithms where the values are positive and far apart.
    """
    n = len(values)
    cuts = [k * n // bars for k in range(bars + 1)] if n > bars else list(range(n + 1))
    most = [_largest(values[start:stop]) for start, stop in pairwise(cuts)]
    known = [v for v in most if v is not None]
    if known and min(known) > 0 and max(known) > _WIDE * min(known):
        most = [None if v is None else math.log(v) for v in most]
        known = [v for v in most if v is not None]
    least = min(known, default=0.0)
    span = (max(known, default=0.0) - least) or 1.0
    return "".join("x" if v is None else _BARS[round((v - least) / span * (len(_BARS) - 1))] for v in most)


def _largest(values: Sequence[float]) -> float | None:
    return max(filter(math.isfinite, values), default=None)


def _range(values: Sequence[float]) -> str:
    known = list(filter(math.isfinite, values))
    return f"{min(known):.4g} to {max(known):.4g}" if known else "not finite"


def _last(run: Run) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("step", "loss", "gradient norm", "loss scale"):
        table.add_column(name, justify="right")
    table.add_column("reason")
    table.add_column("worst parameter", no_wrap=True)
    names = list(run.names)
    for i in range(max(0, len(run) - _ROWS), len(run)):
        applied = run.reason[i] in APPLIED
        worst = "" if run.worst[i] < 0 else names[run.worst[i]]
        numbers = (f"{run.loss[i]:.4g}", f"{run.grad_norm[i]:.4g}", f"{run.loss_scale[i]:.6g}")
        cells = [f"{run.steps[i]:,}", *numbers, run.reason[i].name]
        table.add_row(*cells, line(worst), style="" if applied else "red")
    return table


def _skips(run: Run) -> Text:
    counts = Counter(run.reason[i].name for i in run.skipped)
    return line(", ".join(f"{name} {count:,}" for name, count in counts.most_common()))
