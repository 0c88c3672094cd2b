"""The command ``stablenum``. Its subcommands are imported only if the extra ``cli`` is installed."""

from __future__ import annotations

import errno
import importlib
import logging
import os
import sys
from typing import TYPE_CHECKING

import stablenum
from stablenum.commands.index import COMMANDS, complaint, is_app_there

if TYPE_CHECKING:
    from typer import Typer

__all__ = ["app", "main"]

_CLOSED_PIPE = 128 + 13  # as a shell reports a program that SIGPIPE has ended
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def main() -> None:
    """Run the command. Without the extra ``cli``, list the subcommands, or exit with code 2 and a message."""
    words = sys.argv[1:]
    if not is_app_there():
        sys.exit(_without_app(words))
    running = [word for word in words[:1] if word in COMMANDS]
    if running == ["compare"]:  # the others run the user's programs or read files: the environment stays
        _keep_quiet()
    try:
        app(*(running or COMMANDS))(prog_name="stablenum")
    except SystemExit as end:
        # Click ends with 1, which means "found", where the reader of a pipe has closed it.
        if getattr(end.__context__, "errno", None) != errno.EPIPE:
            raise
        sys.exit(_CLOSED_PIPE)
    except OSError as error:
        if error.filename is not None or error.errno not in _DISK:
            raise
        # Where the output goes takes no more. What is still buffered is given up, or the exit would fail too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.stderr.write(f"stablenum: the output cannot be written: {error.strerror}\n")
        sys.exit(2)


def app(*names: str) -> Typer:
    """Import the named subcommands and build a command line from them."""
    from stablenum.commands.app import app_of

    modules = {name: importlib.import_module(f"stablenum.commands.{COMMANDS[name].module}") for name in names}
    return app_of(*(getattr(module, name) for name, module in modules.items()))


def _without_app(words: list[str]) -> int:
    """Do what can be done without the libraries of the extra ``cli``, and return the exit code."""
    first = words[0] if words else ""
    if first == "--version":
        sys.stdout.write(f"stablenum {stablenum.__version__}\n")
        return 0
    if first in ("", "-h", "--help"):
        sys.stdout.write(_listing())
        return 0 if first else 2  # as the app, whose help it is
    lacks = complaint(first) if first in COMMANDS else f"there is no command {first!r}; try --help"
    sys.stderr.write(f"stablenum: {lacks}\n")
    return 2


def _listing() -> str:
    """Return the commands, each with what it lacks, as the app shows its help."""
    width = max(map(len, COMMANDS))
    listed = []
    for name, command in COMMANDS.items():
        lacks = str(complaint(name)).removeprefix(f"{name} ")
        listed.append(f"  {name:<{width}}  {command.about}\n  {'':<{width}}  {lacks}\n")
    return (
        "Usage: stablenum COMMAND [ARGS]...\n\n"
        "  Numerical stability for training neural networks.\n\n"
        "Options:\n"
        "  --version   Show the version and exit.\n"
        "  -h, --help  Show this message and exit.\n\n"
        f"Commands:\n{''.join(listed)}"
    )


def _keep_quiet() -> None:
    """Use one thread, because the trainings are small, and turn off compiler logs that would hide the table.

    Environment variables that the user has set keep their values. Frameworks read these variables when they
    are imported, so this function runs first.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_LOGS", "-all")
    for name in ("torch", "jax"):
        logging.getLogger(name).setLevel(logging.ERROR)
