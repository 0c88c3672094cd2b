"""The command ``stablenum``. A part is loaded only when what it needs is installed."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys

__all__ = ["main"]

# Module -> the name to install it by. All are in the extra "cli".
_EXPLAIN_NEEDS = {"rich": "rich", "typer": "typer"}
_NEEDS = {
    **_EXPLAIN_NEEDS,
    "matplotlib": "matplotlib",
    "ml_dtypes": "ml-dtypes",
    "numpy": "numpy",
    "sklearn": "scikit-learn",
}


def main() -> None:
    """Run the command; exit code 2 and a message if a library of the extra is missing."""
    explain = sys.argv[1:2] == ["explain"]
    needs = _EXPLAIN_NEEDS if explain else _NEEDS
    missing = sorted(name for module, name in needs.items() if importlib.util.find_spec(module) is None)
    if missing:
        sys.stderr.write(f"stablenum: the command needs {', '.join(missing)}: pip install 'stablenum[cli]'\n")
        sys.exit(2)
    if explain:  # the user's script: nothing of its surroundings is changed
        importlib.import_module("stablenum.commands.explain.command").app(prog_name="stablenum")
        return
    _settle_down()
    importlib.import_module("stablenum.commands.compare.command").app(prog_name="stablenum")


def _settle_down() -> None:
    """These trainings are small: threads cost more than they give, and compilers' logs hide the table.

    Only what the user has not set, and before the frameworks are loaded, which read it then.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_LOGS", "-all")
    for name in ("torch", "jax"):
        logging.getLogger(name).setLevel(logging.ERROR)
