"""Show on a terminal how far a comparison is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from stablenum.diagnosis.diff import compare

__all__ = ["shown"]


@contextmanager
def shown(console: Console) -> Iterator[compare.Progress]:
    """Return a function that is called with each stage as it begins; a bar shows it on a terminal, and
    disappears in the end."""
    width = max(map(len, compare.STAGES))
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(" " * width, total=len(compare.STAGES))

        def begin(stage: str) -> None:
            done = compare.STAGES.index(stage)
            progress.update(task, description=f"{stage:<{width}}", completed=done)

        yield begin
