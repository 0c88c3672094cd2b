"""``stablenum demo``: the options, and what is printed."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from stablenum.commands.terminal import say

__all__ = ["demo"]

_WIDTH = 96  # as that of the reports


def demo(
    html: Annotated[Path, typer.Option(help="Write the page here.")] = Path("stablenum-demo.html"),
    scripts: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write the three scripts into a folder instead, and exit."),
    ] = None,
) -> None:
    """Show what the library does, in one to two minutes on two cores.

    A network that learns digits in float16 dies of bad batches without a guard and survives with one, in
    each framework that is installed; then `explain`, `checkup` and `diff` are run on three small scripts.
    What they print is shown as it is, and all of it is written into a page.

    The exit code is 0 if all parts ran, and 1 if one of them failed or lacks a framework.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from stablenum.commands.demo import page, story, tour
    from stablenum.commands.outputs import check_target, write

    if scripts is not None:
        try:
            made = tour.copy_scripts(scripts)
        except OSError as error:
            raise typer.BadParameter(str(error), param_hint="--scripts") from error
        for shown, path in zip(tour.SHOWN, made, strict=True):
            say(f"{path}: {shown.line}")
        return
    check_target("--html", html)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        parts = len(tour.SHOWN) + len(tour.BACKENDS)
        task = progress.add_task("training and diagnosing", total=parts)
        found = tour.run(lambda name: progress.update(task, advance=1, description=f"done: {name}"))
    if found.trainings:
        for text in (story.outcome(found.trainings), story.agreement(found.trainings)):
            _say_all(textwrap.wrap(text, _WIDTH))
        for step, cells in story.events(found.trainings):
            names = [tour.BACKENDS[name][1] for name in found.trainings]
            say(f"  step {step:3}  " + "   ".join(map(": ".join, zip(names, cells, strict=True))))
    for shown in tour.SHOWN:
        if shown.line in found.outputs:
            lines = found.outputs[shown.line].split("\n")
            _say_all(["", *textwrap.wrap(shown.about, _WIDTH), "", f"$ {shown.line}", *lines[: shown.lines]])
            if len(lines) > shown.lines:
                say(f"... {len(lines) - shown.lines} more lines are on the page")
    text = page.as_html(found)
    write(html, lambda path: path.write_text(text, encoding="utf-8"), "--html")
    for why in found.failed:
        say(f"not shown: {why}", err=True)
    _say_all(["", str(html)])
    if found.failed:
        raise typer.Exit(1)


def _say_all(lines: Iterable[str]) -> None:
    for line in lines:
        say(line)
