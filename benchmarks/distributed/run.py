"""Measure each number of ranks in several launches: ``python -m benchmarks distributed``."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.distributed.worker import BARE_BESIDE_EXACT, BY_HAND, EXACT, LAYOUTS
from benchmarks.launching import said_by_the_first
from benchmarks.repeats import Timed, known_within, pooled, quotient_within, timed

__all__ = ["peer_versions", "run"]

WORLDS, LAUNCHES, ROUNDS = (1, 2, 4, 8), 4, 24
LAYERS, WIDTH = 25, 280  # 2.0 M parameters in 50 tensors
_PATIENCE_S = 300


def peer_versions() -> dict[str, str | None]:
    """The version of torchtitan; None if it is not installed, and its rows are missing."""
    found = importlib.util.find_spec("torchtitan") is not None
    return {"torchtitan": importlib.metadata.version("torchtitan") if found else None}


def run(
    worlds: Sequence[int] = WORLDS,
    launches: int = LAUNCHES,
    rounds: int = ROUNDS,
    layers: int = LAYERS,
    width: int = WIDTH,
    *,
    say: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """One row for each layout and number of ranks.

    Raises:
        BenchmarkError: a rank failed, computed a wrong result, or did not end.
    """
    rows = []
    for world in worlds:
        say(f"{world} ranks ...")
        parts = [launch(world, rounds, turn, layers, width) for turn in range(launches)]
        rows += [row(layout, world, [part[layout] for part in parts], layers, width) for layout in LAYOUTS]
    return rows


def launch(world: int, rounds: int, turn: int, layers: int, width: int) -> dict[str, Any]:
    """What rank 0 of ``world`` processes measured, by layout.

    Raises:
        BenchmarkError: a rank failed, or did not end.
    """
    with tempfile.TemporaryDirectory() as folder:
        numbers = [str(n) for n in (rounds, turn, layers, width)]
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.distributed.worker", str(world)]
        command += [str(Path(folder) / "meeting"), *numbers]
        found: dict[str, Any] = said_by_the_first(
            command,
            world,
            all_of_them=f"the {world} ranks",
            one_of_them=f"a rank of {world}",
            patience=_PATIENCE_S,
            environment={"OMP_NUM_THREADS": "1"},
        )
    return found


def row(layout: str, world: int, parts: Sequence[dict[str, Any]], layers: int, width: int) -> dict[str, Any]:
    """The figures of one layout and number of ranks, over all launches."""
    processes = timed(parts)
    variants = {name: figures(processes, name, counts) for name, counts in parts[0]["counts"].items()}
    return {
        "layout": layout,
        "ranks": world,
        "launches": len(parts),
        "rounds": len(parts[0]["samples"]["bare"]),
        "parameters": layers * (width * width + width),
        "tensors": 2 * layers,
        "peer": BY_HAND,
        "variants": variants,
    }


def figures(processes: Sequence[Timed], name: str, counts: dict[str, int]) -> dict[str, Any]:
    """What a variant adds to the bare step, in milliseconds and relative to what the peer adds."""
    found: dict[str, Any] = pooled(processes, name).as_dict() | counts
    if name == "bare":
        return found
    extra = extras(processes, name)
    mean, half = known_within(extra)
    found |= {"extra_ms": round(mean, 4), "extra_ms_within": round(half, 4) if len(extra) > 1 else None}
    quotient = quotient_within(extra, extras(processes, BY_HAND))
    if quotient is not None and len(extra) > 1 and name != BY_HAND:
        ratio, within = quotient
        found |= {"extra_over_peers": round(ratio, 4), "extra_over_peers_within": round(within, 4)}
    return found


def extras(processes: Sequence[Timed], name: str) -> list[float]:
    """The milliseconds that a variant adds to the bare step, in each launch."""
    beside = BARE_BESIDE_EXACT if name == EXACT else "bare"
    return [process[name].median_above(process[beside]) for process in processes]
