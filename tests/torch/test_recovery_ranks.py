"""Two ranks go back together, although only one of them sees a symptom, and each to its own part."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stablenum import CheckpointError
from tests.torch.launching import results_of_ranks
from tests.torch.recovering import Training, numbered, sgd


@pytest.fixture(scope="module", params=["ddp", "fsdp2"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What each rank found, and where the snapshots are."""
    folder = tmp_path_factory.mktemp(request.param)
    texts = results_of_ranks("recovery_program", request.param, folder, world=2, timeout=240)
    return [json.loads(text) for text in texts], folder / "snapshots"


def test_nothing_happens_without_trouble(ranks: Any) -> None:
    results, _ = ranks
    assert [found["untroubled"] for found in results] == [[], []]
    assert results[0]["clean"] != results[1]["clean"]  # each has its own dropout and statistics


@pytest.mark.parametrize("trouble", ["buffer", "moment", "report"])
def test_both_go_back_if_one_sees_a_symptom_and_end_where_they_would_have(ranks: Any, trouble: str) -> None:
    results, _ = ranks
    events = results[0][trouble][0]
    assert [to_step for _, to_step in events] == [30]
    for found in results:
        assert found[trouble] == [events, found["clean"]]


def test_a_resumed_run_ends_where_it_would_have(ranks: Any) -> None:
    results, _ = ranks
    steps = [f"step-0000000{n}0" for n in (1, 2, 3)]
    for found in results:
        assert found["files"] == [f"rank-0000{rank}/{step}" for rank in (0, 1) for step in steps]
        step, events, digest = found["resumed"]
        assert (step, digest) == (30, found["clean"])
        assert [to_step for _, to_step in events] == [30]


def test_ranks_go_on_from_the_newest_snapshot_that_all_of_them_have(ranks: Any) -> None:
    results, _ = ranks
    for found in results:
        assert (found["lost"][0], found["lost"][2]) == (20, found["clean"])


def test_ranks_do_not_begin_anew_if_one_has_lost_its_snapshots(ranks: Any) -> None:
    results, _ = ranks
    for found in results:
        assert "no snapshot in" in found["gone"]


def test_all_stop_together(ranks: Any) -> None:
    results, _ = ranks
    assert results[0]["stopped"] == results[1]["stopped"]
    assert "the budget of 2 rewinds is used up" in results[0]["stopped"][1]


def test_another_number_of_ranks_is_refused(ranks: Any) -> None:
    _, folder = ranks
    with pytest.raises(CheckpointError, match="written by 2 ranks, and there are 1"):
        Training(numbered, sgd).recovery(folder=folder).resume()
