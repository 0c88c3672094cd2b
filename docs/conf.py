"""Sphinx configuration."""

from __future__ import annotations

import json
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


def write_benchmarks(results: Path, directory: Path) -> None:
    """The tables of the last benchmark run, from the file that it wrote."""
    report = json.loads(results.read_text(encoding="utf-8"))
    machine, versions = report.pop("machine"), report.pop("versions")
    python = report.pop("python")
    software = ", ".join(f"{name} {version}" for name, version in versions.items())
    lines = [f"{machine['cpu_count']} cores, {machine['architecture']}, Python {python}, {software}.", ""]
    for title, rows in report.items():
        for row in rows:
            ratio = next(key for key in row if key.startswith(("extra", "ratio")))
            lines += [
                f"### {title}: {row['size']}",
                "",
                f"| | median ms | spread | {ratio} | temporary memory, bytes |",
                "| --- | --- | --- | --- | --- |",
            ]
            for name, time in row["times"].items():
                temporary = row.get("temp_bytes", {}).get(name, "")
                figures = f"{time['median_ms']:.2f} | {time['spread']:.0%} | {row[ratio].get(name, '')}"
                lines.append(f"| {name} | {figures} | {temporary} |")
            lines.append("")
    (directory / "benchmarks.md").write_text("\n".join(lines), encoding="utf-8")


def setup(app: object) -> None:
    """Called by Sphinx before it reads the pages."""
    here = Path(__file__).parent
    generated = here / "_build" / "generated"
    write_reasons(generated)
    write_benchmarks(here.parent / "benchmarks" / "results" / "cpu.json", generated)
