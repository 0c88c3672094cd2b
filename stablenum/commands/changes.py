"""What ``--fix`` and ``--write`` of several commands have in common: what is said, and what is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated

import typer

from stablenum.commands.terminal import say as say_line
from stablenum.diagnosis.edits.edit import StaleEditError
from stablenum.diagnosis.edits.files import write_changes

__all__ = ["Write", "apply", "check_write"]

Write = Annotated[
    bool,
    typer.Option("--write", help="With `--fix`: write the change if it is proven; a copy is kept beside it."),
]


def check_write(*, fix: bool, write: bool) -> None:
    """Check that there is something that ``--write`` could write."""
    if write and not fix:
        raise typer.BadParameter("needs --fix, whose change it writes", param_hint="--write")


def apply(
    before: Mapping[str, str], after: Mapping[str, str], *, write: bool, say: Callable[[str], object]
) -> None:
    """Write proven changes if that is asked for, and say what was written.

    Args:
        before, after: the text of each file as it was read, and with the changes.
        write: whether it is asked for.
        say: called with what was done.

    Raises:
        typer.Exit: a file has changed meanwhile, or cannot be written.
    """
    if not write:
        say("nothing was written: --write applies what is proven")
        return
    try:
        for path, copy in write_changes(before, after):
            say(f"wrote {path}; as it was: {copy}")
    except (StaleEditError, OSError) as error:
        say_line(f"Error: {error}", err=True)
        raise typer.Exit(2) from error
