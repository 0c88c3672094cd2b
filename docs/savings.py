"""Tables of what checkpoints and snapshots cost."""

from __future__ import annotations

from pathlib import Path

from measured import read, table, with_software

__all__ = ["write_checkpoint_cost", "write_recovery_cost"]

_VARIANTS = ("bare", "flushed", "gated", "finiteness", "checksums", "read", "gated read")


def write_checkpoint_cost(results: Path, directory: Path) -> None:
    """Write ``checkpoint-cost.md``: milliseconds per GB of each format, a row for each.

    Raises:
        FileNotFoundError: there are no results.
        KeyError: the file does not have the form that ``benchmarks.checkpoints`` writes.
    """
    report = read(results, "checkpoints")
    body = []
    for row in report["rows"]:
        cells = [f"{row['variants'][name]['ms_per_gb']:,.0f}" for name in _VARIANTS]
        cells[2] += f" ({row['ratio_to_bare']:.1f} x)"
        body.append([_shown(row["format"]), *cells])
    lines = table(["ms per GB", *_VARIANTS], body)
    (directory / "checkpoint-cost.md").write_text(with_software(lines, report), "utf-8")


def write_recovery_cost(results: Path, directory: Path) -> None:
    """Write a table under the name of the results: the time of a step with and without a recovery, and the
    memory.

    Raises:
        FileNotFoundError: there are no results.
        KeyError: the file does not have the form that ``benchmarks.recovery_cost`` writes.
    """
    report = read(results, results.stem)
    body = []
    for row in report["rows"]:
        plain, *others = (row["variants"][name] for name in ("plain", "checked", "snapshots"))
        more = [f"{other['ratio_to_plain'] - 1:+.1%}" for other in others]
        sizes = [f"{row[key] / 1e6:,.0f}" for key in ("state_bytes", "snapshot_bytes")]
        body.append([row["framework"], row["size"], f"{plain['ms_per_step']:.2f}", *more, *sizes])
    head = ["", "", "ms per step", "with checks", "with checks and snapshots", "state, MB", "a snapshot, MB"]
    (directory / f"{results.stem}.md").write_text(with_software(table(head, body), report), "utf-8")


def _shown(name: str) -> str:
    framework, _, form = name.rpartition(" ")
    return f"`{form}`, {'JAX' if framework else 'PyTorch'}"
