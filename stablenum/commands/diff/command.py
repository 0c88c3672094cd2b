"""``stablenum diff``: the options, the exit codes, and where the report goes."""

from __future__ import annotations

import json as json_module
import time
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from stablenum.commands.changes import Write, apply, check_write
from stablenum.commands.diff.starter import write_pair
from stablenum.commands.outputs import MENDED, check_folder, check_suffix, check_target
from stablenum.commands.reports import about, write_reports
from stablenum.commands.terminal import Terminal, say
from stablenum.errors import ProgramError

if TYPE_CHECKING:
    from stablenum.commands.diff.fixing import Fixed
    from stablenum.commands.diff.pair import Pair
    from stablenum.diagnosis.diff.report.report import DiffReport

__all__ = ["Side", "diff"]

_WEIGHTS = " For the command, PAIR.py may define weights, such as weights = ('match', {...})."


class Side(StrEnum):
    """The function of a file that makes a program."""

    left = "left"
    right = "right"


def diff(
    left: Annotated[
        Path,
        typer.Argument(
            metavar="PAIR.py|LEFT",
            help="Defines left() and right(); with RIGHT, a recording, or defines program().",
            show_default=False,
        ),
    ],
    right: Annotated[
        Path | None,
        typer.Argument(
            metavar="RIGHT", help="A recording, or a file that defines program().", show_default=False
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Compare this many training steps; by default as many as a recording has, or one.",
            show_default=False,
        ),
    ] = None,
    side: Annotated[
        Side | None,
        typer.Option(
            help="With RIGHT: call left() or right() instead of program(). With one file and `--fix`: the "
            "side to change, by default the right one.",
            show_default=False,
        ),
    ] = None,
    fix: Annotated[
        bool,
        typer.Option(
            "--fix",
            help="Look for a change of one side's source with which they agree, and show it as a patch.",
        ),
    ] = False,
    write: Write = False,
    init: Annotated[
        bool, typer.Option("--init", help="Write PAIR.py, a pair of programs to begin with, and exit.")
    ] = False,
    json: Annotated[
        Path | None, typer.Option(help="Write the report as strict JSON.", show_default=False)
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(help="Write the report as a self-contained HTML page.", show_default=False),
    ] = None,
    repro: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write scripts that reproduce the first difference into a folder.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Compare two programs and name the first operation at which they differ by more than rounding.

    PAIR.py defines left() and right(), each of which returns stablenum_torch.program(...) or
    stablenum_jax.program(...). Two files may be given instead, each of which defines program(), or is a
    recording (.snum, written by `stablenum record`) or a file of named arrays (.npz). The right program is
    given the parameters of the left one. The mapping is inferred, unless a file defines weights, which may
    be anything that stablenum.diff takes as weights.

    With `--fix`, small changes of the source are tried at the lines that differ, first those that the causes
    suggest. What makes the programs agree is tried again in another process, at other weights and for one
    more step, too; only then is it said to be proven. Nothing is written without `--write`, and only files in
    the folder of the program are changed.

    Experimental: the names of causes and the JSON may change in a minor version.

    The exit code is 0 if the programs agree, 1 if they differ, 2 if they cannot be compared, and 4 if they
    differ and `--fix` has found changes with which they are proven to agree.
    """
    # They import NumPy, and the help is shown without it.
    from stablenum.commands.diff.pair import FILES, failed, load_pair, load_sides
    from stablenum.commands.diff.progress import shown
    from stablenum.diagnosis.diff.compare import reported
    from stablenum.diagnosis.diff.weights.weights import UnmappedError

    if init:
        if right is not None:
            raise typer.BadParameter("one file is written: leave out RIGHT", param_hint="--init")
        write_pair(left)
        say(f"{left} is written: put your programs into it, and run `stablenum diff {left}`")
        return
    check_write(fix=fix, write=write)
    for option, path, suffixes in (("--json", json, (".json",)), ("--html", html, (".html", ".htm"))):
        check_target(option, path)
        check_suffix(option, path, suffixes)
    check_folder("--repro", repro)
    if right is None and side is not None and not fix:
        raise typer.BadParameter(
            "needs --fix, or two files, of which one defines left() or right()", param_hint="--side"
        )
    if right is None and left.suffix.lower() in FILES:
        raise typer.BadParameter(f"{left} is one side: name the other one, too", param_hint="RIGHT")
    begun = time.monotonic()
    pair = load_pair(left) if right is None else load_sides(left, right, side and side.value)
    changes = None
    try:
        if fix:
            changed = side.value if side is not None and right is None else "right"
            report, changes = _fixed(pair, steps, changed, begun)
        else:
            with shown(Terminal(stderr=True)) as progress:
                report = reported(pair.left, pair.right, pair.weights, steps, progress=progress)
    except (ProgramError, ValueError) as error:
        more = _WEIGHTS if isinstance(error, UnmappedError) else ""
        raise failed(f"{error}{more}") from error
    made_by = about("diff", step=1 if steps is None else steps)
    write_reports(made_by, lambda: json_module.loads(report.to_json()), report.to_html, json=json, html=html)
    if repro is not None:
        _reproduce(report, repro)
    Terminal().print(report, soft_wrap=True)
    mended = changes is not None and _tell(changes, write=write)
    raise typer.Exit(0 if report.ok else MENDED if mended else 1)


def _fixed(pair: Pair, steps: int | None, side: str, begun: float) -> tuple[DiffReport, Fixed | None]:
    """Compare two programs, and look for a change of one if they differ."""
    from stablenum.commands.diff.fixing import Fixed, check_fixable, fixed
    from stablenum.commands.diff.progress import shown
    from stablenum.diagnosis.diff.compare import examined

    check_fixable(pair, side)
    with shown(Terminal(stderr=True)) as progress:
        found = examined(pair.left, pair.right, pair.weights, steps, progress=progress)
    if found[0].ok:
        return found[0], None
    took = time.monotonic() - begun
    with Terminal(stderr=True).status("looking for a change") as status:

        def progress_of(text: str) -> None:
            status.update(escape(text))

        try:
            changes = fixed(pair, found, steps, side=side, took=took, say=progress_of)
        except Exception as error:  # noqa: BLE001  the comparison itself is whole
            changes = Fixed.without(f"a change could not be looked for: {type(error).__name__}: {error}")
    return replace(found[0], fixes=changes.fixes), changes


def _tell(changes: Fixed, *, write: bool) -> bool:
    """Say what has come of the changes, write them if that is asked for, and return whether the programs
    agree with what is proven."""
    if changes.agrees:
        apply(changes.before, changes.after, write=write, say=lambda text: say(text, err=True))
    else:
        say(f"no change is proven, and nothing was written: {changes.tried}", err=True)
    return changes.agrees


def _reproduce(report: DiffReport, folder: Path) -> None:
    if report.ok:
        say(f"--repro: there is no difference to reproduce; {folder} was not written.", err=True)
        return
    try:
        report.write_repro(folder)
    except OSError as error:
        raise typer.BadParameter(str(error), param_hint="--repro") from error
