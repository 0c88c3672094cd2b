"""``stablenum record``: write a program's numbers into a file, to be compared later and elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stablenum.commands.diff.command import Side
from stablenum.commands.outputs import check_suffix, check_target
from stablenum.commands.terminal import Terminal, say
from stablenum.errors import ProgramError

__all__ = ["record"]


def record(
    program: Annotated[
        Path,
        typer.Argument(metavar="PROGRAM.py", help="A file that defines program().", show_default=False),
    ],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FILE.snum", help="Where to write.", show_default=False),
    ],
    steps: Annotated[int, typer.Option(min=1, help="Record this many training steps.")] = 1,
    side: Annotated[
        Side | None, typer.Option(help="Call left() or right() instead of program().", show_default=False)
    ] = None,
) -> None:
    """Record a program's numbers in a file, with which it can be compared in another environment.

    PROGRAM.py defines program(), which returns stablenum_torch.program(...) or stablenum_jax.program(...).
    `stablenum diff FILE.snum PROGRAM.py` compares. Weights of more than 256 KiB lie beside the file, in
    FILE.snum.HASH.weights.

    Experimental: the format may change in a minor version.

    The exit code is 0 if the file was written, and 2 if the program failed or the file cannot be written.
    """
    # They import NumPy, and the help is shown without it.
    from stablenum.commands.diff.pair import failed, load_program_of
    from stablenum.diagnosis.diff.lockfile.saving import recording_of, write_program

    check_target("--output", output)
    check_suffix("--output", output, (".snum",))
    made = load_program_of(program, side and side.value)
    try:
        with Terminal(stderr=True).status("recording the program"):
            recording = recording_of(made, steps)
    except (ProgramError, ValueError) as error:
        raise failed(str(error)) from error
    try:
        write_program(recording, output)
    except (OSError, ValueError) as error:
        raise failed(f"{output} was not written: {error}") from error
    told = f"{recording.steps} training step{'s' * (recording.steps > 1)}"
    say(f"{output}: {len(recording.trace.steps):,} operations, {told}")
