"""What ``stablenum checkup`` and ``stablenum explain`` add to the time of a script in which nothing fails.

Each round runs the script alone and under each command, in random order, each in a process of its own, and
gives the ratios to the script alone. The time of a process includes imports and compilation.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.repeats import known_within

__all__ = ["run"]

_HERE = Path(__file__).parent / "trainings"
# The scripts and their steps: some 15 seconds each on two cores.
_TRAININGS = {"torch": ("torch_lines.py", 200), "jax": ("jax_lines.py", 200)}
_ROUNDS = 3
_COMMANDS = {
    "script": (),
    "checkup": ("-m", "stablenum", "checkup"),
    "explain": ("-m", "stablenum", "explain"),
}


def _seconds(script: str, steps: int, command: tuple[str, ...]) -> float:
    arguments = [*(["--"] if command else []), str(steps)]
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *command, script, *arguments], cwd=_HERE, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} {script} ended with {done.returncode}: {done.stderr[-500:]}")
    return time.perf_counter() - start


def run(say: Callable[[str], object] = print) -> dict[str, Any]:
    """All figures: per framework, the script's seconds and the ratios of the commands, with half of their
    95 % intervals."""
    found: dict[str, Any] = {}
    for framework, (script, steps) in _TRAININGS.items():
        rounds: list[dict[str, float]] = []
        for number in range(_ROUNDS):
            order = random.Random(number).sample(sorted(_COMMANDS), len(_COMMANDS))
            rounds.append({name: _seconds(script, steps, _COMMANDS[name]) for name in order})
            say(f"{framework}: " + ", ".join(f"{name} {t:.1f} s" for name, t in rounds[-1].items()))
        row: dict[str, Any] = {
            "script": script,
            "steps": steps,
            "seconds": round(statistics.fmean(r["script"] for r in rounds), 2),
        }
        for name in list(_COMMANDS)[1:]:
            ratio, half = known_within([r[name] / r["script"] for r in rounds])
            row[name] = {"ratio": round(ratio, 3), "half_interval": round(half, 3)}
        found[framework] = row
    return {"trainings": found, "rounds": _ROUNDS}
