"""The commands of a launch, one per rank, and the folder through which they talk.

``torchrun`` starts the command once per rank. Rank 0 leads: it makes a folder, and the others find it by what
all of them were started with. Nothing goes through the script's own process groups, which may hang.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import socket
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stablenum._support.files import write_text
from stablenum.diagnosis.watch.plan import Outcome

__all__ = ["FOLDER", "GRACE", "Launch", "LaunchError", "has_failed", "mark_failed"]

# Names a folder that all machines of a launch see; by default it is in the folder for temporary files.
FOLDER = "STABLENUM_RANKS_DIR"
# A rank that has not ended so many seconds after another one has failed waits for it in vain.
GRACE = 10.0
# So many seconds later, a rank that still has not ended has been killed.
_KILLED = 30.0
# So many seconds after rank 0 has ended well, it waits no longer for others: torch's own time-out.
_MOST = 1800.0
_START = 120.0
_POLL = 0.1


class LaunchError(Exception):
    """The ranks of a launch do not find one another."""


class Launch:
    """One rank's command, and what it knows of the others.

    Args:
        rank, size: its number, and how many there are.
        folder: where the ranks of this launch look for rank 0.

    Attributes:
        rank, size: as given.
    """

    def __init__(self, rank: int, size: int, folder: Path) -> None:
        self.rank, self.size = rank, size
        self._folder, self._session = folder, folder

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Launch | None:
        """Return the launch to which a process belongs by its environment; None if it runs alone.

        Example:
            >>> Launch.of({}), Launch.of({"RANK": "0", "WORLD_SIZE": "1"})
            (None, None)
            >>> Launch.of({"RANK": "2", "WORLD_SIZE": "4"}).rank
            2
        """
        rank, size = environment.get("RANK", ""), environment.get("WORLD_SIZE", "")
        if not (rank.isdecimal() and size.isdecimal()) or int(size) < 2:
            return None
        common = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
        key = "|".join([size, *(environment.get(name, "") for name in common)])
        name = f"stablenum-ranks-{_user()}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
        return cls(int(rank), int(size), Path(environment.get(FOLDER) or tempfile.gettempdir()) / name)

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which writes the report."""
        return self.rank == 0

    def begin(self) -> None:
        """Make the folder, or find the one that rank 0 has made.

        Raises:
            LaunchError: rank 0 is not found, or the folder belongs to somebody else.
        """
        leader = self._folder / "rank-0.json"
        if self.leads:
            shutil.rmtree(self._folder, ignore_errors=True)  # what a launch that was killed has left
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check_owner()
            host, process = socket.gethostname(), _process(os.getpid())
            me = {"session": uuid.uuid4().hex, "host": host, "process": process}
            self._session = self._folder / str(me["session"])
            self._session.mkdir()
            write_text(leader, json.dumps(me))
            return
        found = _waited(lambda: _alive(leader), time.monotonic() + _START)
        if not found:
            raise LaunchError(
                f"rank {self.rank} does not find rank 0 of this launch in {self._folder}. Start every rank "
                f"through this command; on several machines, set {FOLDER} to a folder that all of them see."
            )
        self._check_owner()
        self._session = self._folder / found["session"]

    def end(self) -> None:
        """Remove the folder if this is rank 0; the others wait until it has."""
        if self.leads:
            shutil.rmtree(self._folder, ignore_errors=True)
        else:
            _waited(self._is_over, time.monotonic() + _MOST)

    def marks(self, run: int) -> Path:
        """Return the folder in which ranks note that they have failed in a run."""
        folder = self._session / f"run-{run}"
        with contextlib.suppress(FileNotFoundError):  # rank 0 has ended
            folder.mkdir(exist_ok=True)
        return folder

    def tell(self, run: int, outcome: Outcome) -> None:
        """Tell rank 0 how this rank's run has ended."""
        with contextlib.suppress(FileNotFoundError):
            write_text(self.marks(run) / f"outcome-{self.rank}.json", json.dumps(outcome.to_dict()))

    def outcomes(self, run: int) -> dict[int, Outcome]:
        """Return how the run has ended on the ranks that tell it in time."""
        found: dict[int, Outcome] = {}
        begun, failed = time.monotonic(), None
        while len(found) < self.size:
            for rank in set(range(self.size)) - set(found):
                told = _read(self.marks(run) / f"outcome-{rank}.json")
                if told is not None:
                    found[rank] = Outcome.from_dict(told)
            now = time.monotonic()
            if failed is None and has_failed(self.marks(run)):
                failed = now
            if now > begun + _MOST or (failed is not None and now > failed + _KILLED):
                break
            time.sleep(_POLL if len(found) < self.size else 0.0)
        return found

    def decide(self, run: int, decision: dict[str, Any]) -> None:
        """Tell the others what follows the run."""
        write_text(self.marks(run) / "decision.json", json.dumps(decision))

    def decision(self, run: int) -> dict[str, Any]:
        """Return what rank 0 has decided after the run; an empty one if it has ended."""
        path = self.marks(run) / "decision.json"
        decided = _waited(lambda: _read(path) or self._is_over(), time.monotonic() + _MOST + _KILLED)
        return decided if isinstance(decided, dict) else {}

    def _is_over(self) -> bool:
        return not self._session.exists() or _alive(self._folder / "rank-0.json") is None

    def _check_owner(self) -> None:
        if hasattr(os, "getuid") and self._folder.stat().st_uid != os.getuid():
            raise LaunchError(
                f"{self._folder} belongs to another user; set {FOLDER} to a folder of your own."
            )


def mark_failed(folder: Path, rank: int) -> None:
    """Note that a rank has failed, so that the others do not wait for it."""
    with contextlib.suppress(OSError):
        (folder / f"failed-{rank}").touch()


def has_failed(folder: Path, *, but: int | None = None) -> bool:
    """Return whether a rank has failed, other than ``but``."""
    return any(path.name != f"failed-{but}" for path in folder.glob("failed-*"))


def _waited(ask: Callable[[], Any], until: float) -> Any:
    """Return the first true answer; the last one if none comes in time."""
    while not (answer := ask()) and time.monotonic() < until:
        time.sleep(_POLL)
    return answer


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found


def _alive(leader: Path) -> dict[str, Any] | None:
    """Return what rank 0 says of itself, unless its process is known to have ended."""
    found = _read(leader)
    if found is None:
        return None
    here = found["host"] == socket.gethostname()
    return None if here and found["process"] != _process(found["process"][0]) else found


def _process(number: int) -> list[Any]:
    """Return the number of a process, with the time of its start where that is known; None if it ended."""
    with contextlib.suppress(OSError, IndexError):
        status = Path(f"/proc/{number}/stat").read_text(encoding="utf-8")
        return [number, status.rpartition(")")[2].split()[19]]
    if os.name == "nt":  # where it would be a signal
        return [number, ""]
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return [number, None]
    except OSError:
        pass
    return [number, ""]


def _user() -> str:
    return str(os.getuid()) if hasattr(os, "getuid") else os.environ.get("USERNAME", "")
