"""What ``stablenum compare`` does: it finds out what was asked for, runs it, and writes the reports."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from stablenum._support.files import write_text
from stablenum.commands.compare.backends import BACKENDS, Backend, find_backends, versions
from stablenum.commands.compare.builtin import SCENARIOS
from stablenum.commands.compare.processes import run_side_by_side
from stablenum.commands.compare.report import list_table, print_report, to_plain
from stablenum.commands.compare.runner import Result, run_scenario, steps_of
from stablenum.commands.compare.scenario_file import read_scenario_file, with_guard
from stablenum.commands.compare.scenarios import Scenario
from stablenum.commands.outputs import check_target, write
from stablenum.commands.quiet import without_log
from stablenum.commands.reports import about, as_json, with_about
from stablenum.commands.terminal import Terminal
from stablenum.diagnosis.report.rich_lines import line

__all__ = ["run", "show_list"]


def show_list(names: Sequence[str], backend: list[str] | None, config: Path | None) -> None:
    """Print the scenarios, those of a file too, and the backends."""
    chosen = _scenarios(names, config).scenarios
    _usage(lambda: find_backends(backend), "--backend")
    console = _console()
    listed = {s.name: s for s in (*SCENARIOS.values(), *chosen)}
    console.print(list_table(listed.values(), console.width))
    for b in BACKENDS.values():
        missing = f" (absent: {' and '.join(b.missing)} not installed)" if b.missing else ""
        console.print(line(f"backend {b.name}: {b.about}{missing}"))


def run(
    names: Sequence[str],
    backend: list[str] | None,
    config: Path | None,
    jobs: int,
    *,
    json: Path | None,
    plot: Path | None,
    html: Path | None,
) -> bool:
    """Run scenarios, print and write the reports, and return whether all is as expected.

    Args:
        names: the scenarios that were asked for; empty for all.
        backend: the backends that were asked for; None for all that are installed.
        config: a file with settings and scenarios.
        jobs: how many scenarios are run at a time.
        json, plot, html: where to write the reports.
    """
    chosen, checked, unfit = _scenarios(names, config)
    backends, absent = _usage(lambda: find_backends(backend), "--backend")
    console = _console()
    for option, path in (("--json", json), ("--plot", plot), ("--html", html)):
        check_target(option, path)
    begin = time.perf_counter()
    # Scenarios requested by name run on every backend.
    with without_log():
        results = _run(chosen, backends, jobs, checked=checked, brief=not names and config is None)
    seconds = time.perf_counter() - begin
    print_report(console, results, backends, absent, unfit)
    if json is not None:
        plain = to_plain(
            results, backends=backends, absent=absent, unfit=unfit, versions=versions(), seconds=seconds
        )
        write(json, lambda path: write_text(path, as_json(about("compare"), plain)), "--json")
        console.print(line(f"wrote {json}", style="dim"))
    if plot is not None:
        from stablenum.commands.compare.plot import choose, draw  # matplotlib takes a second to load

        write(plot, lambda path: draw(choose(results, names), path), "--plot")
        console.print(line(f"wrote {plot}", style="dim"))
    if html is not None:
        from stablenum.commands.compare.page import as_html

        page = with_about(about("compare"), as_html(results, backends, absent, unfit))
        write(html, lambda path: write_text(path, page), "--html")
        console.print(line(f"wrote {html}", style="dim"))
    return all(result.ok for result in results)


def _console() -> Console:
    console = Terminal(soft_wrap=False)
    return console if console.is_terminal else Terminal(width=112)


class _Choice(NamedTuple):
    """The scenarios to run, the names of those whose outcome can be checked, and those left out and why."""

    scenarios: list[Scenario]
    checked: set[str]
    unfit: dict[str, str]


def _scenarios(names: Sequence[str], config: Path | None) -> _Choice:
    known: dict[str, Scenario] = dict(SCENARIOS)
    chosen = list(known)
    changed: set[str] = set()
    unfit: dict[str, str] = {}
    if config is not None:
        file = _usage(lambda: read_scenario_file(config), "--config")
        if file.guard:
            for name, scenario in SCENARIOS.items():
                try:
                    known[name] = with_guard(scenario, file.guard)
                except ValueError as error:  # valid settings that do not fit this scenario
                    unfit[name] = str(error)
            changed = set(known)
        own = {s.name: s for s in file.scenarios}
        known |= own
        changed -= set(own)
        unfit = {name: reason for name, reason in unfit.items() if name not in own}
        chosen = list(own) or chosen
    for name in names:
        if name not in known:
            raise typer.BadParameter(
                f"unknown scenario {name!r}; the known ones are {', '.join(known)}.", param_hint="--scenario"
            )
    chosen = list(dict.fromkeys(names)) or chosen
    left_out = {name: unfit[name] for name in chosen if name in unfit}
    if len(left_out) == len(chosen):
        name, why = next(iter(left_out.items()))
        raise typer.BadParameter(
            f"[guard] fits none of the requested scenarios; for {name}: {why}", param_hint="--config"
        )
    chosen = [name for name in chosen if name not in left_out]
    return _Choice([known[name] for name in chosen], set(chosen) - changed, left_out)


def _usage(call: Callable[[], Any], option: str) -> Any:
    """Return ``call()``, and report a ValueError as a usage error of an option (exit code 2)."""
    try:
        return call()
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


def _run(
    scenarios: Sequence[Scenario], backends: Sequence[Backend], jobs: int, *, checked: set[str], brief: bool
) -> list[Result]:
    """Run all scenarios, with a progress bar on a terminal."""
    console = Terminal(stderr=True)
    total = sum(steps_of(s, backends, brief=brief) for s in scenarios)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("runs"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("starting", total=total)

        def show(scenario: Scenario, finished: int) -> None:
            progress.update(task, description=f"{scenario.name:<22}", advance=finished)

        if jobs > 1 and len(scenarios) > 1:
            return run_side_by_side(
                scenarios,
                backends,
                jobs=jobs,
                checked=checked,
                brief=brief,
                done=lambda scenario: show(scenario, steps_of(scenario, backends, brief=brief)),
            )
        results = []
        for scenario in scenarios:
            show(scenario, 0)
            results.append(
                run_scenario(
                    scenario,
                    backends,
                    check_expected=scenario.name in checked,
                    brief=brief,
                    tick=lambda: progress.advance(task),
                )
            )
        return results
