"""The options of the command ``stablenum``, read from the command itself."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import typer.main
from measured import table

from stablenum import cli
from stablenum.commands.index import COMMANDS

__all__ = ["write_commands"]


def write_commands(directory: Path) -> None:
    """Write ``commands.md``: a section per command, with its help and a table of its options."""
    root = typer.main.get_command(cli.app(*COMMANDS))
    text = "\n\n".join(_section(name, root.commands[name]) for name in COMMANDS)
    (directory / "commands.md").write_text(text + "\n", encoding="utf-8")


def _section(name: str, command: Any) -> str:
    context = command.make_context(name, ["--help"], resilient_parsing=True)
    usage = " ".join(command.collect_usage_pieces(context))
    rows = [record for p in command.get_params(context) if (record := p.get_help_record(context))]
    options = [[f"`{option}`".replace("|", "\\|"), _plain(about)] for option, about in rows]
    help_text = inspect.cleandoc(command.help or "")
    parts = (f"## `stablenum {name}`", help_text, f"```text\nstablenum {name} {usage}\n```")
    return "\n\n".join((*parts, "\n".join(table(["option", "what it does"], options))))


# An option, or the two hyphens before the script's arguments.
_OPTION = re.compile(r"'(--)'|(?<![\w`-])(--\w+(?: '[^']*')?)")


def _plain(text: str) -> str:
    """Text that Markdown shows as it is. Options become code, since Sphinx makes a dash of two hyphens."""
    done, shown = 0, ""
    for found in _OPTION.finditer(text):
        shown += f"{_escaped(text[done : found.start()])}`{found[1] or found[2]}`"
        done = found.end()
    return " ".join((shown + _escaped(text[done:])).split())


def _escaped(text: str) -> str:
    for mark in ("\\", "[", "]", "*", "|", "<"):
        text = text.replace(mark, "\\" + mark)
    return text
