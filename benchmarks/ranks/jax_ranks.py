"""JAX: ranks are devices of one process, over which XLA shards.

The peer is optax's ``apply_if_finite`` around ``clip_by_global_norm``; XLA partitions both steps alike.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from benchmarks.steps.errors import BenchmarkError

__all__ = ["measure"]

_PATIENCE_S = 600


def measure(world: int, rounds: int, turn: int = 0) -> dict[str, Any]:
    """``samples`` and ``counts``, by variant, on a mesh of ``world`` devices.

    Raises:
        BenchmarkError: the process failed, computed a wrong result, or did not end.
    """
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={world}",
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, "-m", "benchmarks.ranks.jax_devices", str(world), str(rounds), str(turn)]
    try:
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=_PATIENCE_S
        )
    except subprocess.TimeoutExpired as error:
        raise BenchmarkError(f"{world} devices did not end within {_PATIENCE_S} seconds") from error
    except subprocess.CalledProcessError as error:
        raise BenchmarkError(f"{world} devices failed; the error is above") from error
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
