"""``stablenum report``: the options, the exit codes, and where the page goes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stablenum._support.files import write_text
from stablenum.commands.outputs import check_file, check_target, write
from stablenum.commands.report.page import as_html, is_own
from stablenum.commands.report.tables import differences
from stablenum.commands.report.watch import begun, watched
from stablenum.commands.reports import about, with_about
from stablenum.commands.run_plots.undone import rewind_sentence, undone_phrases
from stablenum.commands.terminal import Terminal, say
from stablenum.runlog.reading import NotALogError, Run, RunReader, read_run

__all__ = ["report"]


def report(
    logs: Annotated[
        list[Path], typer.Argument(metavar="LOG...", help="The logs of runs.", show_default=False)
    ],
    html: Annotated[
        Path | None,
        typer.Option(
            help="Where to write the page. By default run.html for run.jsonl, and a-and-b.html for a.jsonl "
            "and b.jsonl.",
            show_default=False,
        ),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show a run in the terminal while it goes on; Ctrl-C ends it.")
    ] = False,
) -> None:
    """Show the logs of runs: a self-contained page with loss, gradient norm, loss scale, updates and skips.

    A log is what `wrap(..., log="run.jsonl")` of stablenum_torch and `RunLog("run.jsonl")` of stablenum_jax
    write. Several runs are drawn over one another.

    The exit code is 0 if the page was written, and 2 for a usage error or a log that cannot be read.
    """
    if watch:
        _watch(logs, html)
        return
    check_target("--html", html)
    for path in logs:
        _check_log(path)
    target = _target(logs, html)
    runs = [_read(path) for path in logs]
    _rename(runs, logs)
    write(target, lambda path: write_text(path, with_about(about("report"), as_html(runs))), "--html")
    say(f"{target}: {', '.join(_about(run) for run in runs)}")
    for line in differences(runs):
        say(f"  {line}")
    for run in runs:
        for rewind in run.events:
            say(f"  {f'{run.name}: ' if len(runs) > 1 else ''}{rewind_sentence(rewind)}")


def _watch(logs: list[Path], html: Path | None) -> None:
    if len(logs) > 1:
        raise typer.BadParameter("--watch shows one run; name one log.", param_hint="LOG")
    if html is not None:
        raise typer.BadParameter("--watch writes no page; leave one of the two out.", param_hint="--html")
    _check_folder(logs[0])
    console = Terminal()
    try:
        if begun(logs[0], console):
            watched(RunReader(logs[0]), console)
    except (OSError, NotALogError) as error:
        raise _unreadable(logs[0], error) from error


def _check_log(path: Path) -> None:
    _check_folder(path)
    check_file(path, "LOG")
    if not path.is_file():
        raise _unreadable(path, "it is not a file, but a pipe or a device.")


def _check_folder(path: Path) -> None:
    try:
        if path.is_dir():
            raise _unreadable(path, "it is a folder. Name the log in it.")
        if not path.parent.is_dir():
            raise _unreadable(path, f"there is no folder {path.parent}.")
    except OSError as error:  # no right to look, or a name that is too long
        raise _unreadable(path, f"{error.strerror}.") from error


def _target(logs: list[Path], html: Path | None) -> Path:
    """Return where the page goes. A file by the default name is replaced only if it is such a page."""
    log, *others = logs
    name = log.name.removesuffix(".jsonl")
    if others:  # the page of the first run alone has its name
        name += f"-and-{others[0].name.removesuffix('.jsonl') if len(logs) == 2 else f'{len(others)}-more'}"
    target = log.with_name(f"{name}.html") if html is None else html
    check_target("--html", target)  # the folder of the log may not be one to write to
    if target.resolve() in [path.resolve() for path in logs]:
        raise typer.BadParameter(f"{target} is a log; name another file.", param_hint="--html")
    if html is None and target.exists() and not _is_own(target):
        raise typer.BadParameter(
            f"{target} is there already and is not a page of this command; name another file.",
            param_hint="--html",
        )
    return target


def _is_own(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return is_own(file.read(16_384))
    except OSError:
        return False


def _read(path: Path) -> Run:
    try:
        return read_run(path)
    except (OSError, NotALogError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception | str) -> typer.BadParameter:
    message = str(error) if isinstance(error, NotALogError) else f"{path} cannot be read: {error}"
    return typer.BadParameter(message, param_hint="LOG")


def _rename(runs: list[Run], logs: list[Path]) -> None:
    """Call runs by their paths where files of several folders have the same name."""
    if len({run.name for run in runs}) < len(runs):
        for run, path in zip(runs, logs, strict=True):
            run.name = str(path)


def _about(run: Run) -> str:
    counts = f"{len(run):,} steps, {len(run.skipped):,} skipped"
    return f"{run.name} ({'; '.join([counts, *undone_phrases(run)])})"
