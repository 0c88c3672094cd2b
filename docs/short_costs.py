"""A short table of costs, compared with the usual tools, from the results of the benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from measured import read, table

__all__ = ["write_short_costs"]

# The rows of each file of results, and what the page calls them.
_ROWS = {
    "cpu": {
        "torch adamw fused 10k/10 float32": "PyTorch, 2 CPU cores, 10 k parameters",
        "torch adamw fused 38M/108 float32": "PyTorch, 2 CPU cores, 38 M",
        "torch adamw fused 38M/108 bfloat16": "PyTorch, 2 CPU cores, 38 M, bfloat16 gradients",
        "jax adamw xla 38M/108 float32": "JAX, 2 CPU cores, 38 M",
    },
    "gpu-h100": {
        "torch adamw fused 10k/10 float32": "PyTorch, H100, 10 k",
        "torch adamw fused 38M/108 float32": "PyTorch, H100, 38 M",
        "jax adamw xla 38M/108 float32": "JAX, H100, 38 M",
    },
}
_PARTS = {"cpu": "steps", "gpu-h100": "gpu"}


def write_short_costs(results: Path, directory: Path) -> None:
    """Write ``short-costs.md``: a bare step in milliseconds, and the peer's and ours as multiples of it.

    Raises:
        FileNotFoundError: there are no results.
        KeyError: a row is missing.
    """
    body = []
    for file, wanted in _ROWS.items():
        rows = {row["name"]: row for row in read(results / f"{file}.json", _PARTS[file])["rows"]}
        body += [_row(title, rows[name]) for name, title in wanted.items()]
    head = ["a step of AdamW", "bare, ms", "with the usual tools, times", "guarded: scale and clip, times"]
    (directory / "short-costs.md").write_text("\n".join(table(head, body)) + "\n", encoding="utf-8")


def _row(title: str, row: dict[str, Any]) -> list[str]:
    bare, peer, ours = (row["variants"][name] for name in ("bare", row["peer"], "fold"))
    times = [f"{variant['ratio_to_bare']:.2f}" for variant in (peer, ours)]
    return [title, _ms(bare), f"{times[0]} ({peer['label']})", times[1]]


def _ms(variant: dict[str, Any]) -> str:
    ms = variant["median_ms"]
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"
