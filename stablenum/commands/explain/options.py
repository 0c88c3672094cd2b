"""What ``explain`` and ``checkup`` have in common: checks of the script, and writing of the reports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from stablenum._support.outside_text import in_html
from stablenum.commands.outputs import check_file
from stablenum.commands.terminal import Terminal, say
from stablenum.diagnosis.report.html import page
from stablenum.diagnosis.report.rich_lines import line
from stablenum.diagnosis.watch.plan import Outcome

__all__ = [
    "Arguments",
    "AsModule",
    "Html",
    "Json",
    "Script",
    "Seed",
    "check_script",
    "nothing_found",
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
    if module:
        return
    check_file(Path(script), "SCRIPT")
    if script.endswith(".ipynb"):
        raise typer.BadParameter(
            f"{script} is a notebook. Write its cells into a script first, which can be run by itself: "
            f"jupyter nbconvert --to script {script}",
            param_hint="SCRIPT",
        )


def say_to(err: Console) -> Callable[[str], None]:
    """Return a function that prints a message about the progress."""

    def say(text: str) -> None:
        err.print(line(f"stablenum: {text}", style="dim"), soft_wrap=True)

    return say


def show(report: Any) -> None:
    """Print a report."""
    console = Terminal()
    if console.is_terminal:
        console.print(report)
        return
    for text in str(report).split("\n"):
        say(text)


def nothing_found(summary: str, outcome: Outcome) -> tuple[dict[str, Any], Callable[[], str]]:
    """Return the report of a run in which nothing was found, as plain values, and what makes its page."""
    failed = bool(outcome.exit_code)
    plain = {
        "ok": not failed,
        "summary": summary,
        "passed_by": outcome.harmless,
        "exit_code": outcome.exit_code,
        "verdict": None,
    }
    title = "The script failed" if failed else "Nothing found"
    return plain, lambda: page(title, [f"<h1>{title}</h1>", f"<p>{in_html(summary)}.</p>"])
