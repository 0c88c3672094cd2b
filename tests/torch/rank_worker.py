"""One of the ranks that run the programs of rank_faults.py, one after another, as ``explain`` watches them.

It reads ``[layout, fault, rank]`` from standard input, and prints the outcome as JSON.
"""

from __future__ import annotations

import functools
import gc
import json
import sys
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.torch.rank_faults import Program, replayed, run, run_alone
from tests.torch.watched import ended, watching_with


def outcome(run_it: Callable[[], None]) -> dict:
    """What the watcher of the second run finds, in which every step is recorded."""
    patch = pytest.MonkeyPatch()
    watching = watching_with(patch)
    try:
        session = ended(next(watching)(record=True), run_it)
    finally:
        next(watching, None)  # which takes everything back
        patch.undo()
    return session.outcome.to_dict()


def main(rank: int, size: int, store: str) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # the watcher looks for modules among all objects; those of the imports have none
    warnings.simplefilter("ignore")
    if size > 1:
        dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    for line in sys.stdin:
        layout, fault, bad = json.loads(line)
        if layout.startswith("replay "):
            found = replayed(layout.removeprefix("replay "), fault, bad=bad == rank)
        elif size == 1:
            found = outcome(functools.partial(run_alone, fault))
        else:
            found = outcome(functools.partial(run, Program(layout, fault, bad), rank))
        sys.stdout.write(f"OUTCOME {json.dumps(found)}\n")
        sys.stdout.flush()
    if size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
