"""Start the processes of a measurement that takes several, and read what the first of them printed."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.steps.errors import BenchmarkError

__all__ = ["said_by_the_first"]


def said_by_the_first(
    command: Sequence[str],
    world: int,
    *,
    all_of_them: str,
    one_of_them: str,
    patience: float,
    environment: Mapping[str, str] | None = None,
) -> Any:
    """Return the last line that the first of several processes printed, read as JSON.

    Args:
        command: what to run; each process gets its number, from 0, as a last argument.
        world: how many processes.
        all_of_them, one_of_them: what they are, for messages.
        patience: seconds in which they have to end.
        environment: variables besides those of this process.

    Raises:
        BenchmarkError: a process failed, or did not end.
    """
    variables = os.environ | dict(environment or {})
    started = [
        subprocess.Popen([*command, str(rank)], env=variables, stdout=subprocess.PIPE, text=True)
        for rank in range(world)
    ]
    try:
        said = [process.communicate(timeout=patience)[0] for process in started]
    except subprocess.TimeoutExpired as error:
        raise BenchmarkError(f"{all_of_them} did not end within {patience} seconds") from error
    finally:
        for process in started:
            process.kill()
            process.wait()
    if any(process.returncode for process in started):
        raise BenchmarkError(f"{one_of_them} failed; its error is above")
    return json.loads(said[0].splitlines()[-1])
