"""Tables for the terminal."""

from __future__ import annotations

from typing import Any

from rich.table import Table

__all__ = ["row_table"]


def row_table(row: dict[str, Any]) -> Table:
    """The table of one measured row, with one line per variant."""
    table = Table(title=row["name"])
    counted = ("gradient_reads", "gradient_writes", "traffic", "operations", "host_waits")
    columns = [name for name in counted if name in row["variants"]["bare"]]
    head = ["variant", "median ms", "spread", "x bare", "+-", f"extra / {row['peer']}'s", "+-", *columns]
    for column in [*head, "peak kB"]:
        table.add_column(column, justify="left" if column == "variant" else "right")
    for name, v in row["variants"].items():
        cells = [
            name,
            f"{v['median_ms']:.3f}",
            f"{v['spread']:.0%}",
            f"{v['ratio_to_bare']:.2f}",
            f"{v['uncertainty']:.1%}" if "uncertainty" in v else "",
            f"{v['extra_over_peers']:.2f}" if "extra_over_peers" in v else "",
            f"{v['extra_over_peers_within']:.2f}" if "extra_over_peers_within" in v else "",
            *(f"{v[column]:g}" for column in columns),
            f"{v['peak_bytes'] / 1000:,.0f}",
        ]
        table.add_row(*cells)
    return table
