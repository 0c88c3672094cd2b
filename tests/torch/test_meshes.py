"""Every layout on four ranks, and every fault: all ranks decide alike, and as one process would.

One process is the NumPy reference on the gathered gradients and the mean loss; ``mesh_program.py`` compares
each step with it on the spot.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import pytest

from tests.selection import only, slow_unless
from tests.torch.launching import results_of_ranks

RANKS = 4
LAYOUTS = {
    "ddp",
    "ddp static graph",
    "ddp hook",
    "fsdp2",
    "fsdp2 uneven",
    "hsdp",
    "tp",
    "fsdp2 tp",
    "pipeline",
    "experts",
    "zero",
    "fsdp1",
    "cpu offload",
    "mixed",
}
REASONS = {
    "healthy": "OK",
    "inf on one rank": "INF_GRADIENT",
    "NaN on the last rank": "NAN_GRADIENT",
    "NaN loss on one rank": "NONFINITE_LOSS",
    "loss spike on one rank": "SPIKE_LOSS",
    "two ranks at once": "NAN_GRADIENT",
    "huge finite": "CLIPPED",
    "all zero on one rank": "OK",
    "no gradient on one rank": "OK",
    "in an uneven shard": "INF_GRADIENT",
}
SKIPPED = ("INF_GRADIENT", "NAN_GRADIENT", "NONFINITE_LOSS", "SPIKE_LOSS")


NO_RULES = {"ddp static graph", "ddp hook", "cpu offload"}  # where rules are as in "ddp" and "fsdp2"
# Copies, uneven shards, and stages run each time; the others are slow.
SOME = {"ddp", "fsdp2 uneven", "pipeline"}
WITH_RULES = {"fsdp2 uneven"}
RUNS = {"some": SOME, "host": LAYOUTS, "device": LAYOUTS}


@pytest.fixture(scope="module", params=only(["some"], RUNS))
def told(request, tmp_path_factory) -> dict[str, Any]:
    """What the ranks told; "device": on the path of accelerators, with CPU tensors."""
    layouts = RUNS[request.param]
    path = "device" if request.param == "device" else "host"
    names = ["", ""] if layouts == LAYOUTS else [",".join(SOME), ",".join(WITH_RULES)]
    store = tmp_path_factory.mktemp("meshes") / "store"
    printed = results_of_ranks("mesh_program", store, path, *names, world=RANKS, timeout=900)
    told = [result.split("\nLATE ") for result in printed]
    results = [json.loads(result) for result, _ in told]
    assert all(result["faults"] == results[0]["faults"] for result in results), "ranks tell different stories"
    assert all(result["rules"] == results[0]["rules"] for result in results), "ranks tell different stories"
    each = [result["setups"] for result in results]
    late = [json.loads(late) for _, late in told]
    return results[0] | {"layouts": layouts, "setups": each, "late": late}


def for_each_layout(but_for: Collection[str] = ()) -> pytest.MarkDecorator:
    """A test of one layout, in every run that has it."""
    cases = [(run, layout) for run, layouts in RUNS.items() for layout in sorted({*layouts} - {*but_for})]
    rows = slow_unless(lambda run, layout: run == "some", cases)
    return pytest.mark.parametrize(("told", "layout"), rows, indirect=["told"])


@pytest.fixture
def found(told) -> dict[str, Any]:
    """What was found of each layout and fault."""
    return told["faults"]


def test_every_layout_was_tried_with_both_kinds_of_optimizer(told, found):
    layouts = told["layouts"]
    assert {name.rpartition(", ")[0] for name in found} == layouts
    assert {n for n in found if n.endswith("fused")} == {f"{name}, fused" for name in layouts - {"mixed"}}


@pytest.mark.parametrize("fault", REASONS)
@for_each_layout()
def test_all_ranks_decide_alike_and_as_one_process_would(found, layout, fault):
    for kind in ("foreach", "fused"):
        if (layout, kind) == ("mixed", "fused"):
            continue
        row = found[f"{layout}, {kind}"][fault]
        assert row["differs"] == {}
        assert row["alike"], "the ranks' records are the same"
        assert row["kept"], "a skipped step leaves parameters and optimizer state bit for bit"
        assert row["replicas"], "ranks that held the same bits still do"
        assert row["applied"] == (row["reason"] not in SKIPPED)
        if REASONS[fault] in SKIPPED:
            assert row["reason"] == REASONS[fault]
        else:
            assert row["reason"] in ("OK", "CLIPPED")


@for_each_layout()
def test_training_goes_on_after_each_fault(found, layout):
    for kind in ("foreach", "fused"):
        rows = found.get(f"{layout}, {kind}", {})
        assert not [name for name in rows if name.startswith("after")]


@for_each_layout()
def test_the_bad_rank_is_named(found, layout):
    rows = found[f"{layout}, foreach"]
    assert rows["NaN loss on one rank"]["worst_rank"] == 2
    if layout in ("fsdp2", "fsdp2 uneven", "tp", "fsdp2 tp", "pipeline", "experts", "fsdp1", "mixed"):
        assert rows["inf on one rank"]["worst_rank"] == 1
        assert rows["two ranks at once"]["worst_rank"] == 1
        assert rows["in an uneven shard"]["worst_rank"] == 0


def test_rules_follow_one_process_on_every_layout(told):
    apart = {name: row for name, row in told["rules"].items() if row["apart"] or row["parameters apart"]}
    assert apart == {}
    assert not [name for name, row in told["rules"].items() if not row["acts"]], "each rule has an effect"
    layouts = WITH_RULES if told["layouts"] == SOME else LAYOUTS - NO_RULES
    assert len(told["rules"]) == 8 * len(layouts) - 2 * len({"pipeline", "experts", "fsdp1"} & layouts)


@for_each_layout(but_for={"zero", "mixed"})
def test_a_step_makes_one_collective_of_a_few_bytes(told, layout):
    for rank in told["setups"]:
        seen = rank["collectives"][layout]
        assert seen["count"] == 1
        assert seen["bytes"] == [4 * 4 * RANKS], (
            "four numbers from each rank, however many parameters there are"
        )
        assert seen["bytes"][0] <= 4 * (max(seen["tensors"], 8) + 8)


def test_groups_that_do_not_fit_raise_before_the_first_step(told):
    for rank in told["setups"]:
        assert rank["small group"].startswith("ValueError: process_group must contain all ranks of the mesh")
        assert rank["small loss group"].startswith(
            "ValueError: loss_group must contain all ranks of the mesh"
        )
        assert "pass process_group=, a group of all ranks; if they hold copies" in rank["sub-mesh"]
        assert rank["sub-mesh, copies"] == "no error"
        assert "process_group must be ranks that hold different gradients" in rank["copies as parts"]
        assert rank["other ranks"].startswith("ValueError: process_group must contain this process")
        assert rank["wrong type"].startswith("TypeError: loss_group must be a torch.distributed.ProcessGroup")


@pytest.mark.parametrize("field", ["clip", "loss_scale"])
def test_ranks_with_other_settings_raise_on_all_ranks_and_name_the_field(told, field):
    for rank in told["setups"]:
        assert rank[f"other {field}"].startswith(
            f"ValueError: all ranks must have the same settings; {field} is"
        )
        assert "on rank 0 and" in rank[f"other {field}"]
        assert rank[f"other {field}, unchanged"]


def test_a_rank_that_raised_does_not_hold_up_the_others(told):
    for rank, late in enumerate(told["late"]):
        if rank == 1:
            assert late == {"raised": True}
        else:
            assert late["error"], "the step was made without a rank"
            assert late["seconds"] < 60
            assert late["kept"]


def test_norms_are_those_of_one_process_in_every_layout(told):
    one = [float.fromhex(row.split()[0]) for row in told["norms"]["one process"]["plain"]]
    for name, found in told["norms"].items():
        norms = [float.fromhex(row.split()[0]) for row in found["plain"]]
        assert norms == pytest.approx(one, rel=1e-6), name


@pytest.mark.parametrize("kind", ["exact", "exact per tensor"])
def test_exact_norms_have_the_same_bits_in_every_layout(told, kind):
    found = {name: rows[kind] for name, rows in told["norms"].items() if kind in rows}
    assert len(found) >= 11
    assert {name for name, rows in found.items() if rows != found["one process"]} == set()


def test_plain_norms_do_not_have_the_same_bits_in_every_layout(told):
    """Otherwise the test above could not fail."""
    assert len({tuple(rows["plain"]) for rows in told["norms"].values()}) > 1
