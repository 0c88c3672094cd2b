"""The typer application that holds the commands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

import stablenum

__all__ = ["app_of"]


def app_of(*commands: Callable[..., None]) -> typer.Typer:
    """Build the command ``stablenum`` with these functions as its subcommands, in this order."""
    app = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # brackets in the help are TOML, and paragraphs wrap
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for command in commands:
        app.command()(command)
    return app


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"stablenum {stablenum.__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Numerical stability for training neural networks."""
