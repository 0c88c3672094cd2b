"""``stablenum verify``: the options, the exit codes, and where the report goes."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from stablenum._support.outside_text import in_html
from stablenum.commands.outputs import check_target, check_there
from stablenum.commands.reports import about, write_reports
from stablenum.commands.terminal import Terminal
from stablenum.commands.verify.rendering import shown
from stablenum.commands.verify.verdicts import Outcome
from stablenum.diagnosis.report.html import page

__all__ = ["verify"]

_WIDTH = 140


def verify(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE|FOLDER...", help="Checkpoints, or folders of checkpoints.", show_default=False
        ),
    ],
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Entries with these names may be non-finite, as in --allow '*.mask'. May be repeated.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=NUMBER",
            help="Read more than is usual, as in --limit depth=500, where a message names the limit. "
            "May be repeated.",
            show_default=False,
        ),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="Write the report as strict JSON.", show_default=False)
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(help="Write the report as a self-contained HTML page.", show_default=False),
    ] = None,
) -> None:
    """Name what in a checkpoint is not finite, out of range for a format, or suspicious.

    Reads what torch.save, safetensors, torch.distributed.checkpoint, Orbax, numpy.savez and
    stablenum's Checkpoints write. No code of a checkpoint is run, and nothing is changed.

    The exit code is 0 if all is good, 1 if something is poisoned (a non-finite parameter, buffer or moment,
    a negative second moment, a NaN anywhere else), and 2 if something is unreadable, corrupt or
    unknown.
    """
    # They import NumPy, and the help is shown without it.
    from stablenum.commands.verify.limits import Limits
    from stablenum.commands.verify.looking import look_at

    for option, target in (("--json", json), ("--html", html)):
        check_target(option, target)
    for path in paths:
        check_there(path, "FILE|FOLDER", "file or folder")
    try:
        limits = Limits.parsed(limit or ())
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--limit") from error
    found = [look_at(path, allow=tuple(allow or ()), limits=limits) for path in paths]
    outcomes = [outcome for of_path, _ in found for outcome in of_path]
    notes = [note for _, of_path in found for note in of_path]
    write_reports(
        about("verify"),
        lambda: _as_plain(outcomes, notes),
        lambda: _as_html(outcomes, notes),
        json=json,
        html=html,
    )
    _console().print(shown(outcomes, notes), soft_wrap=len(outcomes) == 1)
    raise typer.Exit(_exit_code(outcomes))


def _console() -> Terminal:
    """Return a console; written into a file or a pipe, names are not broken into lines of 80 characters."""
    console = Terminal()
    return console if console.is_terminal else Terminal(width=max(console.width, _WIDTH))


def _exit_code(outcomes: Sequence[Outcome]) -> int:
    return max(outcome.exit_code for outcome in outcomes)


def _as_plain(outcomes: Sequence[Outcome], notes: Sequence[str]) -> dict[str, Any]:
    return {
        "ok": _exit_code(outcomes) == 0,
        "exit_code": _exit_code(outcomes),
        "checkpoints": [outcome.to_dict() for outcome in outcomes],
        "notes": list(notes),
    }


def _as_html(outcomes: Sequence[Outcome], notes: Sequence[str]) -> str:
    """Return what is printed, as a page."""
    console = Terminal(width=_WIDTH, record=True, file=io.StringIO())
    console.print(shown(outcomes, notes))
    good = "good" if _exit_code(outcomes) == 0 else "not good"
    text = console.export_text()
    return page(f"Checkpoints: {good}", [f"<h1>Checkpoints: {good}</h1>", f"<pre>{in_html(text)}</pre>"])
