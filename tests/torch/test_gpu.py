"""What a guarded step does on a GPU; each body also runs on a CPU or on fake GPU tensors."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import stablenum
import stablenum_torch as st
import stablenum_torch._devices.compiled_decide as compiled
import stablenum_torch._step.guard as guard_module
import stablenum_torch._step.on_device as device_step
from stablenum.arrays import leaves
from stablenum_torch._step.guard import on_device_path
from stablenum_torch._step.inputs import StepInputs
from stablenum_torch._step.observe import measured_without_wait
from stablenum_torch._step.plain_decision import decided_without_wait
from tests.selection import slow_but_for
from tests.torch.fake_cuda import CUDA, Operations, fake_cuda

EVERYTHING: dict[str, Any] = {
    "clip": (stablenum.ClipByNorm(50.0), stablenum.ZClip(warmup_steps=10), 1.0),
    "loss_scale": stablenum.DynamicLossScale(init_scale=2.0**24, growth_interval=20),
    "spike": "skip",
    "escalate": stablenum.EscalatePrecision(after=30, for_steps=5),
    "max_skips_in_a_row": 50,
}
FOLD: dict[str, Any] = {"clip": 1.0, "loss_scale": "dynamic"}
# What a guarded step launches beyond the bare one, for up to 100 tensors of one format: 2 or 3 kernels for
# the norms, 1 that puts them side by side, 5 for the decision, 2 copies into the state, 3 around the loss.
MOST_LAUNCHES = 14
# The same with the guard's own kernels: 2 of these, 2 for the loss, and under a profiler one that takes a
# skipped step back.
MOST_WITH_KERNELS = 5


@pytest.fixture
def as_on_a_gpu() -> Iterator[None]:
    with on_device_path():
        yield


# ------------------------------------------------------------------------------ half precision


def train_in_half_precision(device: str, dtype: torch.dtype, settings: dict[str, Any]) -> st.GuardedOptimizer:
    """Learn a small function under autocast with every feature on, and check that it was learnt."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
    x = torch.randn(256, 16)
    y = (x[:, :1] * x[:, 1:2] + x[:, 2:3]).to(device)
    net, x = net.to(device), x.to(device)
    opt = st.wrap(torch.optim.AdamW(net.parameters(), lr=3e-3, fused=True), names=net, **settings)
    losses = []
    for _ in range(150):
        opt.zero_grad()
        with opt.autocast(dtype):
            loss = nn.functional.mse_loss(net(x).float(), y)
        opt.backward(loss)
        opt.step()
        losses.append(loss.detach())
    assert all(bool(p.isfinite().all()) for p in net.parameters())
    assert losses[-1] < 0.5 * losses[0]
    return opt


HALVES = [(torch.float16, 4), (torch.bfloat16, 0)]  # with the least number of overflows to expect


@pytest.mark.parametrize(("dtype", "overflows"), slow_but_for(HALVES[:1], HALVES))
def test_training_in_half_precision(as_on_a_gpu: None, dtype: torch.dtype, overflows: int) -> None:
    opt = train_in_half_precision("cpu", dtype, EVERYTHING)
    assert opt.last["skipped_total"] >= overflows


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "overflows"), HALVES)
def test_training_in_half_precision_on_a_gpu(dtype: torch.dtype, overflows: int) -> None:
    opt = train_in_half_precision("cuda", dtype, EVERYTHING)
    assert opt.last["skipped_total"] >= overflows


# ------------------------------------------------------------------------------------- waiting


@contextmanager
def no_wait(device: str) -> Iterator[None]:
    """On a GPU any wait is an error."""
    if device != "cuda":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_no_wait_ignores_the_prototype_warning_of_sync_debug_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warnings are errors here, and torch emits one at the first call."""
    modes = []

    def set_sync_debug_mode(mode: str) -> None:
        message = (
            "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing"
        )
        warnings.warn(f"{message} operations", UserWarning, stacklevel=2)
        modes.append(mode)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_sync_debug_mode)
    with no_wait("cuda"):
        pass
    assert modes == ["error", "default"]


def steps_without_a_wait(device: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(device)
    opt = st.wrap(torch.optim.AdamW(net.parameters(), fused=True), names=net, **EVERYTHING)
    batches = [torch.randn(32, 8, device=device) for _ in range(30)]
    batches[7][0, 0] = torch.nan

    def step(x: torch.Tensor) -> None:
        opt.zero_grad()
        with opt.autocast():
            loss = net(x).float().square().mean()
        opt.backward(loss)
        opt.step()

    step(batches[0])  # torch loads kernels and allocates state at the first step
    step(batches[1])
    with no_wait(device):
        for x in batches[2:]:
            step(x)
    assert opt.last["skipped_total"] >= 1
    assert opt.last["step"] == 29


def test_steps_without_a_wait(as_on_a_gpu: None) -> None:
    steps_without_a_wait("cpu")


@pytest.mark.gpu
def test_steps_without_a_wait_on_a_gpu() -> None:
    steps_without_a_wait("cuda")


@pytest.mark.gpu
def test_skips_are_logged_without_a_wait_on_a_gpu(caplog: pytest.LogCaptureFixture) -> None:
    w = nn.Parameter(torch.ones(2, device="cuda"))
    opt = st.wrap(torch.optim.SGD([w], lr=0.1, fused=True), names={"w": w})
    w.grad = torch.full_like(w, torch.nan)
    opt.step()
    with no_wait("cuda"):
        for _ in range(64):
            opt.step()
    torch.cuda.synchronize()
    opt.step()
    assert "steps in a row were skipped" in caplog.text
    assert "First bad parameter: w " in caplog.text


CLIPS = {
    "norm": (nn.utils.clip_grad_norm_, "with the joint norm 1, "),
    "value": (nn.utils.clip_grad_value_, "with the size 1, "),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", CLIPS)
def test_clipping_of_scaled_gradients_is_logged_on_a_gpu(name: str, caplog: pytest.LogCaptureFixture) -> None:
    clip, told = CLIPS[name]
    w = nn.Parameter(torch.linspace(-2, 2, 64, device="cuda"))
    opt = st.wrap(torch.optim.SGD([w], lr=0.1, fused=True), loss_scale=1024.0)
    factors = torch.rand(100, 64, device="cuda")

    def train(steps: int) -> None:
        for i in range(steps):
            opt.zero_grad()
            opt.backward((w.square() * factors[i]).sum())
            clip([w], 1.0)
            opt.step()

    train(2)
    with no_wait("cuda"):
        train(70)
    torch.cuda.synchronize()
    train(1)
    assert told in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
def test_clipping_by_hand_after_unscale_equals_gradscaler_on_a_gpu(fused: bool) -> None:
    ours, theirs = ([nn.Parameter(torch.ones(5, device="cuda"))] for _ in range(2))
    scale = stablenum.DynamicLossScale(init_scale=1024.0, growth_interval=3)
    opt = st.wrap(torch.optim.AdamW(ours, lr=0.1, fused=fused), loss_scale=scale)
    peer = torch.optim.AdamW(theirs, lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=3)
    for step in range(16):
        for o, params, scaled in ((opt, ours, opt.scale), (peer, theirs, scaler.scale)):
            o.zero_grad()
            scaled((params[0] - 1.5).mul(1.0 + step).square().sum()).backward()
            if step % 4 == 1:
                params[0].grad[0] = torch.inf
        opt.unscale_()
        scaler.unscale_(peer)
        for params in (ours, theirs):
            nn.utils.clip_grad_norm_(params, 0.5)
        opt.step()
        scaler.step(peer)
        scaler.update()
        assert opt.loss_scale == scaler.get_scale()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.gpu
def test_a_skip_undoes_batch_norm_statistics_without_a_wait_on_a_gpu() -> None:
    ends = []
    for bad in ((0, 3), ()):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).cuda()
        opt = st.wrap(torch.optim.AdamW(net.parameters(), lr=0.1, fused=True), buffers=net)
        batches = [torch.randn(8, 3, generator=torch.Generator().manual_seed(i)).cuda() for i in range(6)]
        for i in bad:
            batches[i].fill_(torch.nan)
        kept = range(6) if bad else (1, 2, 4, 5)
        for number, i in enumerate(kept):
            opt.zero_grad()
            with no_wait("cuda" if number > 2 else "cpu"):
                opt.backward(net(batches[i]).square().mean())
                opt.step()
        ends.append({name: t.cpu().numpy().tobytes() for name, t in net.state_dict().items()})
    assert ends[0] == ends[1]


# --------------------------------------------------------------------------- launches and memory


def small_model(device: Any, n: int = 100) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.ones(16, 16, device=device)) for _ in range(n)]
    for p in params:
        p.grad = torch.ones_like(p)
    return params


VIEWS = ("aten.detach", "aten.unbind", "aten.select", "aten.slice", "aten.view", "prim.", "profiler.")


def launching(operations: Operations) -> Counter[str]:
    """The operations that launch kernels, by name."""
    return Counter(name for name, _, _ in operations.seen if not name.startswith(VIEWS))


def test_kernels_launched_besides_the_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are one multi-tensor norm, one stack and two copies, however many tensors there are."""
    with fake_cuda(), torch.no_grad():
        bare = torch.optim.AdamW(small_model(CUDA), fused=True)
        params = small_model(CUDA)
        opt = st.wrap(torch.optim.AdamW(params, fused=True), **FOLD)
        bare.step()
        opt.step()
        known = decided_without_wait(
            opt.config,
            False,
            opt.guard_state,
            measured_without_wait(StepInputs(opt.config, params, (), CUDA)),
        )
        monkeypatch.setattr(device_step, "fewer_kernels", lambda *_, **__: lambda *args: known)
        with Operations() as theirs:
            bare.step()
        with Operations() as ours:
            opt.step()
    extra = launching(ours) - launching(theirs)
    # torch subtracts a skipped step from the step counters.
    assert extra.pop("aten._foreach_sub_.List") == 1
    assert extra == {
        "aten._foreach_norm.Scalar": 1,
        "aten.stack.default": 1,
        "aten._foreach_copy_.default": 2,
    }


def launches(step: Any) -> int:
    """Kernels and copies that a step launches, by torch's profiler."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the profiler's own
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step()
            torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def guarded_and_bare(device: Any, make: Any) -> tuple[Any, Any, st.GuardedOptimizer]:
    """A guarded step, including the loss, and a bare one."""
    bare = torch.optim.AdamW(make(device), fused=True)
    opt = st.wrap(torch.optim.AdamW(make(device), fused=True), **FOLD)
    loss = torch.ones((), device=device)

    def guarded() -> None:
        opt.scale(loss)
        opt.step()

    for _ in range(3):
        guarded()
        bare.step()
    return guarded, bare.step, opt


@pytest.mark.gpu
def test_launches_of_the_guards_own_kernels_on_a_gpu() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", st.NotCompiledWarning)
        guarded, bare, opt = guarded_and_bare("cuda", small_model)
    kernels = opt._guard._kernels
    assert kernels is not None
    assert all(kernel.trusted for kernel in kernels._kernels.values())
    assert launches(guarded) - launches(bare) <= MOST_WITH_KERNELS


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_guards_own_kernels_decide_as_torchs_operations_on_a_gpu(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for kernels in (True, False):
        if not kernels:
            monkeypatch.setattr(guard_module, "can_launch", lambda _: False)
        draw = torch.Generator().manual_seed(0)
        params = [nn.Parameter(torch.zeros(n, device="cuda", dtype=dtype)) for n in (3, 70_000, 2_000_000)]
        opt = st.wrap(torch.optim.AdamW(params, lr=1e-3, fused=True), **FOLD)
        for i in range(20):
            for p in params:
                p.grad = torch.randn(p.shape, generator=draw).to("cuda", dtype)
            if i % 6 == 5:
                params[i % 3].grad[-1] = (math.inf, math.nan)[i % 2]
            opt.scale(torch.tensor(1.0 + i, device="cuda"))
            opt.step()
        own = opt._guard._kernels
        assert (own is not None and all(kernel.trusted for kernel in own._kernels.values())) == kernels
        found.append((params, leaves(opt.guard_state)))
    for mine, wanted in zip(*(state for _, state in found), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-6, atol=0, equal_nan=True)
    for p, q in zip(*(params for params, _ in found), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-6)


@pytest.mark.gpu
def test_launches_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard_module, "can_launch", lambda _: False)
    guarded, bare, _ = guarded_and_bare("cuda", small_model)
    assert not compiled._Compiled.warned, "the decision was not compiled: install Triton and a C compiler"
    assert launches(guarded) - launches(bare) <= MOST_LAUNCHES


def large_model(device: Any) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.ones(1024, 1024, device=device)) for _ in range(16)]
    for p in params:
        p.grad = torch.ones_like(p)
    return params


def tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def bytes_of(state: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves(state))


class Allocations(TorchDispatchMode):
    """``largest``: the most bytes that one operation's new tensors have."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        old = {t.untyped_storage()._cdata for t in tensors_in((args, kwargs))}
        made = [t for t in tensors_in(out) if t.untyped_storage()._cdata not in old]
        self.largest = max(self.largest, sum(t.numel() * t.element_size() for t in made))
        return out


def test_a_step_allocates_nothing_as_large_as_a_gradient() -> None:
    with fake_cuda(), torch.no_grad():
        guarded, bare, opt = guarded_and_bare(CUDA, large_model)
        with Allocations() as theirs:
            bare()
        with Allocations() as ours:
            guarded()
        assert theirs.largest < 4096
        assert ours.largest <= bytes_of(opt.guard_state)
        with Allocations() as planted:
            torch.empty(1024, 1024, device=CUDA).mul(2.0)
    assert planted.largest == 4 * 2**20


def peak_bytes(step: Any) -> int:
    """The peak memory of a step beyond what is allocated before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.gpu
def test_peak_memory_on_a_gpu() -> None:
    guarded, bare, opt = guarded_and_bare("cuda", large_model)
    # torch allocates in blocks of 512 bytes: one for each of the 16 norms and for each decided number.
    small = 512 * 200 + 2 * bytes_of(opt.guard_state)
    assert peak_bytes(guarded) <= peak_bytes(bare) + small
