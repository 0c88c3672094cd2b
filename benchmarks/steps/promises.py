"""Promises that the measured rows have to keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["SMALL", "broken_promises"]

# On 10 k parameters only the fixed cost of a step shows. There the guard has to add less to the bare step
# than GradScaler and clipping do; `stablenum_torch/_devices/generated_decide.py` exists for that.
SMALL = "torch adamw fused 10k/10 float32"
_CHEAPER_THAN_PEER = {SMALL: ("idle", "fold")}


def broken_promises(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence for each variant that adds as much to the bare step as the peer does, or more.

    Args:
        rows: the rows as ``summary.result_of`` gives them.
    """
    found = []
    for row in rows:
        for name in _CHEAPER_THAN_PEER.get(row.get("name", ""), ()):
            ours, peer = row["variants"][name], row["variants"][row["peer"]]
            if not ours["extra_ms"] < peer["extra_ms"]:
                found.append(
                    f"{row['name']}: promise broken: {ours['label']!r} adds {ours['extra_ms']:.3f} ms to a "
                    f"bare step, but {peer['label']!r} adds only {peer['extra_ms']:.3f} ms."
                )
    return found
