"""Kills processes that save in a loop, and looks at what they leave: ``FOLDER TIMES SEED``.

A process of its own, because it forks, which a process with threads, such as that of the tests, must not do.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stablenum.checkpoints.store import Store
from tests.core.saving import state_of, store_in

__all__ = ["killed_while_saving"]


def killed_while_saving(
    store: Store, state: Callable[[int], Any], good: Callable[[int], None], times: int, seed: int
) -> dict[str, int]:
    """Kill a process that saves steps 1, 2, ... at a random moment, and start the next, ``times`` times.

    Args:
        store: where it saves.
        state: returns the state of a step.
        good: called with the step that is there after each kill; raises if its state is not that of the step.
        times: how often.
        seed: of the moments.

    Returns:
        How often the kill came where: "writing" while a folder was not complete, "between" otherwise.
    """
    draw, where, step, took = random.Random(seed), Counter[str](), 0, _seconds(store, state)
    good(0)
    for _ in range(times):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            _save_in_a_loop(store, state, step, writing)
        os.close(writing)
        os.read(reading, 1)  # on a busy machine a process may begin late
        time.sleep(draw.uniform(0.0, 2.0 * took))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with os.fdopen(reading, "rb") as pipe:
            saved = [int(line) for line in pipe.read().split()]
        where["writing" if [*store.folder.glob(".step-*")] else "between"] += 1
        there = store.steps()
        # What was reported as saved is there; of the next step nobody knows.
        assert there[-1] - (saved[-1] if saved else step) in (0, 1), (there, saved, step)
        step = there[-1]
        good(step)
    return dict(where)


def _seconds(store: Store, state: Callable[[int], Any]) -> float:
    """How long a save takes, with all that it removes."""
    for step in (0, 0, 0):
        start = time.perf_counter()
        store.save(step, state(step))
    return time.perf_counter() - start


def _save_in_a_loop(store: Store, state: Callable[[int], Any], step: int, pipe: int) -> None:
    try:
        os.write(pipe, b"\n")
        while True:
            step += 1
            store.save(step, state(step))
            os.write(pipe, f"{step}\n".encode())
    except BaseException:
        os.write(2, b"the saving process failed\n")
        raise
    finally:
        os._exit(1)


def main(folder: str, times: str, seed: str) -> None:
    store = store_in(Path(folder), keep=2)

    def good(step: int) -> None:
        loaded = store.load(None)
        assert (loaded.step, loaded.state) == (step, state_of(step, 2000)), loaded

    where = killed_while_saving(store, lambda step: state_of(step, 2000), good, int(times), int(seed))
    sys.stdout.write(json.dumps(where))


if __name__ == "__main__":
    main(*sys.argv[1:])
