"""Gradients accumulated without synchronisation and reduced in every way: one process's decisions on the
whole batch.

In float32 that process has the whole batch. Reductions in 16 bits round, so there it has each rank's gradient
by itself, and rounds and adds them up as the ranks do.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.torch.accumulation_program import (
    BAD,
    CASES,
    MICRO,
    STEPS,
    WORLD,
    Case,
    batch,
    net,
    record,
    share,
    wrapped,
)
from tests.torch.launching import results_of_ranks

FLOAT32 = [name for name, case in CASES.items() if case.dtype == torch.float32]
NARROW = [name for name in CASES if name not in FLOAT32]
OVERFLOWS = [name for name in CASES if name.endswith("not divided before")]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict[str, Any]]:
    """What each rank found of each case."""
    store = tmp_path_factory.mktemp("accumulation") / "store"
    told = results_of_ranks("accumulation_program", store, world=WORLD, timeout=200)
    return [json.loads(result) for result in told]


# --- one process ---------------------------------------------------------------------------------


def on_whole_batches(case: Case) -> dict[str, Any]:
    """The training of one process that has the batches of all ranks."""
    model = net()
    opt, rows = wrapped(case, model.parameters()), []
    for step in range(STEPS):
        opt.zero_grad()
        for micro in range(MICRO):
            parts = [batch(case, step, micro, rank) for rank in range(WORLD)]
            outputs = model(torch.cat(parts)).split([len(part) for part in parts])
            shares = [share(case, step, micro, rank, out) for rank, out in enumerate(outputs)]
            opt.backward(sum(shares) if case.sums else sum(shares) / WORLD)
        opt.step()
        rows.append(record(opt))
    return {"rows": rows, "params": [p.detach().tolist() for p in model.parameters()]}


def reduced(case: Case, grads: list[Tensor]) -> Tensor:
    """The ranks' gradients, added up in the format of the reduction."""
    narrow = [g.to(case.dtype) for g in grads]
    if case.divided:
        narrow = [g / WORLD for g in narrow]
    total = torch.stack(narrow).sum(0).float()
    return total if case.divided or case.sums else total / WORLD


def accumulated(case: Case, parts: list[Tensor]) -> Tensor:
    """The gradient of a rank's micro-batches. FSDP2 adds them up in the format of the reduction."""
    total = parts[0].to(case.dtype) if case.layout == "fsdp2" else parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def by_rank(case: Case) -> tuple[dict[str, Any], list[float]]:
    """The training of one process that adds up each rank's gradients by itself.

    Also returns the largest element of a rank's gradient, in its format of the reduction, in each step.
    """
    model = net()
    params, rows, largest = list(model.parameters()), [], []
    opt = wrapped(case, params)
    for step in range(STEPS):
        opt.zero_grad()
        each, losses = [], []
        for rank in range(WORLD):
            found = []
            for micro in range(MICRO):
                loss = share(case, step, micro, rank, model(batch(case, step, micro, rank)))
                found.append(torch.autograd.grad(loss * opt.scale(), params))
                losses.append(loss.detach())
            each.append([accumulated(case, list(parts)) for parts in zip(*found, strict=True)])
        for p, grads in zip(params, zip(*each, strict=True), strict=True):
            p.grad = reduced(case, list(grads))
        opt.scale(torch.stack(losses).sum() / WORLD)
        largest.append(max(float(g.to(case.dtype).abs().max()) for grads in each for g in grads))
        opt.step()
        rows.append(record(opt))
    return {"rows": rows, "params": [p.detach().tolist() for p in params]}, largest


def assert_same(found: dict[str, Any], wanted: dict[str, Any], *, loss: float = 1.0) -> None:
    for step, (row, one) in enumerate(zip(found["rows"], wanted["rows"], strict=True)):
        for key in ("applied", "reason", "loss_scale"):
            assert row[key] == one[key], (step, key)
        for key, factor in (("loss", loss), ("grad_norm", 1.0), ("clip_coefficient", 1.0)):
            assert np.isclose(row[key], one[key] * factor, rtol=2e-6, equal_nan=True), (step, key)
    for mine, theirs in zip(found["params"], wanted["params"], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-7)


# --- tests ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_ranks_agree_to_the_bit(ranks, name):
    a, b = (json.dumps(rank[name]) for rank in ranks)
    assert a == b


@pytest.mark.parametrize("name", FLOAT32)
def test_accumulating_on_ranks_is_one_step_on_the_whole_batch(ranks, name):
    case = CASES[name]
    wanted = on_whole_batches(case)
    # Where gradients are added up, each rank's loss is a share of the whole; the record has their mean.
    assert_same(ranks[0][name], wanted, loss=1 / WORLD if case.sums else 1.0)
    assert {row["loss_scale"] for row in wanted["rows"]} >= {2.0**8, 2.0**9}, "the scale moves"
    assert any(row["clip_coefficient"] < 1 for row in wanted["rows"]), "a step is clipped"


@pytest.mark.parametrize("name", NARROW)
def test_reducing_in_16_bits_decides_as_one_process_that_rounds_alike(ranks, name):
    wanted, _ = by_rank(CASES[name])
    assert_same(ranks[0][name], wanted)


@pytest.mark.parametrize("name", CASES)
def test_a_bad_micro_batch_on_one_rank_skips_the_whole_step_on_all(ranks, name):
    for rank in ranks:
        row = rank[name]["rows"][BAD[0]]
        assert not row["applied"]
        assert row["reason"] in ("NONFINITE_LOSS", "NAN_GRADIENT", "INF_GRADIENT")
        after = rank[name]["rows"][BAD[0] + 1 :]
        assert any(row["applied"] for row in after), "training goes on"


@pytest.mark.parametrize("name", OVERFLOWS)
def test_an_overflow_in_the_reduction_is_skipped_on_all_ranks_and_lowers_the_scale(ranks, name):
    _, largest = by_rank(CASES[name])
    assert math.isfinite(largest[0]), "no rank's own gradient overflows"
    for rank in ranks:
        first, second = rank[name]["rows"][:2]
        assert (first["applied"], first["reason"]) == (False, "INF_GRADIENT")
        assert math.isfinite(first["loss"])
        assert second["applied"]
        assert second["loss_scale"] == first["loss_scale"] / 2


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_dividing_before_the_reduction_keeps_the_same_step_from_overflowing(ranks, layout):
    for rank in ranks:
        assert rank[f"{layout}, float16"]["rows"][0]["applied"]
