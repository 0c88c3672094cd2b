"""``python -m benchmarks partners``: what each partner's loop makes of each fault, alone and with a guard.

Each loop runs in a process of its own. A process that does not end in time is ended, and its faults count as
hanging.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.partners.loops import PARTNERS
from benchmarks.steps.errors import BenchmarkError

__all__ = ["VARIANTS", "packages", "run", "verdicts"]

VARIANTS = ("alone", "guarded")
_PATIENCE_S = 1200


def packages() -> tuple[str, ...]:
    """Return the distributions whose versions the table states."""
    return tuple(dict.fromkeys(name for partner in PARTNERS.values() for name in partner.packages))


def run(say: Callable[[str], object] = print, only: Sequence[str] = ()) -> dict[str, Any]:
    """Return all verdicts: partner -> variant -> fault -> column -> true, false or null."""
    for package in packages():
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError as error:
            raise BenchmarkError(f"{package} is not installed, so the table would lack its rows") from error
    table: dict[str, Any] = {}
    for name in only or PARTNERS:
        table[name] = {variant: verdicts(name, variant) for variant in VARIANTS}
        right = [all(v is not False for v in row.values()) for row in table[name]["guarded"].values()]
        say(f"{name}: {sum(right)} of {len(right)} faults leave nothing behind with a guard")
    return table


def verdicts(name: str, variant: str, faults: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """Return the verdicts on a partner's loop, by fault.

    Raises:
        BenchmarkError: the loop failed.
    """
    faults = faults or PARTNERS[name].faults
    command = [sys.executable, "-m", "benchmarks.partners.once", name, variant, *faults]
    env = os.environ | {"OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, env=env)
    except subprocess.TimeoutExpired as late:
        out = late.stdout or b""
        lines, ended = (out.decode() if isinstance(out, bytes) else out).splitlines(), False
    else:
        if done.returncode:
            raise BenchmarkError(f"{name}, {variant}: {done.stderr[-1500:]}")
        lines, ended = done.stdout.splitlines(), True
    rows = [json.loads(line) for line in lines if line.startswith('{"fault"')]
    found = {row.pop("fault"): row for row in rows}
    if ended and list(found) != list(faults):
        raise BenchmarkError(f"{name}, {variant}: verdicts on {list(found)}, expected on {list(faults)}")
    return {fault: found.get(fault, {"ends": False}) for fault in faults}
