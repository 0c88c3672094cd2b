"""The stories: text notebooks that are run from start to end, and written with their outputs.

python docs/notebooks.py                      # write all of them, each beside its text
python docs/notebooks.py run-dies --to FOLDER
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sysconfig
import tempfile
from pathlib import Path

import jupytext
import nbclient
import nbformat

__all__ = ["STORIES", "committed", "executed", "notebook_of", "sources"]

DOCS = Path(__file__).parent
STORIES = DOCS / "stories"
_SECONDS = 600


def sources() -> list[Path]:
    """The text of each story."""
    return sorted(STORIES.glob("*.md"))


def committed(source: Path) -> nbformat.NotebookNode:
    """The notebook as it was executed last."""
    return nbformat.read(source.with_suffix(".ipynb"), as_version=4)


def notebook_of(source: Path) -> nbformat.NotebookNode:
    """The cells of a text, without outputs."""
    notebook = jupytext.read(source)
    kernel = notebook.metadata["kernelspec"]
    notebook.metadata = nbformat.NotebookNode(kernelspec=kernel, language_info={"name": "python"})
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"  # by default a random one, which would differ in each version
    return notebook


def executed(source: Path) -> nbformat.NotebookNode:
    """Run a story in a clean kernel and an empty folder.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell fails.
        ValueError: an output contains the temporary folder.
    """
    notebook = notebook_of(source)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(
            DOCS / "figures", Path(folder, "figures"), ignore=shutil.ignore_patterns("__pycache__")
        )
        there = Path(folder, STORIES.name)
        there.mkdir()
        client = nbclient.NotebookClient(
            notebook,
            timeout=_SECONDS,
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": str(there)}},
        )
        client.execute(env=_environment())
        if folder in json.dumps(notebook):
            raise ValueError(f"an output of {source.name} contains the name of a temporary folder")
    notebook.metadata["language_info"] = {"name": "python"}  # the version of Python is no part of the story
    return notebook


def _environment() -> dict[str, str]:
    """The commands of this environment, this copy of the packages, and one thread on a CPU."""
    return {
        **os.environ,
        "PATH": os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")]),
        "PYTHONPATH": str(DOCS.parent),
        "OMP_NUM_THREADS": "1",
        "JAX_PLATFORMS": "cpu",
    }


def main() -> None:
    """Write the notebooks of the named stories, or of all."""
    by_name = {source.stem: source for source in sources()}
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"{' or '.join(by_name)}; all by default")
    parser.add_argument("--to", type=Path, default=STORIES, help="the folder to write to")
    asked = parser.parse_args()
    for name in set(asked.names) - by_name.keys():
        parser.error(f"there is no story {name!r}, only {' and '.join(by_name)}")
    for name in asked.names or by_name:
        nbformat.write(executed(by_name[name]), asked.to / f"{name}.ipynb")


if __name__ == "__main__":
    main()
