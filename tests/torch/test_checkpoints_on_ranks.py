"""Checkpoints of two ranks: each writes and reads its shards, and both always do the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import stablenum_torch as st
from stablenum import CheckpointError
from tests.torch.launching import results_of_ranks
from tests.torch.saving_program import WORLD, local, training
from tests.torch.training_states import same_state


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def ranks(folder) -> list[dict[str, Any]]:
    """What each rank found."""
    told = results_of_ranks("saving_program", folder / "store", folder, world=WORLD, timeout=200)
    return [json.loads(result) for result in told]


def test_shards_are_loaded_as_they_were_into_an_optimizer_without_a_step(ranks):
    for rank, found in enumerate(ranks):
        assert (found["loaded"], found["equal"], found["rank"]) == (2, True, rank)
        assert found["sharded"] == [True] * 4


def test_trap_each_rank_gets_its_own_generator_back(ranks, folder):
    """DCP saves one of two tensors with the same name on two ranks. Above, each is "equal" to its own."""
    state = {"rng": None, "rank": None}
    st.Checkpoints(folder / "dcp", format="dcp").load(state)
    assert state["rank"] == 0, "a process alone gets what rank 0 had"
    assert state["rng"]["state"].tolist() == [0.0, 0.0]


def test_a_poisoned_shard_of_one_rank_is_refused_on_both(ranks):
    kinds, texts = zip(*(found["poisoned shard"] for found in ranks), strict=True)
    assert set(kinds) == {"PoisonedStateError"}
    assert len(set(texts)) == 1
    assert "step 3 is not saved, because it is not finite: model.0.weight (1 NaN of 12)" in texts[0]


def test_trap_one_file_would_hold_the_shards_of_one_rank(ranks, folder):
    """torch.save writes the shard of a DTensor without an error."""
    for found in ranks:
        kind, text = found["in one file"]
        assert kind == "ValueError"
        assert 'model.0.weight is a DTensor, of which each rank has a part; format="torch"' in text
    assert not list((folder / "whole").glob("step-*"))


@pytest.mark.parametrize(
    ("case", "on_one", "text"),
    [
        ("odd on one rank", "TypeError", "odd is builtins.object"),
        ("full on one rank", "CheckpointError", "No space"),
    ],
)
def test_a_failure_on_one_rank_is_one_on_both(ranks, case, on_one, text):
    assert [found[case][0] for found in ranks] == ["CheckpointError", on_one]
    assert "rank 1 failed" in ranks[0][case][1]
    assert text in ranks[0][case][1]
    assert text in ranks[1][case][1]


@pytest.mark.parametrize("format_name", ["torch", "safetensors"])
def test_copies_are_written_once(ranks, folder, format_name):
    assert [found[format_name] for found in ranks] == [[2, True, [2]]] * WORLD
    assert len(list((folder / format_name).glob("step-*"))) == 1


def test_both_pass_over_a_checkpoint_in_which_one_file_has_changed(ranks):
    for found in ranks:
        assert found["a bit of rank 1's file"] == 1


def test_a_load_that_fails_on_one_rank_changes_nothing_on_both(ranks):
    for found in ranks:
        assert found["missing on one rank"][0] == "CheckpointError"
        assert found["unchanged"]
        assert found["fits on one rank"][0] == "CheckpointError"
        assert found["undone"], "on the rank where everything fits, too"
        assert found["steps"] == [1, 2], "nothing that failed is there"


def test_shards_of_two_ranks_are_loaded_in_one_process(ranks, folder):
    run = training(sharded=False, steps=0)
    checkpoints = st.Checkpoints(folder / "dcp", format="dcp")
    with pytest.raises(CheckpointError, match="does not match its checksum"):
        checkpoints.load(run, step=2)
    assert checkpoints.load(run) == 1
    assert same_state(local(run)["model"], local(training(sharded=False, steps=2))["model"])
