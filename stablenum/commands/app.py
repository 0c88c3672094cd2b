"""The typer application that holds the commands."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import stablenum
from stablenum._support.outside_text import printable
from stablenum.commands.index import COMMANDS, complaint
from stablenum.commands.terminal import say

__all__ = ["app_of"]

_UsageError: Any = typer.BadParameter.__base__  # of click, which newer versions of typer contain


def app_of(*commands: Callable[..., None]) -> typer.Typer:
    """Build the command ``stablenum`` with these functions as its subcommands, in this order."""
    app = typer.Typer(
        cls=_Group,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # brackets in the help are TOML, and paragraphs wrap
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for command in commands:
        app.command(cls=_Command, short_help=COMMANDS[command.__name__].about)(command)
    return app


class _Group(TyperGroup):
    """All commands. What is wrong with a command line is said in one line, whatever names are in it."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        return _in_one_line(super().make_context, *args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        return _in_one_line(super().invoke, ctx)


def _in_one_line(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return call(*args, **kwargs)
    except _UsageError as error:
        error.message = printable(error.message)
        raise


class _Command(TyperCommand):
    """A command that says which libraries it lacks when it is to run; and of an unknown option how a script
    gets it, if it runs a script with arguments."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)  # parsing takes them out of the list
        try:
            return super().parse_args(ctx, args)
        except _UsageError as error:
            option = getattr(error, "option_name", None)  # that of an option that there is not
            if option is not None and any(parameter.name == "arguments" for parameter in self.params):
                error.message += f". Arguments of the script go after '--'{_example(ctx, given, option)}"
            raise

    def invoke(self, ctx: Any) -> Any:
        if lacks := complaint(self.name or ""):
            say(f"stablenum: {lacks}", err=True)
            raise typer.Exit(2)
        return super().invoke(ctx)


def _example(ctx: Any, given: list[str], option: str) -> str:
    """Return the command line with ``--`` before the option, if that stands after the script."""
    places = [i for i, part in enumerate(given) if part.split("=")[0] == option]
    if not places or places[0] == 0:
        return "."
    changed = [*given[: places[0]], "--", *given[places[0] :]]
    return f": {ctx.command_path} {shlex.join(changed)}"


def _version(wanted: bool) -> None:
    if wanted:
        say(f"stablenum {stablenum.__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Numerical stability for training neural networks."""
