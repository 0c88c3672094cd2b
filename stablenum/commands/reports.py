"""What all reports of the commands have in common: what made them, and that they are always written."""

from __future__ import annotations

import importlib.metadata
import json as json_module
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import stablenum
from stablenum._support.files import write_text
from stablenum._support.outside_text import in_html
from stablenum.commands.outputs import write

__all__ = ["about", "as_json", "with_about", "write_reports"]

# The format of the JSON of all commands. It changes when a field is removed or means something else.
FORMAT = 1
_FRAMEWORKS = ("torch", "jax", "numpy", "optax")


def about(tool: str, *, seed: int | None = None, step: int | None = None) -> dict[str, Any]:
    """Return what made a report: versions, the command line, the seed, the date in UTC, the step concerned.

    Example:
        >>> made_by = about("explain", seed=0, step=12)
        >>> made_by["format"], made_by["tool"], made_by["seed"], made_by["step"]
        (1, 'explain', 0, 12)
    """
    return {
        "format": FORMAT,
        "tool": tool,
        "version": stablenum.__version__,
        "frameworks": {name: found for name in _FRAMEWORKS if (found := _version(name))},
        "command": ["stablenum", *sys.argv[1:]],
        "seed": seed,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "step": step,
    }


def as_json(made_by: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    """Return a report as strict JSON, with what made it."""
    return json_module.dumps({"about": dict(made_by), **report}, indent=2, allow_nan=False) + "\n"


def with_about(made_by: Mapping[str, Any], page: str) -> str:
    """Return a page that says at its end what made it."""
    versions = ", ".join(f"{name} {version}" for name, version in made_by["frameworks"].items())
    seed = "" if made_by["seed"] is None else f", seed {made_by['seed']}"
    said = f"stablenum {made_by['version']}, {versions}{seed}, {made_by['date']}"
    line = f"<footer>{in_html(said)}<br><code>{in_html(' '.join(made_by['command']))}</code></footer>"
    head, end, tail = page.rpartition("</body>")
    return f"{head}{line}{end}{tail}" if end else page + line


def write_reports(
    made_by: Mapping[str, Any],
    report: Callable[[], Mapping[str, Any]],
    page: Callable[[], str],
    *,
    json: Path | None,
    html: Path | None,
) -> list[Path]:
    """Write a report to the files that were asked for, and return these.

    Args:
        made_by: what :func:`about` returns.
        report: returns the report as plain values.
        page: returns the report as an HTML page.
        json, html: the files; None if one was not asked for.

    Raises:
        typer.BadParameter: a file cannot be written.
    """
    if json is not None:
        write(json, lambda path: write_text(path, as_json(made_by, report())), "--json")
    if html is not None:
        write(html, lambda path: write_text(path, with_about(made_by, page())), "--html")
    return [path for path in (json, html) if path is not None]


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
