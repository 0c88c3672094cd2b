"""``python -m benchmarks``: run everything, print tables, write ``benchmarks/results/cpu.json``.

Exits with an error if a peer is missing or a result differs from the peer's: no figure is printed
that was not measured.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import jax_step, torch_step

RESULTS = Path(__file__).parent / "results" / "cpu.json"
PACKAGES = ("torch", "jax", "jaxlib", "optax", "numpy", "stablenum")


def _table(title: str, row: dict[str, Any]) -> Table:
    ratios = next((v for k, v in row.items() if k.startswith(("extra", "ratio"))), {})
    ratio_name = next((k for k in row if k.startswith(("extra", "ratio"))), "")
    table = Table(title=f"{title}: {row['size']}")
    for column in ("variant", "median ms", "spread", ratio_name, "temp bytes"):
        table.add_column(column)
    for name, time in row["times"].items():
        temp = row.get("temp_bytes", {}).get(name)
        cells = [
            f"{time['median_ms']:.3f}",
            f"{time['spread']:.0%}",
            str(ratios.get(name, "")),
            str(temp or ""),
        ]
        table.add_row(name, *cells)
    return table


def main() -> None:
    """Measure, show, save."""
    console = Console()
    report: dict[str, Any] = {
        "machine": {"cpu_count": os.cpu_count(), "architecture": platform.machine()},
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
    }
    for title, module in (("PyTorch, fused AdamW", torch_step), ("JAX, adamw", jax_step)):
        console.print(f"measuring: {title} ...")
        report[title] = module.run()
        for row in report[title]:
            console.print(_table(title, row))
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(report, indent=2) + "\n")
    console.print(f"written to {RESULTS}")


if __name__ == "__main__":
    main()
