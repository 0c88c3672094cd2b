"""Four ranks, some of which hold copies: whatever makes their bits differ is found, with rank and name."""

from __future__ import annotations

import copy
import functools
import json
import logging
import pickle
import re
from pathlib import Path

import pytest
import torch

import stablenum_torch as st
from tests.torch.launching import results_of_ranks

WEIGHT = "0.weight"


def run_ranks(folder: Path, cases: str) -> list[dict]:
    """What each of the four ranks printed."""
    told = results_of_ranks("replicas_program", folder / "store", cases, world=4, timeout=280)
    return [json.loads(result) for result in told]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    return run_ranks(tmp_path_factory.mktemp("replicas"), "all")


@pytest.fixture
def seen(ranks) -> dict:
    """What rank 0 saw; the test below says that the others saw the same."""
    return ranks[0]


def test_all_ranks_raise_the_same_error(ranks):
    for name in ranks[0]:
        assert all(rank[name] == ranks[0][name] for rank in ranks), name


def test_every_flipped_bit_is_found_with_rank_and_name(seen):
    assert len(seen["flips"]) == 3 * 32
    for name, bit, rank, parted in seen["flips"]:
        tensor = name if name == "parameter" else f"state['{name}']"
        assert parted == [[WEIGHT, tensor, [rank]]], (name, bit)


def test_bits_flipped_before_applied_steps_are_found_at_the_next_check(seen):
    for found, differ, ranks in seen["flips before steps"]:
        assert found == differ
        assert ranks in (None, [1])
    assert sum(found for found, *_ in seen["flips before steps"]) >= 8, "steps seldom heal a flipped bit"


def test_healthy_steps_raise_nothing(seen):
    assert seen["healthy"] == {"compared": 50, "applied": 50, "equal": True}


@pytest.mark.slow
def test_a_thousand_healthy_steps_raise_nothing(tmp_path):
    for rank in run_ranks(tmp_path, "long"):
        assert rank["healthy"] == {"compared": 1000, "applied": 1000, "equal": True}


def test_only_checked_steps_have_another_collective(seen):
    checked, plain = seen["collectives"]["checked"], seen["collectives"]["plain"]
    more = [list(calls[len(without) :]) for calls, without in zip(checked, plain, strict=True)]
    assert more == [[], [], ["gather", "MAX"], [], [], ["MAX"], []], (
        "the first check finds out who holds copies"
    )


def test_another_seed_is_named_as_the_likely_cause(seen):
    found = seen["other seed"]
    names = ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert found["parted"] == [[name, "parameter", [3]] for name in names]
    assert "4 of 4 compared parameters differ" in found["text"]
    assert "another seed" in found["text"]


def test_a_step_that_one_rank_takes_twice_is_found(seen):
    assert {tuple(ranks) for *_, ranks in seen["race"]["parted"]} == {(2,)}
    assert seen["race"]["step"] == 1


@pytest.mark.parametrize("case", ["zero weight", "zero momentum", "nan"])
def test_equal_special_values_do_not_differ(seen, case):
    assert seen["special values"][case] is None


@pytest.mark.parametrize(
    ("case", "tensor"),
    [
        ("negative zero weight", "parameter"),
        ("negative zero momentum", "state['momentum_buffer']"),
        ("payload", "state['momentum_buffer']"),
    ],
)
def test_equal_values_with_other_bits_differ(seen, case, tensor):
    assert seen["special values"][case]["parted"] == [[WEIGHT, tensor, [1]]]


def test_swapped_values_are_found(seen):
    assert seen["swapped"]["parted"] == [[WEIGHT, "parameter", [0]]]


def test_state_that_one_rank_lacks_is_found(seen):
    assert seen["missing state"]["parted"] == [[WEIGHT, "state['exp_avg']", [2]]]
    assert "(missing on rank 2)" in seen["missing state"]["text"]


def test_a_check_changes_nothing(seen):
    assert seen["untouched"]


def test_the_remedy_of_the_message_works(seen):
    assert "torch.distributed.broadcast(tensor, src=0)" in seen["mended"]["found"]["text"]
    assert seen["mended"]["after"] is None


@pytest.mark.parametrize("tensor", ["parameter", "exp_avg", "exp_avg_sq"])
def test_shards_are_compared_with_their_replicas_alone(seen, tensor):
    assert seen["hsdp"]["healthy"] == [None] * 5
    name = tensor if tensor == "parameter" else f"state['{tensor}']"
    found = seen["hsdp"][tensor]
    assert found["parted"] == [["0.weight", name, [1, 3]]], "two replicas: no majority"
    assert "no majority" in found["text"]
    assert "src=<the rank that you trust>" in found["text"]


@pytest.mark.parametrize(
    ("case", "why"), [("fsdp2", "no two ranks hold copies"), ("no group", "Pass loss_group= to wrap()")]
)
def test_without_copies_nothing_is_done_and_that_is_logged_once(seen, case, why):
    assert seen[case]["found"] == [None] * 4
    assert seen[case]["compared"] == 0
    (message,) = seen[case]["logged"]
    assert why in message


def test_plain_shards_are_compared_with_those_of_the_other_copy(ranks):
    assert [rank["plain shards"] for rank in ranks] == [{"flipped": [["w", "parameter", [1, 3]]]}] * 4


@pytest.mark.parametrize("case", ["pipeline", "other parameters"])
def test_stages_of_a_pipeline_are_compared_with_their_copies(ranks, case):
    found = {"flipped": [["stage0.w", "parameter", [0, 1]]]}
    assert [rank[case] for rank in ranks] == [found] * 4


def test_parameters_that_are_added_between_two_checks_are_compared(seen):
    assert seen["added parameters"] == {"flipped": [["more", "parameter", [1]]]}


def test_state_that_is_on_one_rank_by_design_is_not_compared(seen):
    assert seen["zero"]["healthy"] == [None] * 3
    assert seen["zero"]["loaded"] is None
    assert seen["zero"]["flipped"]["parted"] == [[WEIGHT, "parameter", [1]]]


@pytest.mark.parametrize("tensor", ["master", "parameter"])
def test_16_bit_weights_and_their_masters_are_compared(seen, tensor):
    assert seen["master weights"]["healthy"] == [None] * 3
    name = tensor if tensor == "parameter" else "state['master']"
    assert seen["master weights"][tensor]["parted"] == [[WEIGHT, name, [3]]]


def test_the_path_of_accelerators_compares_too(seen):
    found = seen["on device"]
    assert found["healthy"] == [None] * 4
    assert found["between"] is None, "a check is every two steps"
    assert found["flipped"]["parted"] == [[WEIGHT, "state['exp_avg_sq']", [0]]]


def test_ranks_that_would_compare_after_different_numbers_of_steps_are_refused(seen):
    assert "check_replicas_every is 1 on rank 0 and 2 on rank 3" in seen["other intervals"]


# --- in one process --------------------------------------------------------------------------------


def step(opt: st.GuardedOptimizer, w: torch.nn.Parameter) -> None:
    w.grad = torch.ones_like(w)
    opt.step()


@pytest.mark.parametrize("compiled", [False, True])
def test_one_process_has_nothing_to_compare(caplog, compiled):
    w = torch.nn.Parameter(torch.zeros(3))
    opt = st.wrap(torch.optim.SGD([w], lr=1.0), check_replicas_every=2)
    once = functools.partial(step, opt, w)
    if compiled:
        once = torch.compile(once, backend="eager")
    with caplog.at_level(logging.WARNING, "stablenum"):
        for _ in range(5):
            once()
    assert w.tolist() == [-5.0] * 3
    (record,) = [record for record in caplog.records if record.name == "stablenum"]
    assert re.search("nothing to compare: no two ranks hold copies", record.getMessage())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda opt: pickle.loads(pickle.dumps(opt))])
def test_a_copied_optimizer_compares_after_as_many_steps(caplog, copied):
    w = torch.nn.Parameter(torch.zeros(3))
    for every, logged in ((2, True), (None, False)):
        opt = copied(st.wrap(torch.optim.SGD([w], lr=1.0), check_replicas_every=every))
        caplog.clear()
        for _ in range(2):
            step(opt, opt.param_groups[0]["params"][0])
        assert ("nothing to compare" in caplog.text) is logged
