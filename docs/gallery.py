"""The page "A gallery of failures": each program in ``docs/failures`` with its output."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["EXPLAINED", "FAILURES", "FRAMEWORKS", "Shown", "said", "shown", "write_gallery"]

FAILURES = Path(__file__).parent / "failures"

EXPLAINED = ("train.py", "--lr", "0.01")
EXAMPLES = Path(__file__).parents[1] / "examples"

# In the order of the page.
FRAMEWORKS = {
    "torch": (
        "log_of_softmax",
        "where_trap",
        "norm_at_zero",
        "masked_row",
        "autocast_overflow",
        "loss_scale",
        "custom_backward",
        "labels",
        "batch_nan",
        "poisoned_adam",
        "causal_mask",
    ),
    "jax": ("jax_log_of_softmax", "jax_where_trap", "jax_scan", "jax_float16", "jax_data", "jax_bound"),
}


class Shown(NamedTuple):
    """A program and its output.

    Attributes:
        title: its docstring.
        source: the rest of the file.
        first_line: the line number at which ``source`` begins, to match the line numbers in the output.
        output: what it prints.
        report: its variable ``report``.
    """

    title: str
    source: str
    first_line: int
    output: str
    report: Any


def shown(name: str) -> Shown:
    """Run a program from its own folder, so that reports show its path as users would see it."""
    file = f"{name}.py"
    text = (FAILURES / file).read_text(encoding="utf-8")
    title, source = re.fullmatch(r'"""(.*?)"""\n+(.*)', text, re.DOTALL).groups()
    out = io.StringIO()
    with contextlib.chdir(FAILURES), contextlib.redirect_stdout(out):
        left = runpy.run_path(file, run_name="__main__")
    first_line = text[: text.index(source)].count("\n") + 1
    return Shown(title, source.rstrip(), first_line, out.getvalue().rstrip(), left["report"])


def explained() -> str:
    """What `stablenum explain` prints for the script on the page "Diagnosis": messages, then the report."""
    messages, report = said("explain", EXAMPLES / "explain", *EXPLAINED)
    return "\n".join([*messages, "", report])


def said(command: str, folder: Path, script: str, *arguments: str) -> tuple[list[str], str]:
    """The messages and the report of a command for a script in which it finds something."""
    line = [sys.executable, "-m", "stablenum", command, script, "--", *arguments]
    # The package may be importable only from the folder in which the pages are built.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(FAILURES.parents[1]), *sys.path])}
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 1 or not done.stdout:
        raise RuntimeError(f"{' '.join(line)} found nothing: {done.stdout}{done.stderr}")
    messages = [textwrap.fill(text, 88, subsequent_indent="  ") for text in done.stderr.splitlines()]
    return messages, done.stdout.strip()


def write_gallery(directory: Path) -> None:
    """Write ``gallery-torch.md``, ``gallery-jax.md`` and ``explain.md``, which the pages include."""
    (directory / "explain.md").write_text(f"```text\n{explained()}\n```\n", encoding="utf-8")
    for framework, names in FRAMEWORKS.items():
        parts = [_section(shown(name)) for name in names]
        (directory / f"gallery-{framework}.md").write_text("\n".join(parts), encoding="utf-8")


def _section(s: Shown) -> str:
    code = f"```{{code-block}} python\n:linenos:\n:lineno-start: {s.first_line}\n\n{s.source}\n```"
    return f"### {s.title.rstrip('.')}\n\n{code}\n\n```text\n{s.output}\n```\n"
