"""Several ranks save and load one checkpoint: all of them do it, or none. The ranks are threads here."""

from __future__ import annotations

import errno
import logging
import math
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stablenum import CheckpointError, PoisonedStateError
from stablenum.checkpoints.codec import on_all, on_each
from stablenum.checkpoints.settings import StoreSettings
from stablenum.checkpoints.store import Store
from tests.core.saving import ListCodec

WORLD = 3


class ThreadRank:
    """One of several threads that exchange values."""

    def __init__(self, rank: int, barrier: threading.Barrier, board: list[Any]) -> None:
        self.rank, self._barrier, self._board = rank, barrier, board

    def gather(self, value: Any) -> list[Any]:
        self._board[self.rank] = value
        self._barrier.wait()
        values = list(self._board)
        self._barrier.wait()
        return values


class PartCodec(ListCodec):
    """Each rank writes one file."""

    def __init__(self, rank: int, fails: Exception | None = None) -> None:
        self.rank, self.fails = rank, fails

    def write(self, folder: Path, state: dict[str, list[float]]) -> None:
        (folder / "parts").mkdir(exist_ok=True)
        (folder / "parts" / f"{self.rank}.json").write_text(str(state["weights"]), encoding="utf-8")
        if self.fails:
            raise self.fails

    def read(self, folder: Path, like: Any) -> dict[str, list[float]]:
        if self.fails:
            raise self.fails
        return {"weights": super().read(folder, like)[str(self.rank)]}


def on_ranks(action: Callable[[ThreadRank], Any]) -> list[Any]:
    """What the action returns on each rank, or the error that it raises there."""
    barrier, board = threading.Barrier(WORLD, timeout=20), [None] * WORLD
    found: list[Any] = [None] * WORLD

    def run(rank: int) -> None:
        try:
            found[rank] = action(ThreadRank(rank, barrier, board))
        except Exception as error:  # noqa: BLE001 - looked at by the test
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(WORLD)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def store_of(folder: Path, ranks: ThreadRank, fails: Exception | None = None, **settings: Any) -> Store:
    return Store(folder, PartCodec(ranks.rank, fails), StoreSettings(**settings), ranks)


def part(step: int, rank: int) -> dict[str, list[float]]:
    return {"weights": [step + rank / 4]}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder with the good steps 10 and 20, of all ranks."""
    for step in (10, 20):
        on_ranks(lambda r, step=step: store_of(tmp_path / "run", r).save(step, part(step, r.rank)))
    return tmp_path / "run"


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def test_one_checkpoint_holds_the_parts_of_all_ranks(run):
    found = on_ranks(lambda ranks: store_of(run, ranks).load(None))
    assert [(one.step, one.state) for one in found] == [(20, part(20, rank)) for rank in range(WORLD)]
    assert sorted(found[0].manifest.files) == [f"parts/{rank}.json" for rank in range(WORLD)]
    assert names_in(run) == ["step-000000010", "step-000000020"]
    assert on_ranks(lambda ranks: store_of(run, ranks).steps()) == [[10, 20]] * WORLD


@pytest.mark.parametrize("bad", range(WORLD))
def test_a_poisoned_part_is_refused_on_all_ranks(run, bad):
    def save(ranks: ThreadRank) -> Path | None:
        return store_of(run, ranks).save(30, {f"part{ranks.rank}": [math.nan if ranks.rank == bad else 1.0]})

    errors = on_ranks(save)
    assert all(isinstance(error, PoisonedStateError) for error in errors), errors
    assert {error.names for error in errors} == {(f"part{bad}",)}
    assert len({str(error) for error in errors}) == 1
    assert names_in(run) == ["step-000000010", "step-000000020"]


@pytest.mark.parametrize("bad", range(WORLD))
@pytest.mark.parametrize(
    ("failure", "own"),
    [(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), CheckpointError), (TypeError("odd"), TypeError)],
    ids=["disk", "type"],
)
def test_a_rank_that_cannot_write_stops_all(run, bad, failure, own):
    def save(ranks: ThreadRank) -> Path | None:
        store = store_of(run, ranks, failure if ranks.rank == bad else None)
        return store.save(30, part(30, ranks.rank))

    errors = on_ranks(save)
    assert [isinstance(error, CheckpointError) for error in errors].count(True) >= WORLD - 1
    assert isinstance(errors[bad], own)
    assert f"rank {bad} failed: " in str(errors[(bad + 1) % WORLD])
    assert names_in(run) == ["step-000000010", "step-000000020"]


def test_all_ranks_go_on_if_one_cannot_write(run, caplog):
    def save(ranks: ThreadRank) -> Path | None:
        failure = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) if ranks.rank == 1 else None
        return store_of(run, ranks, failure, on_error="go on").save(30, part(30, ranks.rank))

    with caplog.at_level(logging.WARNING, "stablenum"):
        assert on_ranks(save) == [None] * WORLD
    (record,) = caplog.records
    assert "step 30 could not be saved in" in record.message, "said once"


def test_a_checkpoint_that_one_rank_cannot_read_is_passed_over_by_all(run):
    (run / "step-000000020" / "parts" / "2.json").write_text("[99.5]", encoding="utf-8")
    assert [one.step for one in on_ranks(lambda ranks: store_of(run, ranks).load(None))] == [10] * WORLD

    def fails_on_one(ranks: ThreadRank) -> Any:
        failure = OSError(errno.EIO, os.strerror(errno.EIO)) if ranks.rank == 1 else None
        return store_of(run, ranks, failure).load(None)

    errors = on_ranks(fails_on_one)
    assert all(isinstance(error, CheckpointError) for error in errors)
    assert set(errors[0].reasons) == set(errors[1].reasons) == {"step-000000010", "step-000000020"}


def test_an_error_is_of_the_disk_only_if_all_are():
    def fails(ranks: ThreadRank) -> None:
        def action() -> None:
            raise OSError("full") if ranks.rank == 0 else KeyError("name")

        on_all(ranks, action)

    errors = on_ranks(fails)
    assert [type(error) for error in errors] == [CheckpointError, KeyError, KeyError]
    assert str(errors[0]) == "rank 1 failed: KeyError: 'name'"
    assert on_ranks(lambda ranks: on_each(ranks, lambda: ranks.rank)) == [0, 1, 2]
    assert on_ranks(lambda ranks: on_all(ranks, lambda: ranks.rank)) == [[0, 1, 2]] * WORLD


def test_the_whole_state_is_not_sent_to_other_ranks(run, monkeypatch):
    sent = []
    gather = ThreadRank.gather

    def listening(self: ThreadRank, value: Any) -> list[Any]:
        sent.append(value)
        return gather(self, value)

    monkeypatch.setattr(ThreadRank, "gather", listening)
    on_ranks(lambda ranks: store_of(run, ranks).save(30, {"weights": [12345.5]}))
    on_ranks(lambda ranks: store_of(run, ranks).load(None))
    assert sent
    assert "12345.5" not in repr(sent)
