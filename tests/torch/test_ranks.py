"""Two ranks, one of which meets a bad batch: both make the same decision, by the global norm.

ShardedGradScaler with a fused optimizer lets the ranks diverge here, and torch's reduction of found_inf
over DTensors looks at the first gradient only.
"""

from __future__ import annotations

import json
import math

import pytest
import torch

import stablenum_torch as st
from tests.selection import only
from tests.torch.launching import results_of_ranks


@pytest.fixture(scope="module", params=only(["device"], ["host", "device"]))
def ranks(request, tmp_path_factory) -> list[dict]:
    """What each rank printed; "device": on the path of accelerators, with CPU tensors."""
    store = tmp_path_factory.mktemp("ranks") / "store"
    told = results_of_ranks("ranks_program", store, request.param, world=2, timeout=240)
    return [json.loads(result) for result in told]


def on_one_rank(*, loss_known: bool) -> tuple[list, float]:
    """The same training with the whole batch in one process."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    opt = st.wrap(torch.optim.AdamW(net.parameters(), lr=0.01), clip=0.05, loss_scale="dynamic")
    for step in range(5):
        x = [torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + r)) for r in (0, 1)]
        x[1] = x[1] * math.inf if step == 2 else x[1]
        opt.zero_grad()
        loss = net(torch.cat(x)).square().mean()
        if loss_known:
            opt.backward(loss)
        else:
            (loss * opt.loss_scale).backward()
        opt.step()
    total = sum(p.detach().double().abs().sum().item() for p in net.parameters())
    return [[r["applied"], r["grad_norm"], r["loss_scale"]] for r in opt.history()], total


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "fsdp2 fused"])
def test_all_ranks_decide_as_one_process_would(ranks, kind):
    assert ranks[0][kind] == ranks[1][kind]
    # DistributedDataParallel is not given as names=, so its loss has no say, and the scale comes down.
    rows, total = on_one_rank(loss_known=kind != "ddp")
    for (applied, norm, scale), (wanted, wanted_norm, wanted_scale) in zip(
        ranks[0][kind]["rows"], rows, strict=True
    ):
        assert (applied, scale) == (wanted, wanted_scale)
        assert norm is None or norm == pytest.approx(wanted_norm, rel=1e-5)
    assert [row[0] for row in rows] == [True, True, False, True, True]
    assert ranks[0][kind]["sum"] == pytest.approx(total, rel=1e-5)


def test_plain_shards_are_clipped_and_skipped_together(ranks):
    a, b = ranks[0]["shards"], ranks[1]["shards"]
    assert a["norm"] == b["norm"] == pytest.approx(5.0)
    assert a["w"] == pytest.approx([-0.6, 0.0], rel=1e-5)
    assert b["w"] == pytest.approx([0.0, -0.8], rel=1e-5)
    assert not a["applied"]
    assert not b["applied"]
    assert a["unchanged"]
    assert b["unchanged"]
    assert a["alone"] == b["alone"] == pytest.approx(10.0)


@pytest.mark.parametrize("name", ["log max", "underflow"])
def test_extremes_and_updates_of_shards_are_those_of_the_whole(ranks, name):
    assert ranks[0][name] == ranks[1][name]
    whole, shards = ranks[0][name]["ddp"], ranks[0][name]["fsdp2"]
    assert whole["scales"] == shards["scales"]
    assert len(set(whole["scales"])) > 1, "the scale moves"
    for a, b in zip(whole["moved"], shards["moved"], strict=True):
        assert a == pytest.approx(b, rel=1e-3)
    if name == "log max":
        assert max(max(row) for row in whole["moved"]) == pytest.approx(1e-6, rel=1e-2)


def test_plain_shards_share_one_rms_and_one_fraction(ranks):
    a, b = ranks[0]["update shards"], ranks[1]["update shards"]
    assert a == {"w": [0.5] * 3, "kept": 1.0, "raised": 2.0}
    assert b == {"w": [0.5], "kept": 1.0, "raised": 2.0}


def test_updates_of_changing_parameters_are_clipped_in_constant_memory(ranks):
    rms = math.sqrt((1.0 + 9.0) / 2)
    for rank, size in ((0, 1.0), (1, 3.0)):
        found = ranks[rank]["some updates"]
        for step, moved in enumerate(found["moved"], 1):
            wanted = [size * 0.5 / rms if step >> i & 1 else 0.0 for i in range(4)]
            assert moved == pytest.approx(wanted, rel=1e-5)
        assert len(set(found["kept"][1:])) == 1


def test_a_finite_gradient_beyond_the_squares_of_float64_is_clipped(ranks):
    assert ranks[0]["huge"] == pytest.approx([-0.6])
    assert ranks[1]["huge"] == pytest.approx([-0.8])


def test_the_group_of_an_fsdp1_model_is_known(ranks):
    for rank in ranks:
        full, copied, wanted = rank["named fsdp1"]
        assert full == pytest.approx(wanted, rel=1e-5)
        assert copied == pytest.approx(wanted, rel=1e-5)


def test_a_step_without_any_gradient_is_none(ranks):
    assert [rank["no gradients"] for rank in ranks] == [[0, 1]] * 2


def test_stages_are_clipped_by_their_joint_norm_or_the_step_raises(ranks):
    a, b = ranks[0]["stages"], ranks[1]["stages"]
    assert a["joint first"] == pytest.approx([-0.3, 0.0], rel=1e-5)
    assert b["joint first"] == pytest.approx([0.0, -0.4], rel=1e-5)
    for rank in (a, b):
        assert "behind AdaGC or ClipByNorm where the ranks of process_group hold" in rank["joint last"]
        assert rank["unchanged"]


@pytest.mark.parametrize("kind", ["ddp", "compiled"])
def test_copies_of_a_guard_and_compiled_models_know_the_group(ranks, kind):
    for rank in ranks:
        assert rank["copies"][kind] == [[2.0, "0.weight"]] * 3, "the mean loss of both ranks"


def test_clipping_by_unit_raises_on_plain_shards(ranks):
    fsdp2, group, plain = ranks[0]["refused"]
    assert "must not contain AdaptiveGradClip with process_group" in group
    assert fsdp2 == plain == "accepted"


def test_units_of_replicated_parameters_are_clipped(ranks):
    limit = 0.1 * math.sqrt(2)
    for rank in ranks:
        assert rank["replicated"]["norm"] == pytest.approx(5.0)
        first, second = rank["replicated"]["w"]
        assert first == pytest.approx([1 - limit * 0.6, 1 - limit * 0.8])
        assert second == [1.0, 1.0]


def test_sharded_16_bit_weights_are_updated_like_whole_ones(ranks):
    """Shifts of a DTensor do nothing in torch 2.13, and neither NCCL nor gloo carries int16."""
    for rank in ranks:
        assert rank["narrow"] == {"MasterWeights": True, "KahanUpdate": True, "StochasticRounding": True}


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1"])
def test_a_sharded_checkpoint_resumes_exactly_and_carries_the_guard(ranks, kind):
    exact = {"parameters": True, "guard": True, "warned": False}
    for rank in ranks:
        assert rank[f"checkpointed {kind}"] == [exact, exact]
