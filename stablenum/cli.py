"""The command ``stablenum``. Subcommands are imported only once the libraries they need have been found."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typer import Typer

__all__ = ["app", "main"]

# Maps each module that a subcommand imports to the distribution that provides it. All are in the extra "cli".
_EXPLAIN_NEEDS = {"rich": "rich", "typer": "typer"}
_DIFF_NEEDS = {**_EXPLAIN_NEEDS, "numpy": "numpy"}
_CHECK_NEEDS = {**_DIFF_NEEDS, "ml_dtypes": "ml-dtypes"}
_NEEDS = {
    **_EXPLAIN_NEEDS,
    "matplotlib": "matplotlib",
    "ml_dtypes": "ml-dtypes",
    "numpy": "numpy",
    "sklearn": "scikit-learn",
}

_MODULES = {
    "compare": "compare.command",
    "explain": "explain.command",
    "checkup": "explain.checkup_command",
    "diff": "diff.command",
    "check": "check.command",
    "report": "report.command",
}
_OWN_NEEDS = {
    "explain": _EXPLAIN_NEEDS,
    "checkup": _EXPLAIN_NEEDS,
    "diff": _DIFF_NEEDS,
    "check": _CHECK_NEEDS,
    "report": _EXPLAIN_NEEDS,
}


def main() -> None:
    """Run the command, or exit with code 2 and a message if a library of the extra ``cli`` is missing."""
    running = sys.argv[1] if len(sys.argv) > 1 and sys.argv[1] in _OWN_NEEDS else ""
    needs = _OWN_NEEDS.get(running, _NEEDS)
    missing = sorted(name for module, name in needs.items() if importlib.util.find_spec(module) is None)
    if missing:
        sys.stderr.write(f"stablenum: the command needs {', '.join(missing)}: pip install 'stablenum[cli]'\n")
        sys.exit(2)
    if running:  # these commands run the user's programs or read files; the environment stays unchanged
        app(running)(prog_name="stablenum")
        return
    _keep_quiet()
    app("compare", "explain", "checkup", "diff", "check", "report")(prog_name="stablenum")


def app(*names: str) -> Typer:
    """Import the named subcommands and build a command line from them."""
    from stablenum.commands.app import app_of

    modules = {name: importlib.import_module(f"stablenum.commands.{_MODULES[name]}") for name in names}
    return app_of(*(getattr(module, name) for name, module in modules.items()))


def _keep_quiet() -> None:
    """Use one thread, because the trainings are small, and turn off compiler logs that would hide the table.

    Environment variables that the user has set keep their values. Frameworks read these variables when they
    are imported, so this function runs first.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_LOGS", "-all")
    for name in ("torch", "jax"):
        logging.getLogger(name).setLevel(logging.ERROR)
