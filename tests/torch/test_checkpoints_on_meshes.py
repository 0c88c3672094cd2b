"""A checkpoint of ``torch.distributed.checkpoint``, saved on one mesh and loaded on another or on none:
training goes on as it would have without the break.

Where gradients have the same bits on both meshes, so do decisions, norms, statistics and parameters.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import stablenum
import stablenum_torch as st
from tests.torch.checkpoint_program import (
    BREAK,
    CONFIG,
    KINDS,
    NAN,
    SPIKE,
    STEPS,
    WORLD,
    ending,
    load,
    net,
    start,
    train,
)
from tests.torch.launching import results_of_ranks

MESHES = ("fsdp2 on 4", "fsdp2 on 2", "hsdp on 2 x 2", "one process")
# What torch.distributed.checkpoint says in one process.
pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def ranks(folder) -> list[dict[str, Any]]:
    """What each rank found."""
    told = results_of_ranks("checkpoint_program", folder / "store", folder, world=WORLD, timeout=200)
    return [json.loads(result) for result in told]


def resumed(ranks: list[dict[str, Any]], folder: Path, kind: str, mesh: str) -> list[dict[str, Any]]:
    """What training came to on each rank that took part."""
    if mesh != "one process":
        return [found for rank in ranks if (found := rank.get(f"{kind}, {mesh}"))]
    run = start()
    load(run, kind, str(folder))
    before = ranks[0][f"{kind}, unbroken"]["rows"][:BREAK]
    found = ending(run, before + train(run, kind, range(BREAK, STEPS)))
    return [json.loads(json.dumps(found))]


@pytest.mark.parametrize("kind", ["given", "given, flat"])
@pytest.mark.parametrize("mesh", MESHES)
def test_training_on_another_mesh_goes_on_to_the_bit(ranks, folder, mesh, kind):
    wanted = ranks[0][f"{kind}, unbroken"]
    found = resumed(ranks, folder, kind, mesh)
    assert len(wanted["guard"]["recorder"]) == STEPS
    assert len(found) == {"fsdp2 on 2": 2, "one process": 1}.get(mesh, WORLD)
    for one in found:
        assert json.dumps(one["rows"]) == json.dumps(wanted["rows"])  # NaN included
        assert json.dumps(one["guard"]) == json.dumps(wanted["guard"])
        assert one["params"] == wanted["params"]


@pytest.mark.parametrize("mesh", MESHES)
def test_training_on_another_mesh_makes_the_same_decisions(ranks, folder, mesh):
    """The ranks' losses and gradients are sums in another order here, which round otherwise."""
    wanted = ranks[0]["trained, unbroken"]
    for one in resumed(ranks, folder, "trained", mesh):
        for row, expected in zip(one["rows"], wanted["rows"], strict=True):
            for key in ("applied", "reason", "loss_scale", "skipped_total"):
                assert row[key] == expected[key]
            for key in ("loss", "grad_norm", "clip_coefficient"):
                assert np.isclose(row[key], expected[key], rtol=1e-5, equal_nan=True)
        for mine, theirs in zip(one["params"], wanted["params"], strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_steps_after_the_break_depend_on_what_was_saved(ranks, kind):
    """Otherwise the tests above could not fail."""
    rows = ranks[0][f"{kind}, unbroken"]["rows"]
    assert [step for step, row in enumerate(rows) if not row["applied"]] == sorted([*NAN, SPIKE])
    assert rows[SPIKE]["reason"].startswith("SPIKE"), "found by statistics of steps before the break"
    fresh = start()
    alone = train(fresh, kind, range(BREAK, STEPS))
    assert alone[SPIKE - BREAK]["applied"], "a guard without statistics lets it pass"
    assert [row["loss_scale"] for row in alone] != [row["loss_scale"] for row in rows[BREAK:]]


@pytest.fixture
def alone():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_statistics_saved_under_ddp_find_their_parameters_without_it(alone, recwarn):
    """DistributedDataParallel puts "module." in front of the names of the model inside."""
    states = []
    for wrapper in (DistributedDataParallel, lambda model: model):
        model = wrapper(net())
        opt = st.wrap(torch.optim.SGD(model.parameters(), lr=0.1), CONFIG, names=model)
        if states:
            opt.load_guard_state_dict(states[0])
        else:
            opt.backward(model(torch.ones(2, 16)).square().mean())
            opt.step()
        states.append(opt.guard_state_dict())
    assert states[0]["state"]["clip"][0]["seen"] == [1] * 4
    assert states[1] == states[0]
    assert not [w for w in recwarn if w.category is stablenum.StatisticsNotLoadedWarning]
