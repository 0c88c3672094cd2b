"""Start a program on several ranks over gloo, and read what each of them printed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

__all__ = ["results_of_ranks"]

ROOT = Path(__file__).parents[2]


def results_of_ranks(program: str, *arguments: object, world: int, timeout: float) -> list[str]:
    """What each rank printed after "RESULT ".

    Args:
        program: a module of ``tests.torch``; it is given its rank, and then the arguments.
        world: the number of ranks.
        timeout: in seconds.
    """
    env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-m", f"tests.torch.{program}"]
    given = [str(argument) for argument in arguments]
    started = [
        subprocess.Popen(
            [*command, str(rank), *given], cwd=ROOT, env=env, text=True, stdout=PIPE, stderr=PIPE
        )
        for rank in range(world)
    ]
    try:
        finished = [process.communicate(timeout=timeout) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    for process, (_, err) in zip(started, finished, strict=True):
        assert process.returncode == 0, err[-3000:]
    return [out.split("RESULT ")[1] for out, _ in finished]
