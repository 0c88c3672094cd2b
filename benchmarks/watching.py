"""What ``stablenum checkup`` and ``stablenum explain`` add to the time of a script in which nothing fails.

Each round runs the script alone and under each command, in random order, each in a process of its own, and
gives the ratios to the script alone. The time of a process includes imports and compilation.

``small_steps`` measures what ``stablenum explain`` adds to a step of a fraction of a millisecond. The scripts
time their steps themselves, and give the fastest block of 10, in which none is measured for the checkup.
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

__all__ = ["run", "small_steps"]

_HERE = Path(__file__).parent / "trainings"
# The scripts and their steps: some 15 seconds each on two cores.
_TRAININGS = {"torch": ("torch_lines.py", 200), "jax": ("jax_lines.py", 200)}
_ROUNDS = 3
# The scripts with small steps, each with its optimizers; the steps take some seconds, so that a block of them
# finds the machine quiet.
_SMALL = {"torch": ("torch_small.py", ("sgd", "adam")), "jax": ("jax_small.py", ("sgd", "adam"))}
_SMALL_STEPS, _SMALL_ROUNDS = 4000, 3
_LEAST = "the fastest block of 10 steps of all rounds; each round runs the script alone, then watched"
_COMMANDS = {
    "script": (),
    "checkup": ("-m", "stablenum", "checkup"),
    "explain": ("-m", "stablenum", "explain"),
}


def _output(script: str, arguments: tuple[str, ...], command: tuple[str, ...]) -> str:
    """What a script prints, under a command of ours or alone."""
    given = [*command, script, *(["--"] if command else []), *arguments]
    done = subprocess.run([sys.executable, *given], cwd=_HERE, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(given)} ended with {done.returncode}: {done.stderr[-500:]}")
    return done.stdout


def _seconds(script: str, steps: int, command: tuple[str, ...]) -> float:
    start = time.perf_counter()
    _output(script, (str(steps),), command)
    return time.perf_counter() - start


def small_steps(say: Callable[[str], object] = print) -> dict[str, Any]:
    """Per framework and optimizer, the milliseconds of a step, alone and under ``stablenum explain``: the
    least of all processes, and the ratio of these."""
    found: dict[str, Any] = {}
    for framework, (script, optimizers) in _SMALL.items():
        for optimizer in optimizers:
            times: dict[str, list[float]] = {"script": [], "explain": []}
            for _ in range(_SMALL_ROUNDS):
                for name, known in times.items():
                    printed = _output(script, (optimizer, str(_SMALL_STEPS)), _COMMANDS[name])
                    known.append(float(printed.split()[0]))
            alone, watched = (min(known) for known in times.values())
            say(f"{framework} {optimizer}: {alone:.3f} ms alone, {watched:.3f} ms watched")
            found[f"{framework} {optimizer}"] = {
                "script": script,
                "ms": round(alone, 3),
                "explain_ms": round(watched, 3),
                "ratio": round(watched / alone, 2),
            }
    return {"small_steps": found, "steps": _SMALL_STEPS, "rounds": _SMALL_ROUNDS, "measured": _LEAST}


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
