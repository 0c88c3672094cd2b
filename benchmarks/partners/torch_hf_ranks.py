"""Two processes, connected by gloo, of which one meets a NaN loss: Accelerate and ``transformers.Trainer``.

outcome = two_ranks("accelerate", guarded=True)
reference = two_ranks("accelerate", guarded=True, without=True)
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pickle
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.partners.outcome import Fault, Outcome

__all__ = ["LOOPS", "two_ranks"]

_PATIENCE_S = 300


def two_ranks(loop: str, *, guarded: bool, without: bool = False) -> tuple[Outcome, Outcome]:
    """Return what each of two ranks ended with. Only the first rank's half of the bad batch has the NaN.

    Args:
        loop: ``"accelerate"`` or ``"trainer"``.
        guarded: whether to guard.
        without: whether to leave the bad batch out, on both ranks.

    Raises:
        RuntimeError: a rank failed; the message has what it wrote.
        TimeoutError: a rank did not end.
    """
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        command = [sys.executable, "-W", "ignore", "-m", __name__, loop, str(guarded), str(without), folder]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        ranks = [subprocess.Popen([*command], env=_environment(rank, port), **pipes) for rank in range(2)]
        try:
            said = [rank.communicate(timeout=_PATIENCE_S)[0] for rank in ranks]
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"two ranks did not end within {_PATIENCE_S} seconds") from error
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        if any(rank.returncode for rank in ranks):
            raise RuntimeError("a rank failed:\n" + "\n".join(said))
        first, second = (pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(2))
    return first, second


def _judged_on_the_first(loop: str, fault: str, *, guarded: bool) -> Outcome:
    """Return the outcome on the first rank, with its reference. The fault is a NaN loss on one rank."""
    outcome, reference = (two_ranks(loop, guarded=guarded, without=without)[0] for without in (False, True))
    return dataclasses.replace(outcome, reference=reference)


def _environment(rank: int, port: int) -> dict[str, str]:
    """Return the environment of a rank, as ``accelerate launch --cpu`` and ``torchrun`` set it."""
    given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ACCELERATE_USE_CPU": "true"}
    return os.environ | {name: str(value) for name, value in given.items()} | {"OMP_NUM_THREADS": "1"}


def _main(loop: str, guarded: str, without: str, folder: str) -> None:
    from benchmarks.partners.torch_hf import UNREFERENCED

    arguments: dict[str, Any] = {"guarded": guarded == "True", "without": without == "True", "resume": False}
    if loop == "trainer":
        arguments |= {"per_device_train_batch_size": 8, "ddp_backend": "gloo", "save_strategy": "no"}
    outcome = UNREFERENCED[loop](Fault.NAN_IN_BATCHNORM, **arguments)
    Path(folder, os.environ["RANK"]).write_bytes(pickle.dumps(outcome))


LOOPS = {loop: functools.partial(_judged_on_the_first, loop) for loop in ("accelerate", "trainer")}


if __name__ == "__main__":
    _main(*sys.argv[1:])
