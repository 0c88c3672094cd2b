"""``stablenum diff``: the options, the exit codes, and where the report goes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from stablenum.commands.diff.pair import load_pair
from stablenum.commands.outputs import check_target, write
from stablenum.diagnosis.diff.compare import diff as compare
from stablenum.files import write_text

__all__ = ["diff"]


def diff(
    pair: Annotated[
        Path,
        typer.Argument(metavar="PAIR.py", help="A file that defines left() and right().", show_default=False),
    ],
    steps: Annotated[int, typer.Option(min=1, help="Compare so many training steps.")] = 1,
    json: Annotated[
        Path | None, typer.Option(help="Write the report as strict JSON.", show_default=False)
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(help="Write the report as a self-contained HTML page.", show_default=False),
    ] = None,
) -> None:
    """Compare two programs and name the first operation at which they part for another reason than rounding.

    PAIR.py defines left() and right(), each of which returns stablenum_torch.program(...) or
    stablenum_jax.program(...). The right program is given the parameters of the left one.

    The exit code is 0 if the programs agree, 1 if they differ, and 2 for a usage error.
    """
    for option, path in (("--json", json), ("--html", html)):
        check_target(option, path)
    left, right = load_pair(pair)
    try:
        report = compare(left, right, steps=steps)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="PAIR.py") from error
    if json is not None:
        write(json, lambda path: write_text(path, report.to_json() + "\n"), "--json")
    if html is not None:
        write(html, lambda path: write_text(path, report.to_html()), "--html")
    Console().print(report, soft_wrap=True)
    raise typer.Exit(0 if report.ok else 1)
