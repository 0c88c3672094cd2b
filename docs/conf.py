"""Sphinx configuration."""

from __future__ import annotations

from pathlib import Path

import stablenum
from stablenum.status import EXPLANATIONS, Reason

project = "stablenum"
copyright = "the stablenum authors"
release = version = stablenum.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"stablenum {release}"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True


def write_reasons(directory: Path) -> None:
    """The table of reason codes, from the one in the code, so that it is never stale."""
    lines = ["| code | name | what happened | likely cause | remedy |", "| --- | --- | --- | --- | --- |"]
    for reason in Reason:
        row = EXPLANATIONS[reason]
        lines.append(f"| {int(reason)} | `{reason.name}` | {row.what} | {row.cause} | {row.remedy} |")
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "reasons-table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def setup(app: object) -> None:
    """Called by Sphinx before it reads the pages."""
    write_reasons(Path(__file__).parent / "_build" / "generated")
