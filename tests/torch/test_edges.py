"""Edge cases, each of which was once a bug."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import stablenum
import stablenum_torch as st
from stablenum.formats import FLOAT32_MAX
from stablenum_torch._devices.ranks import check_group, is_sharded, local_part, replicas
from tests.torch.conftest import named, parameters, set_gradients, snapshot


def test_an_unfused_checkpoint_in_a_fused_guard(path):
    plain = torch.optim.AdamW(parameters(), fused=False)
    params = parameters()
    opt = st.wrap(torch.optim.AdamW(params, fused=True), clip=0.5)
    opt.load_state_dict(plain.state_dict())  # torch takes the groups' "fused" from the checkpoint
    for i in range(3):
        set_gradients(params, i)
        if i == 1:
            params[0].grad.fill_(math.nan)
        opt.step()
    assert opt.last["skipped_total"] == 1
    assert opt.last["applied"]


def test_fused_and_unfused_groups_side_by_side(path):
    a, b, c = parameters()
    opt = st.wrap(torch.optim.AdamW([a, b], fused=True), clip=0.5)
    opt.add_param_group({"params": [c], "fused": False})
    set_gradients([a, b, c], 0)
    before = snapshot(opt)
    opt.step()
    assert opt.last["applied"]
    assert all(old != new for old, new in zip(before, snapshot(opt), strict=False))


def test_a_halt_under_compile_raises():
    torch._dynamo.reset()
    w = torch.nn.Parameter(torch.ones(2))
    opt = st.wrap(torch.optim.AdamW([w], lr=0.1, fused=True), max_skips_in_a_row=1)
    step = torch.compile(opt.step, backend="eager")
    w.grad = torch.ones(2)
    step()
    before = snapshot(opt)
    w.grad = torch.full((2,), math.nan)
    with pytest.raises(stablenum.NonFiniteError):
        step()
    assert snapshot(opt) == before
    w.grad = torch.ones(2)
    step()
    assert snapshot(opt) != before
    torch._dynamo.reset()


@pytest.mark.parametrize("fused", [True, False])
def test_unscaling_never_makes_a_finite_gradient_infinite(fused, path):
    w = torch.nn.Parameter(torch.zeros(2))
    opt = st.wrap(torch.optim.SGD([w], lr=1e-3, fused=fused), loss_scale=0.5)
    w.grad = torch.full((2,), 2e38)
    opt.step()
    assert opt.last["applied"]
    assert torch.isfinite(w).all()
    w.grad = torch.full((2,), 1.0)
    opt.step()
    assert opt.last["grad_norm"] == pytest.approx(2 * math.sqrt(2))


class TestANotedLossDoesNotOutliveItsStep:
    def test_after_an_error_was_caught(self, path):
        w = torch.nn.Parameter(torch.ones(1))
        opt = st.wrap(torch.optim.SGD([w], lr=0.1), on_nonfinite="raise")
        opt.scale(torch.tensor(math.nan))
        w.grad = torch.ones(1)
        with pytest.raises(stablenum.NonFiniteError, match="All gradients were finite"):
            opt.step()
        opt.step()
        assert opt.last["applied"]

    def test_after_a_closure_that_raised(self, path):
        w = torch.nn.Parameter(torch.ones(1))
        opt = st.wrap(torch.optim.SGD([w], lr=0.1))

        def closure():
            opt.scale(torch.tensor(math.nan))
            raise KeyError("batch")

        with pytest.raises(KeyError):
            opt.step(closure)
        w.grad = torch.ones(1)
        opt.step()
        assert opt.last["applied"]

    def test_after_the_batch_was_dropped(self, path):
        w = torch.nn.Parameter(torch.ones(1))
        opt = st.wrap(torch.optim.SGD([w], lr=0.1))
        opt.backward(w.sum() * math.nan)
        opt.zero_grad()
        opt.backward(w.sum())
        opt.step()
        assert opt.last["applied"]


def test_two_optimizers_with_one_fixed_scale(path):
    a, b = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    first, second = (st.wrap(torch.optim.SGD([p], lr=0.1), loss_scale=64.0) for p in (a, b))
    loss = (a + 2 * b).sum()
    second.scale(loss)
    first.backward(loss)
    first.step()
    second.step()
    assert (a.item(), b.item()) == pytest.approx((0.9, 0.8))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("clip", [None, 1e-3, stablenum.ClipByNorm(1e-3)])
def test_half_gradients_are_unscaled_in_float32(dtype, clip, path):
    w = torch.nn.Parameter(torch.zeros(4, dtype=dtype))
    opt = st.wrap(torch.optim.SGD([w], lr=1.0), loss_scale=2.0**16, clip=clip)
    w.grad = torch.full((4,), 512.0, dtype=dtype)
    opt.step()
    exact = 512 / 2**16 if clip is None else 0.5e-3
    assert w.detach().float().abs().tolist() == pytest.approx([exact] * 4, rel=torch.finfo(dtype).eps)


def test_a_clipping_bound_beyond_the_range_of_the_format(path):
    w = torch.nn.Parameter(torch.zeros(2, dtype=torch.float16))
    opt = st.wrap(torch.optim.SGD([w], lr=1.0), clip=stablenum.ClipByValue(1e5), loss_scale=4.0)
    w.grad = torch.tensor([8.0, -4.0], dtype=torch.float16)
    opt.step()
    assert w.tolist() == [-2.0, 1.0]


def test_lazily_conjugated_gradients(path):
    w = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    opt = st.wrap(torch.optim.SGD([w], lr=1.0), clip=stablenum.ClipByValue(1.0))
    w.grad = torch.tensor([3 + 4j, 0.5 - 2j]).conj()
    assert w.grad.is_conj()
    opt.step()
    assert opt.last["grad_norm"] == pytest.approx(math.sqrt(25 + 4.25))
    assert w.tolist() == [-1 + 1j, -0.5 - 1j]


def test_a_float64_loss_beyond_float32_is_finite(path):
    w = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    opt = st.wrap(torch.optim.SGD([w], lr=0.1))
    opt.scale(torch.tensor(1e39, dtype=torch.float64))
    w.grad = torch.ones(1, dtype=torch.float64)
    opt.step()
    assert opt.last["applied"]
    assert math.isfinite(opt.last["loss"])


def test_a_numpy_loss_of_a_closure_is_seen(path):
    w = torch.nn.Parameter(torch.ones(1))
    opt = st.wrap(torch.optim.SGD([w], lr=0.1))
    w.grad = torch.ones(1)
    opt.step(lambda: np.float32("nan"))
    assert opt.last["reason"] is stablenum.Reason.NONFINITE_LOSS


def test_a_zero_step_of_learning_rate_zero_with_a_bad_loss_is_recorded(path):
    w = torch.nn.Parameter(torch.ones(1))
    opt = st.wrap(torch.optim.SGD([w], lr=0.0))
    opt.scale(torch.tensor(math.nan))
    w.grad = torch.zeros(1)
    opt.step()
    assert opt.last["skipped_total"] == 1


def test_compiled_step_with_a_tensor_learning_rate_adds_no_graph_break():
    torch._dynamo.reset()
    w = torch.nn.Parameter(torch.ones(2))
    opt = st.wrap(torch.optim.AdamW([w], lr=torch.tensor(0.1), fused=True), clip=1.0)
    w.grad = torch.ones(2)
    torch._dynamo.utils.counters.clear()
    torch.compile(opt.step, backend="eager")()
    reasons = {reason.splitlines()[0] for reason in torch._dynamo.utils.counters["graph_break"]}
    assert not any("data-dependent" in reason.lower() or "Tensor.item" in reason for reason in reasons)
    assert w[0].item() == pytest.approx(0.899, abs=1e-3)
    torch._dynamo.reset()


def test_zero_grad_of_an_optimizer_without_arguments():
    class Old(torch.optim.SGD):
        def zero_grad(self):
            super().zero_grad()

    w = torch.nn.Parameter(torch.ones(1))
    opt = st.wrap(Old([w], lr=0.1))
    w.grad = torch.ones(1)
    opt.zero_grad()
    assert w.grad is None


def test_generated_names_are_not_saved():
    params = parameters()
    assert st.wrap(torch.optim.SGD(params, lr=0.1)).guard_state_dict()["names"] is None
    named = torch.optim.SGD([("w", params[0]), ("b", params[1])], lr=0.1)
    assert st.wrap(named).guard_state_dict()["names"] == ["w", "b"]


class TestShardings:
    """Placements as torch makes them, without the ranks."""

    @staticmethod
    def param(*kinds):
        def placement(kind):
            return SimpleNamespace(
                is_shard=lambda: kind == "shard",
                is_replicate=lambda: kind == "replicate",
                is_partial=lambda: kind == "partial",
            )

        mesh = SimpleNamespace(size=lambda d=None: 2 ** len(kinds) if d is None else 2)
        return SimpleNamespace(device_mesh=mesh, placements=tuple(map(placement, kinds)))

    def test_strided_shards_are_parts_too(self):
        # FSDP over tensor parallelism: is_shard() of torch's _StridedShard is False.
        assert [replicas(self.param(*kinds)) for kinds in (("strided", "shard"), ("replicate", "shard"))] == [
            1,
            2,
        ]
        assert is_sharded(self.param("strided"))
        assert not is_sharded(self.param("replicate"))

    def test_partial_gradients_raise_and_the_message_names_the_remedy(self):
        with pytest.raises(ValueError, match="redistribute"):
            local_part(self.param("partial"))

    def test_a_process_group_of_another_type_raises(self):
        with pytest.raises(TypeError, match=r"process_group must be a .*ProcessGroup.*got str"):
            check_group("process_group", "dp")


@pytest.mark.parametrize("scaled", [{}, {"loss_scale": 2.0}])
def test_a_vector_of_half_precision_losses_is_summed_in_float32(scaled, path):
    w = torch.nn.Parameter(torch.ones(1))
    opt = st.wrap(torch.optim.SGD([w], lr=0.1), **scaled)
    opt.scale(torch.full((4,), 30000.0, dtype=torch.float16))  # 120000 is inf in float16
    w.grad = torch.ones(1)
    opt.step()
    assert opt.last["applied"]
    assert opt.last["loss"] == 120000.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sparse_gradient_without_entries(path, dtype):
    """The only gradient is that of an embedding that saw an empty batch."""
    table = torch.nn.Embedding(3, 2, sparse=True, dtype=dtype)
    opt = st.wrap(torch.optim.SGD(table.parameters(), lr=0.1), clip=1.0)
    before = table.weight.detach().clone()
    opt.backward(table(torch.zeros(0, dtype=torch.int64)).sum())
    opt.step()
    assert opt.last["applied"]
    assert opt.last["grad_norm"] == 0
    assert torch.equal(table.weight, before)


@pytest.mark.parametrize(("loss", "seen"), [(7e4, 7e4), (1e39, FLOAT32_MAX), (10**6, 1e6), (-math.inf, None)])
def test_a_closure_that_returns_a_plain_number(path, loss, seen):
    """It is used at full precision, whatever torch's default format and device."""
    w = torch.nn.Parameter(torch.ones(2))
    opt = st.wrap(torch.optim.AdamW([w], fused=True))
    w.grad = torch.ones(2)
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device("meta"):
            assert opt.step(lambda: loss) is loss
    finally:
        torch.set_default_dtype(torch.float32)
    assert opt.last["applied"] is (seen is not None)
    if seen is not None:
        assert opt.last["loss"] == seen


def test_a_step_under_another_default_device(path, rule):
    """The guard's tensors are created on the device of the parameters."""

    def train(device):
        params = parameters()
        opt = st.wrap(torch.optim.AdamW(params, lr=0.01, fused=True), names=named(params), **rule)
        for i in range(3):
            set_gradients(params, i)
            opt.scale(torch.tensor(1.0))
            with torch.device(device if i else "cpu"):  # the first step creates the inner state
                opt.step()
        return snapshot(opt)

    assert train("meta") == train("cpu")
