"""CUDA graphs: a guarded step contains nothing that a capture forbids, and its replays act as steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException

import stablenum
import stablenum_torch as st
import stablenum_torch._devices.waits as waits
from stablenum.reference.guarded import AdamW, Guarded
from stablenum_torch._step.guard import on_device_path
from tests.torch.conftest import RULES, named, parameters
from tests.torch.fake_cuda import CUDA, Operations, fake_cuda

OPTIMIZERS = {
    "adam": lambda ps: torch.optim.Adam(ps, fused=True, capturable=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, fused=True, capturable=True, amsgrad=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, fused=True),
}
CONFIGS = {
    "default": {},
    "fold": {"clip": 1.0, "loss_scale": "dynamic"},
    "escalates": {"loss_scale": "dynamic", "escalate": stablenum.EscalatePrecision()},
    **RULES,
}


# --------------------------------------------------------------- on fake CUDA tensors


def fake_step(make: Callable[[Any], torch.optim.Optimizer], settings: dict[str, Any]) -> Operations:
    """The operations of a third step on fake GPU tensors, with a scaled loss."""
    params = [torch.nn.Parameter(torch.empty(shape, device=CUDA)) for shape in ((3, 4), (5,), (2, 2))]
    for p in params:
        p.grad = torch.empty_like(p)
    opt = st.wrap(make(params), names=named(params), **settings)
    loss = torch.empty((), device=CUDA)
    for _ in range(2):  # what the first step allocates is allocated before a capture
        opt.scale(loss)
        opt.step()
    with Operations() as operations:
        opt.scale(loss)
        opt.step()
    return operations


# What a rule does depends little on the optimizer.
PAIRS = [("adamw", config) for config in CONFIGS] + [
    (optimizer, config) for optimizer in ("adam", "sgd") for config in ("fold", "by value", "update")
]


@pytest.mark.sampled
@pytest.mark.parametrize(("optimizer", "config"), PAIRS)
def test_a_step_stays_on_the_device(optimizer: str, config: str) -> None:
    with fake_cuda(), torch.no_grad():
        operations = fake_step(OPTIMIZERS[optimizer], CONFIGS[config])
    assert operations.off_the_device() == []
    names = [name for name, _, _ in operations.seen]
    assert any("_foreach_norm" in name or "linalg_vector_norm" in name for name in names)
    assert sum("_fused_" in name for name in names) == 1


def test_gradients_in_several_formats_and_missing_ones_stay_on_the_device() -> None:
    with fake_cuda(), torch.no_grad():
        params = [
            torch.nn.Parameter(torch.empty(4, device=CUDA, dtype=dtype))
            for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float16)
        ]
        opt = st.wrap(torch.optim.AdamW(params, fused=True, eps=1e-4), clip=1.0, loss_scale="dynamic")
        for p in params:
            p.grad = torch.empty_like(p)
        opt.step()
        params[1].grad = None
        with Operations() as operations:
            opt.step()
    assert operations.off_the_device() == []


@pytest.mark.parametrize(
    "planted",
    [
        lambda: torch.tensor([1.0]).to(CUDA),
        lambda: torch.empty(1, device=CUDA) * torch.ones(1, device=CUDA).to("cpu").to(CUDA),
        lambda: torch.scalar_tensor(1.0).to(CUDA),
    ],
)
def test_host_data_is_detected(planted: Callable[[], torch.Tensor]) -> None:
    with fake_cuda(), Operations() as operations:
        planted()
    assert operations.off_the_device() != []


def test_a_wait_is_detected() -> None:
    with fake_cuda(), pytest.raises(DataDependentOutputException):
        torch.empty((), device=CUDA).item()
    with fake_cuda(), pytest.raises(AssertionError, match="indexed by"):
        torch.empty(3, device=CUDA)[[0, 1]]


# --------------------------------------------------------------------- what Python does during a capture


class CudaFlag:
    """A flag that claims to be on a GPU."""

    is_cuda = True

    def __bool__(self) -> bool:
        return True


def test_an_optimizer_that_needs_the_host_raises_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    assert waits.wait_for_bool(CudaFlag())  # type: ignore[arg-type]
    monkeypatch.setattr(waits, "capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"optimizer must be able to skip .* Use fused=True"):
        waits.wait_for_bool(CudaFlag())  # type: ignore[arg-type]


class FakeEvent:
    """An event that completes when a test sets it."""

    arrived = False

    def record(self, stream: object) -> None:
        self.stream = stream

    def query(self) -> bool:
        return FakeEvent.arrived


@pytest.fixture
def asked_devices(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Background reads without a GPU; returns the devices whose streams were requested."""
    asked: list[torch.device] = []
    honest = torch.empty_like
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: asked.append(device))
    monkeypatch.setattr(torch, "empty_like", lambda t, device, pin_memory: honest(t, device=device))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    monkeypatch.setattr(FakeEvent, "arrived", False)
    return asked


def test_a_background_read_gives_its_value_once(
    asked_devices: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    read, number = waits.BackgroundRead(), torch.tensor(3)
    assert read.result() is None
    read.begin(number, torch.tensor([7.0, 8.0]))
    number.fill_(4)
    read.begin(number)  # one at a time: the first is still on its way
    assert read.result() is None
    FakeEvent.arrived = True
    assert [copy.tolist() for copy in read.result() or []] == [3, [7.0, 8.0]]
    assert read.result() is None
    read.begin(number)
    assert read.result() == [torch.tensor(4)]
    assert asked_devices == [torch.device("cpu")] * 2  # the tensor's own device, not the current one


def test_nothing_is_read_in_the_background_in_a_capture(
    asked_devices: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = waits.BackgroundRead()
    FakeEvent.arrived = True
    monkeypatch.setattr(waits, "capturing", lambda: True)
    read.begin(torch.tensor(3))
    assert asked_devices == []
    monkeypatch.setattr(waits, "capturing", lambda: False)
    read.begin(torch.tensor(3))
    monkeypatch.setattr(waits, "capturing", lambda: True)
    assert read.result() is None
    monkeypatch.setattr(waits, "capturing", lambda: False)
    assert read.result() == [torch.tensor(3)]


def test_skips_are_logged_without_a_wait_some_steps_later(
    asked_devices: list[torch.device], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waits, "_on_cuda", lambda tensor: True)
    w = torch.nn.Parameter(torch.ones(2))
    opt = st.wrap(torch.optim.SGD([w], lr=0.1), names={"w": w})
    seen = []
    for step in range(100):
        w.grad = torch.tensor([1.0, math.nan])
        with on_device_path():
            opt.step()
        FakeEvent.arrived = step % 16 == 9  # a copy takes ten steps
        if len(caplog.records) > len(seen):
            seen.append((step, caplog.records[-1].getMessage().split(" in a row")[0]))
    # Copied after step 15, which the host knows of at step 26; and again at step 31.
    assert seen == [(26, "16 steps"), (42, "32 steps")]
    assert len(asked_devices) == 6
    assert all("First bad parameter: w " in record.getMessage() for record in caplog.records)


def test_clipping_by_value_is_logged_without_a_wait_some_steps_later(
    asked_devices: list[torch.device], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waits, "_on_cuda", lambda tensor: True)
    w = torch.nn.Parameter(torch.ones(2))
    opt = st.wrap(torch.optim.SGD([w], lr=0.1), loss_scale=1024.0)
    seen = []
    for step in range(12):
        opt.zero_grad()
        opt.backward((w * w).sum())
        torch.nn.utils.clip_grad_value_([w], 1.0)
        with on_device_path():
            opt.step()
        FakeEvent.arrived = step == 7
        seen += [step] * (len(caplog.records) - len(seen))
    assert seen == [8]
    assert len(asked_devices) == 1
    assert "2 elements of the gradients came to the guard with the size 1, " in caplog.text


# --------------------------------------------------------------------------- a real capture

STEPS, WARM_UP = 23, 3
POISON = {5: math.nan, 6: math.inf, 11: -math.inf, 12: math.nan, 20: math.inf}
SETTINGS: dict[str, Any] = {
    "clip": (stablenum.ClipByNorm(30.0), 1.0),
    "loss_scale": stablenum.DynamicLossScale(init_scale=16.0, growth_interval=4),
    "spike": stablenum.SpikeGuard(window=24, min_samples=12),
    "max_skips_in_a_row": 20,
}


def gradients_at(step: int) -> list[np.ndarray]:
    """Unscaled gradients, some of them poisoned."""
    rng = np.random.default_rng(step)
    found = [rng.normal(size=p.shape).astype(np.float32) for p in parameters()]
    if step in POISON:
        found[step % 3].flat[0] = POISON[step]
    return found


class Training:
    """Tensors at fixed addresses and a step that reads only them, for capture in a graph."""

    def __init__(self, device: str) -> None:
        self.params = [torch.nn.Parameter(p.detach().to(device)) for p in parameters()]
        for p in self.params:
            p.grad = torch.zeros_like(p)
        self.raw = [torch.zeros_like(p) for p in self.params]
        self.loss = torch.zeros((), device=device)
        inner = torch.optim.AdamW(self.params, lr=1e-2, weight_decay=0.1, fused=True, capturable=True)
        self.opt = st.wrap(inner, names=named(self.params), **SETTINGS)

    def fill(self, step: int) -> None:
        """The inputs of a step, from the host."""
        for tensor, values in zip(self.raw, gradients_at(step), strict=True):
            tensor.copy_(torch.from_numpy(values))
        self.loss.fill_(1.0 + 0.01 * step)

    def step(self) -> None:
        """Scales and steps; writes only to its own tensors."""
        factor = self.opt.scale(self.loss) / self.loss
        for p, raw in zip(self.params, self.raw, strict=True):
            torch.mul(raw, factor, out=p.grad)
        self.opt.step()


def assert_as_the_specification(training: Training) -> None:
    start = {name: p.detach().numpy() for name, p in named(parameters()).items()}
    wanted = Guarded(start, AdamW(lr=1e-2, weight_decay=0.1), **SETTINGS)
    with np.errstate(all="ignore"):
        for step in range(STEPS):
            grads = [g * np.float32(wanted.loss_scale) for g in gradients_at(step)]
            wanted.step(dict(zip("abc", grads, strict=True)), 1.0 + 0.01 * step)
    assert sum(not row["applied"] for row in wanted.history()) >= len(POISON)
    for row, other in zip(training.opt.history(), wanted.history(), strict=True):
        for key in ("step", "applied", "reason", "loss_scale"):
            assert row[key] == other[key], key
        for key in ("grad_norm", "clip_coefficient", "loss"):
            assert row[key] == pytest.approx(other[key], rel=1e-5, nan_ok=True), key
    assert training.opt.loss_scale == wanted.loss_scale
    for p, q in zip(training.params, wanted.params.values(), strict=True):
        np.testing.assert_allclose(p.detach().cpu().numpy(), q, rtol=1e-4, atol=1e-6)


def test_steps_on_static_tensors_match_the_specification() -> None:
    """The same training as in the capture test, without a capture."""
    training = Training("cpu")
    with on_device_path():
        for step in range(STEPS):
            training.fill(step)
            training.step()
    assert_as_the_specification(training)


@pytest.mark.gpu
def test_replays_of_a_captured_step_match_the_specification() -> None:
    training = Training("cuda")
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for step in range(WARM_UP):
            training.fill(step)
            training.step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        training.step()
    for step in range(WARM_UP, STEPS):
        training.fill(step)
        graph.replay()
    torch.cuda.synchronize()
    assert_as_the_specification(training)


@pytest.mark.gpu
def test_an_optimizer_that_needs_the_host_raises_in_a_real_capture() -> None:
    p = torch.nn.Parameter(torch.ones(3, device="cuda"))
    p.grad = torch.ones_like(p)
    opt = st.wrap(torch.optim.RMSprop([p], capturable=True), clip=1.0)
    opt.step()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="optimizer must be able to skip"), torch.cuda.graph(graph):
        opt.step()


@pytest.mark.gpu
def test_a_step_runs_on_the_current_stream() -> None:
    """A step runs entirely on the current stream, including what the host reads later."""
    aside = torch.cuda.Stream()
    training = Training("cuda")
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for step in range(STEPS):
            training.fill(step)
            torch.cuda._sleep(1_000_000)  # a step on another stream would finish earlier
            training.step()
    torch.cuda.current_stream().wait_stream(aside)
    assert_as_the_specification(training)
