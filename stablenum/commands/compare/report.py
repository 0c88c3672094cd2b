"""The results of a comparison, as tables for people and as strict JSON for programs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from stablenum.commands.compare.agreement import Trace
from stablenum.commands.compare.backends import REFERENCE, Backend
from stablenum.commands.compare.runner import Result
from stablenum.commands.compare.scenarios import Outcome, Scenario, Stream, Training
from stablenum.diagnosis.report.rich_lines import line

__all__ = ["list_table", "notes", "print_report", "problems", "summary", "to_plain"]

_STYLES = {
    Outcome.SURVIVES: "green",
    Outcome.DIES: "red",
    Outcome.STALLS: "yellow",
    Outcome.FAILS: "red",
    Outcome.STOPS: "yellow",
}


def list_table(scenarios: Iterable[Scenario], width: int) -> Table:
    """Return a table of the scenarios."""
    table = _table("Scenarios", width)
    table.add_column("name", no_wrap=True)
    table.add_column("kind", no_wrap=True)
    table.add_column("steps", justify="right")
    table.add_column("what it shows")
    for scenario in scenarios:
        kind = "stream" if isinstance(scenario, Stream) else "model"
        table.add_row(line(scenario.name), kind, str(scenario.steps), line(scenario.about))
    return table


def print_report(
    console: Console,
    results: Sequence[Result],
    backends: Sequence[Backend],
    absent: Mapping[str, list[str]],
    unfit: Mapping[str, str] | None = None,
) -> None:
    """Print the tables, then every problem, then a summary in one line.

    Args:
        console: where to print.
        results: the results of the scenarios.
        backends: the backends that ran.
        absent: for each absent backend, the libraries that are not installed.
        unfit: for each scenario that was left out, the reason.
    """
    console.print()
    console.print(_results_table(results, len(backends), console.width))
    accuracies = [r for r in results if isinstance(r.scenario, Training) and r.clean]
    if accuracies:
        console.print()
        console.print(_accuracy_table(accuracies, console.width))
    console.print()
    for note in notes(results, absent, unfit or {}):
        console.print(line(note, style="dim"))
    for problem in problems(results):
        console.print(line(problem, style="bold red"))
    console.print(line(summary(results, backends)))


def _table(title: str, width: int) -> Table:
    """Return an empty table, whose columns are closer together in a narrow terminal."""
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1 if width >= 100 else 0),
        pad_edge=False,
    )


def _results_table(results: Sequence[Result], n_backends: int, width: int) -> Table:
    table = _table("The same training without and with a guard, on every backend", width)
    table.add_column("scenario", no_wrap=True)
    table.add_column("plain", no_wrap=True)
    table.add_column("guarded", no_wrap=True)
    for name in ("steps", "skipped", "backends", "agree", "worst\ndifference"):
        table.add_column(name, justify="right", no_wrap=True)
    for result in results:
        reference = result.guarded[REFERENCE]
        table.add_row(
            line(result.scenario.name),
            _outcomes(result, result.plain),
            _outcomes(result, result.guarded),
            str(len(reference.rows)),
            str(reference.skipped),
            f"{len(result.guarded)}/{n_backends}",
            _agreement(result),
            _worst_difference(result),
        )
    return table


def _outcomes(result: Result, traces: Mapping[str, Trace]) -> str:
    """Return the different outcomes, which is one word if all backends agree."""
    found = sorted({result.outcome(trace) for trace in traces.values()})
    return " / ".join(f"[{_STYLES[o]}]{o}[/]" for o in found)


def _agreement(result: Result) -> str:
    if not result.comparisons:
        return "-"
    return "[green]yes[/]" if result.agree else "[bold red]NO[/]"


def _worst_difference(result: Result) -> str:
    if not result.comparisons:
        return "-"
    worst = max(max(c.worst_norm, c.worst_params) for c in result.comparisons.values())
    return f"{worst:.1e}" if worst else "0"


def _accuracy_table(results: Sequence[Result], width: int) -> Table:
    table = _table("Accuracy on held-out digits", width)
    table.add_column("scenario", no_wrap=True)
    table.add_column("backend", no_wrap=True)
    table.add_column("plain, bad batches", justify="right")
    table.add_column("guarded, bad batches", justify="right")
    table.add_column("plain, no bad batches", justify="right")
    for result in results:
        for i, (backend, trace) in enumerate(result.guarded.items()):
            plain = result.plain.get(backend)
            clean = result.clean.get(backend) if plain else None
            table.add_row(
                line(result.scenario.name) if i == 0 else "",
                backend,
                _percent(plain),
                _percent(trace),
                _percent(clean),
                end_section=i == len(result.guarded) - 1,
            )
    return table


def _percent(trace: Trace | None) -> str:
    return "" if trace is None or trace.score is None else f"{100 * trace.score:.1f} %"


def notes(
    results: Sequence[Result], absent: Mapping[str, list[str]], unfit: Mapping[str, str]
) -> Iterable[str]:
    """Yield what was left out, and why."""
    by_reason: dict[tuple[str, str], list[str]] = {}  # the scenarios for each pair of backends and reason
    for result in results:
        for reason in dict.fromkeys(result.left_out.values()):
            backends = ", ".join(name for name, why in result.left_out.items() if why == reason)
            by_reason.setdefault((backends, reason), []).append(result.scenario.name)
    for (backends, reason), names in by_reason.items():
        yield f"{', '.join(names)}: not on {backends}, because {reason}."
    for name, missing in absent.items():
        yield f"backend {name} is absent: {' and '.join(missing)} not installed."
    for reason in dict.fromkeys(unfit.values()):
        alike = ", ".join(name for name in unfit if unfit[name] == reason)
        yield f"left out: {alike}. {reason}"


def problems(results: Sequence[Result]) -> Iterable[str]:
    """Yield every disagreement and every unexpected outcome."""
    for result in results:
        for comparison in result.comparisons.values():
            if comparison.disagreement is not None:
                yield f"Disagreement: {comparison.disagreement}"
        for surprise in result.surprises:
            yield f"Unexpected outcome: {surprise}"


def summary(results: Sequence[Result], backends: Sequence[Backend]) -> str:
    """Return what was found, in one line."""
    n = f"{len(results)} scenario{'s' if len(results) != 1 else ''}"
    names = ", ".join(b.name for b in backends)
    if len(backends) == 1:
        found = "nothing to compare NumPy with"
    else:
        bad = sum(not r.agree for r in results)
        found = "all backends agree" if bad == 0 else f"backends disagree in {bad}"
    surprised = sum(bool(r.surprises) for r in results)
    outcomes = "" if surprised == 0 else f"; {surprised} with an unexpected outcome"
    return f"{n} on {names}: {found}{outcomes}."


# ---------------------------------------------------------------------------------------- JSON


def to_plain(
    results: Sequence[Result],
    *,
    backends: Sequence[Backend],
    absent: Mapping[str, list[str]],
    unfit: Mapping[str, str],
    versions: Mapping[str, str],
    seconds: float,
) -> dict[str, Any]:
    """Return all results as plain values for strict JSON: non-finite numbers are the strings "nan", "inf" and
    "-inf"."""
    document = {
        "ok": all(result.ok for result in results),
        "versions": dict(versions),
        "seconds": round(seconds, 1),
        "backends": {b.name: b.about for b in backends},
        "absent": dict(absent),
        "unfit": dict(unfit),
        "scenarios": [_result(result) for result in results],
    }
    plain: dict[str, Any] = _strict(document)
    return plain


def _result(result: Result) -> dict[str, Any]:
    scenario, reference = result.scenario, result.guarded[REFERENCE]
    return {
        "name": scenario.name,
        "about": scenario.about,
        "kind": "stream" if isinstance(scenario, Stream) else "model",
        "steps": scenario.steps,
        "seed": scenario.seed,
        "optimizer": dataclasses.asdict(scenario.optimizer),
        "guard": scenario.guard.to_dict(),
        "expected": dataclasses.asdict(scenario.expected),
        "tolerance": dataclasses.asdict(scenario.tolerance),
        "recovery": _recovery(scenario),
        "agree": result.agree,
        "surprises": result.surprises,
        "left_out": result.left_out,
        "plain": {name: _plain(result, trace) for name, trace in result.plain.items()},
        "plain_without_faults": {name: {"score": trace.score} for name, trace in result.clean.items()},
        "guarded": {name: _guarded(result, trace) for name, trace in result.guarded.items()},
        "numpy_steps": [row._asdict() | {"reason": row.reason.name} for row in reference.rows],
    }


def _recovery(scenario: Scenario) -> dict[str, Any] | None:
    policy = scenario.recovery if isinstance(scenario, Stream) else None
    return None if policy is None else dataclasses.asdict(policy)


def _plain(result: Result, trace: Trace) -> dict[str, Any]:
    return {"outcome": result.outcome(trace), "score": trace.score, "seconds": round(trace.seconds, 3)}


def _guarded(result: Result, trace: Trace) -> dict[str, Any]:
    comparison = result.comparisons.get(trace.backend)
    return {
        "outcome": result.outcome(trace),
        "score": trace.score,
        "skipped": trace.skipped,
        "final_loss_scale": trace.final_loss_scale,
        "rewinds": [event.to_dict() for event in trace.rewinds],
        "stopped": trace.stopped,
        "warnings": trace.warnings,
        "seconds": round(trace.seconds, 3),
        "worst_norm_difference": comparison and comparison.worst_norm,
        "worst_params_difference": comparison and comparison.worst_params,
        "disagreement": str(comparison.disagreement) if comparison and comparison.disagreement else None,
    }


def _strict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
