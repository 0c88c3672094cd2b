"""The page "Six programs that do not train": each program in ``docs/programs`` and what is found in it."""

from __future__ import annotations

from pathlib import Path

from gallery import said

__all__ = ["FOUND", "PROGRAMS", "found_in", "write_programs"]

PROGRAMS = Path(__file__).parent / "programs"

# Program -> the command that finds what is wrong with it, and what it finds.
FOUND = {
    "log_of_sigmoid": ("explain", "log gives -inf"),
    "large_weights": ("checkup", "exploding_activations"),
    "tiny_gradients": ("checkup", "flushed_gradients"),
    "half_precision_steps": ("checkup", "lost_updates"),
    "large_loss": ("checkup", "no_graph"),
    "small_loss": ("checkup", "flushed_gradients"),
}


def found_in(name: str) -> str:
    """What the command prints for a program."""
    return said(FOUND[name][0], PROGRAMS, f"{name}.py")[1]


def write_programs(directory: Path) -> None:
    """Write ``program-NAME.md`` for each program: its code, the command, and what it prints."""
    for name, (command, _) in FOUND.items():
        code = (PROGRAMS / f"{name}.py").read_text(encoding="utf-8").rstrip()
        parts = [
            f"```{{code-block}} python\n:linenos:\n\n{code}\n```",
            f"```console\n$ stablenum {command} {name}.py\n```",
            f"```text\n{found_in(name)}\n```",
        ]
        (directory / f"program-{name}.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
