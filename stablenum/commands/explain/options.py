"""What ``explain`` and ``checkup`` have in common: checks of the script, and writing of the reports."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from stablenum.commands.outputs import write

__all__ = [
    "Arguments",
    "AsModule",
    "Html",
    "Json",
    "Script",
    "Seed",
    "check_script",
    "say_to",
    "show",
]

Script = Annotated[str, typer.Argument(help="The training script (with --module, the module's name).")]
Arguments = Annotated[
    list[str] | None, typer.Argument(help="Arguments of the script, after '--'.", metavar="-- ARGS")
]
AsModule = Annotated[bool, typer.Option("--module", "-m", help="Run a module, as `python -m` does.")]
Seed = Annotated[
    int, typer.Option(min=0, help="Seed of the global random generators, set before the script starts.")
]
Json = Annotated[Path | None, typer.Option(help="Write the report as strict JSON.")]
Html = Annotated[Path | None, typer.Option(help="Write the report as a self-contained HTML page.")]


def check_script(script: str, module: bool) -> None:
    """Check that there is something to run."""
    if not module and not Path(script).is_file():
        raise typer.BadParameter(f"there is no file {script!r}.", param_hint="SCRIPT")


def say_to(err: Console) -> Callable[[str], None]:
    """Return a function that prints a message about the progress."""

    def say(text: str) -> None:
        err.print(Text(f"stablenum: {text}", style="dim"), soft_wrap=True)

    return say


def show(report: Any, json: Path | None, html: Path | None, say: Callable[[str], None]) -> None:
    """Print a report, and write it to the files that were named."""
    console = Console()
    if not console.is_terminal:
        typer.echo(str(report))
    else:
        console.print(report)
    for option, path, text in (
        ("--json", json, report.to_json() + "\n"),
        ("--html", html, report.to_html()),
    ):
        if path is not None:
            write(path, functools.partial(Path.write_text, data=text, encoding="utf-8"), option)
            say(f"wrote {path}")
