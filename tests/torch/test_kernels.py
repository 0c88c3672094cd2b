"""The guard's own kernels for a GPU, run by a stand-in for Triton: the core's decisions in two launches."""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import stablenum
import stablenum_torch as st
import stablenum_torch._devices.kernels.device_guard as device_guard
import stablenum_torch._devices.kernels.gradient_table as gradient_table
import stablenum_torch._devices.kernels.launches as launches
import stablenum_torch._step.by_kernels as by_kernels
import stablenum_torch._step.guard as guard_module
import stablenum_torch._step.on_device as on_device
from stablenum import GuardConfig, Observation, Reason, init_guard
from stablenum.arrays import leaves, map_leaves
from stablenum.formats import NO_LOSS
from stablenum.guard.ranks import Ranks
from stablenum_torch._devices.device_law import decide_on_device
from stablenum_torch._devices.kernels.device_guard import DeviceGuard, Kernel, Seen
from stablenum_torch._devices.kernels.gradient_table import GradientTable
from stablenum_torch._devices.kernels.printed_decide import Kinds, printed_decide
from stablenum_torch._devices.kernels.printed_elements import UnprintableError
from stablenum_torch._devices.scalar_namespace import scalars
from stablenum_torch._step.guard import on_device_path
from tests.torch.conftest import RULES, named, parameters, set_gradients
from tests.torch.triton_stand_in import formats, triton_stand_in

FOLD = {"clip": 1.0, "loss_scale": stablenum.DynamicLossScale(init_scale=8.0, growth_interval=3)}
SETTINGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "fold": FOLD,
    "halts": {**FOLD, "max_skips_in_a_row": 3},
    "raises": {**FOLD, "on_nonfinite": "raise"},
    "escalates": {"loss_scale": "dynamic", "escalate": stablenum.EscalatePrecision(after=1, for_steps=3)},
    "all of one factor": {
        "clip": [stablenum.AutoClip(), stablenum.ZClip(), stablenum.ClipByGlobalNorm(max_norm=1.0)],
        "loss_scale": "dynamic",
        "spike": "skip",
        "max_skips_in_a_row": 4,
    },
    **RULES,
}
# Norms of units, medians of rows and logarithms have no kernel.
WITHOUT_KERNEL = {"agc", "agc, last axis", "agc among others", "adagc", "adagc and agc", "log-max scale"}
WITHOUT_KERNEL |= {"all at once"}
PRINTED = [name for name in SETTINGS if name not in WITHOUT_KERNEL]


def few_of(names: Iterable[str], *few: str) -> list[Any]:
    """These names, of which all but ``few`` are slow cases."""
    return [name if name in few else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Guards decide by kernels, on CPU tensors; what is given counts the launches."""
    monkeypatch.setattr(guard_module, "can_launch", lambda _: True)
    monkeypatch.setattr(by_kernels, "_warned", [])
    with on_device_path(), triton_stand_in() as counts:
        yield counts


# --- the kernel's decisions are the core's ------------------------------------------------------------------


class InTheKernelsOrder(type(scalars)):  # type: ignore[misc]  # its class is private
    """The core's arithmetic with sums in the order of a kernel: of a block that is filled up with zeros."""

    @staticmethod
    def sum(x: Any, dtype: Any = None) -> Any:
        whole = np.zeros(max(16, 1 << (len(x) - 1).bit_length()), x.dtype)
        whole[: len(x)] = x
        return np.sum(whole, dtype=x.dtype if dtype is None else dtype)


def random_measurements(draw: np.random.Generator, n: int, needs: frozenset[str]) -> dict[str, Any]:
    """What a step may measure, with every kind of trouble; as float64, None for what is not known."""
    norms = np.abs(draw.standard_normal(n)) * 10.0 ** draw.integers(-3, 4)
    trouble = draw.integers(0, 14)
    if trouble < 2:
        norms[draw.integers(n)] = (np.inf, np.nan)[trouble]
    elif trouble < 7:
        norms *= (0.0, 1e-30, 1e-42, 1e37, 10.0 ** draw.integers(20, 60))[trouble - 2]
    loss: float | None = float(draw.standard_normal() * 10.0 ** draw.integers(-2, 3))
    if trouble >= 11:
        loss = (np.nan, NO_LOSS, 1e300)[trouble - 11]
    given: dict[str, Any] = {"norms": norms, "loss": loss, "found_inf": bool(draw.random() < 0.05)}
    if "amax" in needs:
        given["amax"] = float(np.max(norms))
    if "tiny" in needs:
        given["tiny"] = float(draw.random() * 0.2)
    return given


def in_float32(value: Any) -> Any:
    """As the adapter converts: what is finite stays finite."""
    wide = np.asarray(value, np.float64)
    top = float(np.finfo(np.float32).max)
    return np.where(np.isfinite(wide), np.clip(wide, -top, top), wide).astype(np.float32)[()]


def compare(config: GuardConfig, n: int, steps: int, *, ranks: int = 0, seed: int = 0) -> Counter[int]:
    """Assert that kernel and core decide alike, bit for bit, in random steps; return how often which reason
    came."""
    draw, xp = np.random.default_rng(seed), InTheKernelsOrder()
    state = init_guard(config, n, xp=torch_namespace())
    guard = DeviceGuard(config, state, n)
    known = map_leaves(lambda leaf: leaf.numpy().copy()[()], state)
    reasons: Counter[int] = Counter()
    for step in range(steps):
        given = random_measurements(draw, n, config.needs)
        without_loss, still = step % 7 == 3, step % 11 == 5
        if without_loss or ranks:
            given["loss"] = None
        rows = None
        if ranks:
            rows = np.stack([random_row(draw) for _ in range(ranks)]) if step % 13 else idle_rows(ranks)
            given["found_inf"] = None
        tensors = {k: v if v is None else torch.tensor(v, dtype=FORMATS[k]) for k, v in given.items()}
        seen = Seen(rows=None if rows is None else torch.from_numpy(rows), **tensors)
        measured = tuple(k for k, v in given.items() if v is not None and k != "norms")
        guard.decide(guard.kernel(still=still, measured=measured, ranks=ranks), seen)
        guard.keep()

        parts = {k: v if v is None or k == "found_inf" else in_float32(v) for k, v in given.items()}
        if parts["found_inf"] is not None:
            parts["found_inf"] = np.bool_(parts["found_inf"])
        of_ranks = None
        if rows is not None:
            of_ranks = Ranks(in_float32(rows[:, 0]), *rows[:, 1:].astype(np.float32).T)
        with np.errstate(all="ignore"):
            decision, known = decide_on_device(
                config, still, known, Observation(**parts, ranks=of_ranks), xp=xp
            )
        reasons[int(decision.reason)] += 1
        assert float(guard.skip) == float(not decision.apply)
        assert float(guard.applied) == float(bool(decision.apply))
        assert np.array_equal(guard.factor.numpy(), decision.multiplier)
        if not config.per_tensor:
            assert np.array_equal(guard.divisor.numpy(), np.float32(1.0) / decision.multiplier)
        for mine, wanted in zip(leaves(state), leaves(known), strict=True):
            assert np.array_equal(mine.numpy(), wanted, equal_nan=mine.is_floating_point()), step
    return reasons


FORMATS = {
    "norms": torch.float64, "loss": torch.float64, "found_inf": torch.bool, "amax": torch.float32,
    "tiny": torch.float32,
}  # fmt: skip


def torch_namespace() -> Any:
    import array_api_compat.torch as xp

    return xp


def random_row(draw: np.random.Generator) -> np.ndarray:
    norm = abs(draw.standard_normal()) * 10.0 ** draw.integers(-3, 4)
    trouble = draw.integers(0, 16)
    norm = (np.inf, np.nan, 0.0)[trouble] if trouble < 3 else norm
    loss = (np.nan, NO_LOSS)[trouble - 3] if 3 <= trouble < 5 else draw.standard_normal()
    worst = draw.integers(-1, 3)
    return np.array([norm, worst, loss, float(trouble == 5)])


def idle_rows(ranks: int) -> np.ndarray:
    return np.tile(np.array([0.0, -1.0, NO_LOSS, 0.0]), (ranks, 1))


@pytest.mark.parametrize("name", PRINTED)
def test_a_kernel_decides_as_the_core_does(name: str, launched: Counter[str]) -> None:
    config = GuardConfig(**SETTINGS[name])
    reasons = compare(config, 5, 70)
    assert {
        Reason.INF_GRADIENT,
        Reason.NAN_GRADIENT,
        Reason.NONFINITE_LOSS,
        Reason.FOUND_INF,
    } <= reasons.keys()


@pytest.mark.parametrize("name", ["fold", "each tensor"])
@pytest.mark.parametrize("n", [1, 16, 17, 300])
def test_a_kernel_decides_for_any_number_of_parameters(name: str, n: int, launched: Counter[str]) -> None:
    compare(GuardConfig(**SETTINGS[name]), n, 30)


@pytest.mark.parametrize("name", few_of(PRINTED, "fold", "halts", "spike skip", "underflow scale"))
def test_a_kernel_decides_for_ranks_together(name: str, launched: Counter[str]) -> None:
    compare(GuardConfig(**SETTINGS[name]), 3, 40, ranks=3)


@pytest.mark.slow
@pytest.mark.parametrize("name", PRINTED)
@pytest.mark.parametrize("seed", range(4))
def test_kernels_decide_as_the_core_does_in_many_steps(name: str, seed: int, launched: Counter[str]) -> None:
    """With all settings, a million steps."""
    steps = 1_000_000 // (len(PRINTED) * 4) + 1
    compare(GuardConfig(**SETTINGS[name]), (1, 3, 10, 40)[seed], steps, ranks=2 * (seed == 3), seed=seed)


@pytest.mark.parametrize("name", sorted(WITHOUT_KERNEL))
def test_what_no_kernel_can_do_bit_for_bit_is_refused(name: str) -> None:
    config = GuardConfig(**SETTINGS[name])
    with pytest.raises(UnprintableError):
        printed_decide(Kinds(config, 3, False, config.needs | {"loss"}))


@pytest.mark.parametrize("name", PRINTED)
def test_the_source_divides_and_takes_roots_to_nearest(name: str) -> None:
    """In Triton ``/`` and ``tl.sqrt`` of float32 are approximations."""
    config = GuardConfig(**SETTINGS[name])
    source = printed_decide(Kinds(config, 3, False, config.needs | {"loss"}))
    assert not re.search(r"[^/]/[^/]", source)
    assert [line for line in source.splitlines() if "tl.sqrt(" in line] == ["        wide = tl.sqrt(square)"]
    assert not re.search(r"tl\.(exp|log|fma|sin|cos|rsqrt|div)\b", source)


def test_a_decision_is_launched_without_fused_multiply_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {}

    class Kernel:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            return lambda *args, **kwargs: options.update(kwargs)

    monkeypatch.setattr(launches, "made", lambda source, name: Kernel())
    launches.decide_kernel.cache_clear()
    launches.decide_kernel(Kinds(GuardConfig(), 1, False, frozenset()))()
    launches.decide_kernel.cache_clear()
    assert options["enable_fp_fusion"] is False


# --- whole steps --------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "not fused": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
}


def train(
    settings: dict[str, Any], optimizer: str, steps: int = 30, **kwargs: Any
) -> tuple[list[nn.Parameter], st.GuardedOptimizer]:
    """A run with every situation that a decision can meet."""
    params = parameters(**kwargs)
    opt = st.wrap(OPTIMIZERS[optimizer](params), names=named(params), **settings)
    for i in range(steps):
        set_gradients(params, i, {10: 1e-30, 11: 1e30, 25: 300.0}.get(i, 8.0))
        if i in (2, 3):
            params[1].grad[0] = (math.inf, math.nan)[i - 2]
        if i == 12:
            params[2].grad = None
        opt.scale(torch.tensor(math.nan if i == 14 else 1.0 + 0.01 * i))
        opt.step()
    return params, opt


def assert_same(mine: Any, wanted: Any) -> None:
    for ours, theirs in zip(leaves(mine[1].guard_state), leaves(wanted[1].guard_state), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0, equal_nan=True)
    for a, b in zip(mine[0], wanted[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", few_of(RULES, "each tensor", "update", "hysteresis", "adagc", "spike clip"))
def test_runs_are_those_of_torchs_operations(
    name: str, optimizer: str, launched: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = train(RULES[name], optimizer)
    assert bool(launched["decided"]) == (name not in WITHOUT_KERNEL)
    launched.clear()
    monkeypatch.setattr(guard_module, "can_launch", lambda _: False)
    assert_same(mine, train(RULES[name], optimizer))
    assert not launched


def test_a_step_is_two_launches_besides_the_optimizers(launched: Counter[str]) -> None:
    params, opt = train(FOLD, "fused", 3)
    memory = [leaf.data_ptr() for leaf in leaves(opt.guard_state)]
    for _ in range(2):
        for p in params:
            assert p.grad is not None
            p.grad.fill_(8.0)
        opt.scale(torch.tensor(1.0))
        launched.clear()
        with Operations() as operations:
            opt.step()
    assert launched == {"squared": 1, "decided": 1}
    # Under a mode torch's own way is taken, which adds one to the counters of steps and may take it back.
    assert operations.seen == {
        "aten._foreach_add_.Scalar": 1, "aten._fused_adamw_.default": 1, "aten._foreach_sub_.List": 1,
    }  # fmt: skip
    assert [leaf.data_ptr() for leaf in leaves(opt.guard_state)] == memory


class Operations(TorchDispatchMode):
    """Counts operations of torch by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten":
            self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


# The formats for which the kernel of a decision is compiled; those of what is not measured do not matter.
FORMATS_OF_ARGUMENTS = {
    "norms": torch.float64, "squares": torch.float64, "first": torch.int32, "count": torch.int32, "most": int,
    "leaves": torch.int64, "before": torch.int64, "tag": torch.int32, "sequence": int, "loss": torch.float32,
    "found_inf": torch.bool, "amax": torch.float32, "tiny": torch.float32, "rows": torch.float64,
    "out": torch.float32, "factors": torch.float32,
}  # fmt: skip


@pytest.mark.parametrize("name", ["fold", "underflow scale", "each tensor"])
def test_a_kernel_gets_arguments_of_the_same_formats_however_norms_are_measured(
    name: str, launched: Counter[str]
) -> None:
    params, opt = train(SETTINGS[name], "fused", 2)
    params[0].grad = torch.ones(4 * params[0].numel())[::4].view_as(params[0])  # which torch measures
    opt.scale(torch.tensor(1.0))
    opt.step()
    for found in [one for one in formats if "leaves" in one]:
        for argument, wanted in FORMATS_OF_ARGUMENTS.items():
            if argument not in ("found_inf", "amax", "tiny", "rows", "loss") or argument in opt.config.needs:
                assert found[argument] == wanted, argument
    assert launched["squared"]
    assert len(launched) == 2


def test_gradients_of_several_formats_are_measured_in_one_launch(launched: Counter[str]) -> None:
    shapes = [(3, 5), (70_000,), (1,), (2, 3, 4, 5), (0,)]
    formats = [torch.float32, torch.float16, torch.bfloat16, torch.float32, torch.float32]
    draw = torch.Generator().manual_seed(0)
    grads = [torch.randn(s, generator=draw).to(f) for s, f in zip(shapes, formats, strict=True)]
    grads[3] = grads[3].contiguous(memory_format=torch.channels_last)
    table = GradientTable(torch.device("cpu"))
    assert table.follow([None, *grads])
    assert table.count.tolist() == [0, 1, 2, 1, 1, 0]
    launches.squares_kernel()(table.pieces, table.addresses, table.table, table.squares)
    assert launched == {"squared": 1}
    for i, grad in enumerate(grads, 1):
        own = table.squares[table.first[i] : table.first[i] + table.count[i]]
        assert float(own.sum()) == pytest.approx(float(grad.double().square().sum()), rel=1e-14)


def test_a_huge_gradient_is_cut_into_pieces_for_the_whole_device(launched: Counter[str]) -> None:
    grad = torch.zeros(2**24 + 5)
    grad[-1] = 3.0
    table = GradientTable(torch.device("cpu"))
    assert table.follow([grad])
    assert table.pieces == 129  # of at least 2^16 elements, a multiple of that, and at most 256
    assert int(table.table[2].sum()) == grad.numel()
    assert all(int(offset) % 16 == 0 for offset in table.table[1])
    assert not table.follow([torch.ones(1).expand(4)])


def test_a_gradient_of_another_shape_at_the_same_address_is_read_anew(launched: Counter[str]) -> None:
    memory = torch.ones(8)
    p = nn.Parameter(torch.zeros(4))
    opt = st.wrap(torch.optim.SGD([p], lr=1.0, fused=True), clip=100.0)
    p.grad = memory[:4]
    opt.step()
    assert opt.last["grad_norm"] == 2.0
    with torch.no_grad():
        p.set_(torch.zeros(8))
    memory[6] = math.nan
    p.grad = memory
    opt.step()
    assert not opt.last["applied"]
    # A view with gaps at that address is no dense gradient.
    table = GradientTable(torch.device("cpu"))
    assert table.follow([memory[:6]])
    assert not table.follow([memory[::2]])


@pytest.mark.parametrize("stop_at", [1, 2, 3])
def test_an_interrupt_while_addresses_are_sent_leaves_no_half_table(
    stop_at: int, launched: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = torch.ones(4), torch.full((2, 70_000), 2.0)
    table = GradientTable(torch.device("cpu"))
    assert table.follow([old])
    honest, calls = gradient_table._sent, iter(range(1, 9))

    def sent(*args: Any) -> Tensor:
        if next(calls) == stop_at:
            raise KeyboardInterrupt
        return honest(*args)

    with monkeypatch.context() as patch:
        patch.setattr(gradient_table, "_sent", sent)
        with pytest.raises(KeyboardInterrupt):
            table.follow([new])
    for grad in (old, new, old):
        assert table.follow([grad])
        launches.squares_kernel()(table.pieces, table.addresses, table.table, table.squares)
        assert float(table.squares.sum()) == float(grad.double().square().sum())


@pytest.mark.parametrize("device", ["meta"])
def test_a_default_device_does_not_matter(device: str, launched: Counter[str]) -> None:
    params = parameters()
    opt = st.wrap(OPTIMIZERS["fused"](params), **FOLD)
    set_gradients(params, 0, 8.0)
    opt.scale(torch.tensor(1.0))
    torch.set_default_device(device)
    try:
        opt.step()
    finally:
        torch.set_default_device(None)
    assert launched["squared"]
    assert opt.last["applied"]


@pytest.mark.parametrize("name", ["adagc", "log-max scale", "fold"])
def test_gradients_are_measured_once(
    name: str, launched: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    params, opt = train(SETTINGS[name], "fused", 3)
    measured: list[int] = []
    honest = by_kernels.measured_without_wait
    for module in (by_kernels, on_device):
        monkeypatch.setattr(
            module, "measured_without_wait", lambda inputs: (measured.append(1), honest(inputs))[1]
        )
    launched.clear()
    set_gradients(params, 5, 8.0)
    opt.scale(torch.tensor(1.0))
    opt.step()
    assert len(measured) + launched["squared"] == 1


def test_the_host_waits_once_for_an_optimizer_that_cannot_skip(
    launched: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    params, opt = train(FOLD, "not fused", 5)
    waits: list[bool] = []
    honest = on_device.wait_for_bool
    monkeypatch.setattr(on_device, "wait_for_bool", lambda flag: (waits.append(True), honest(flag))[1])
    set_gradients(params, 5, 8.0)
    opt.scale(torch.tensor(1.0))
    opt.step()
    assert launched["squared"]
    assert len(waits) == 1


READ_OTHERWISE: dict[str, Callable[[], Tensor]] = {
    "float64": lambda: torch.ones(4, dtype=torch.float64),
    "a column": lambda: torch.ones(4, 2)[:, 1],
    "sparse": lambda: torch.ones(4).to_sparse(),
    "complex": lambda: torch.ones(4, dtype=torch.complex64),
    "not aligned": lambda: torch.ones(5)[1:],
}


@pytest.mark.parametrize("kind", READ_OTHERWISE)
def test_other_gradients_are_measured_by_torch_and_decided_by_the_kernel(
    kind: str, launched: Counter[str]
) -> None:
    grad = READ_OTHERWISE[kind]()
    table = GradientTable(torch.device("cpu"))
    assert not table.follow([grad])
    p = nn.Parameter(torch.zeros(4, dtype=grad.dtype))
    opt = st.wrap(torch.optim.SGD([p], lr=1.0), clip=1.0)
    p.grad = grad
    opt.step()
    assert not launched["squared"]
    assert launched["decided"] > 1  # the others try it out
    assert opt.last["grad_norm"] == 2.0
    assert opt.last["clip_coefficient"] == pytest.approx(0.5)


def test_the_table_is_sent_again_only_if_a_gradient_has_moved(
    launched: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    honest = gradient_table._sent
    monkeypatch.setattr(gradient_table, "_sent", lambda *args: (sent.append(len(args[0])), honest(*args))[1])
    params = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    opt = st.wrap(torch.optim.SGD(params, lr=1.0, fused=True), clip=1.0)
    for p in params:
        p.grad = torch.ones(3)
    norms = []
    for step in range(6):
        for p, value in zip(params, (2.0 if step > 1 else 1.0, 1.0), strict=True):
            if p.grad is not None:  # the kernel of torch has divided it
                p.grad.fill_(value)
        if step == 2:
            params[0].grad = torch.full((3,), 2.0)
        if step == 4:
            params[1].grad = None
        opt.step()
        norms.append(opt.last["grad_norm"])
    # Sizes of pieces, where they begin, and addresses; then addresses alone; all when one is missing.
    assert sent == [4, 2, 2, 2, 4, 2, 2]
    assert norms == pytest.approx([6**0.5] * 2 + [15**0.5] * 2 + [12**0.5] * 2)


def test_added_parameters_and_new_settings_get_kernels_of_their_own(launched: Counter[str]) -> None:
    params, opt = train(FOLD, "fused", 3)
    more = nn.Parameter(torch.ones(2))
    opt.add_param_group({"params": [more]})
    more.grad = torch.ones(2)
    opt.scale(torch.tensor(1.0))
    opt.step()
    opt.config = GuardConfig(clip=0.5)
    more.grad = torch.full((2,), 3.0)
    for p in params:
        p.grad = None
    opt.step()
    assert opt.last["grad_norm"] == pytest.approx(18**0.5)
    assert opt.last["clip_coefficient"] == pytest.approx(0.5 / 18**0.5, rel=1e-5)


# --- a step whole or not at all -----------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["before the launch", "after the launch", "in the step", "after the step"])
def test_an_interrupt_leaves_the_state_before_or_after_the_step(
    place: str, launched: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    params, opt = train(FOLD, "fused", 4)
    before = [leaf.clone() for leaf in leaves(opt.guard_state)]
    own = [p.detach().clone() for p in params]
    set_gradients(params, 5, 8.0)
    opt.scale(torch.tensor(1.0))

    def stop(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    def then_stop(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            function(*args, **kwargs)
            raise KeyboardInterrupt

        return call

    kernels = opt._guard._kernels
    assert kernels is not None
    with monkeypatch.context() as patch:
        if place == "before the launch":
            patch.setattr(Kernel, "made", lambda self: stop)
        elif place == "after the launch":
            patch.setattr(DeviceGuard, "decide", then_stop(DeviceGuard.decide))
        elif place == "in the step":
            patch.setattr(on_device, "step_folded", stop)
        else:
            patch.setattr(on_device, "step_folded", then_stop(on_device.step_folded))
        with pytest.raises(KeyboardInterrupt):
            opt.step()
    moved = place == "after the step"
    assert any(not torch.equal(p, q) for p, q in zip(params, own, strict=True)) == moved
    for leaf, old in zip(leaves(opt.guard_state), before, strict=True):
        if not moved:
            assert torch.allclose(leaf, old, rtol=0.0, atol=0.0, equal_nan=True)
    assert int(opt.guard_state.step) == 4 + moved
    if not moved:  # the loss is still noted: the step can be taken after all
        opt.step()
        assert int(opt.guard_state.step) == 5


def test_a_decision_that_was_kept_is_not_taken_back(launched: Counter[str]) -> None:
    config = GuardConfig(clip=1.0)
    state = init_guard(config, 1, xp=torch_namespace())
    guard = DeviceGuard(config, state, 1)
    seen = Seen(torch.ones(1, dtype=torch.float64))
    kernel = guard.kernel(still=False, measured=(), ranks=0)
    for _ in range(2):
        guard.decide(kernel, seen)
        guard.keep()
        guard.undo()
    assert int(state.step) == 2
    guard.decide(kernel, seen)
    for _ in range(2):
        guard.undo()
    assert int(state.step) == 2


# --- nothing is used that was not tried ---------------------------------------------------------------------


def steps_of(settings: dict[str, Any]) -> list[Any]:
    _, opt = train(settings, "fused", 6)
    return [repr((row["reason"], row["grad_norm"], row["loss_scale"])) for row in opt.history()]


def test_without_triton_torch_decides(launched: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard_module, "can_launch", by_kernels.can_launch)
    monkeypatch.setattr(by_kernels, "has_triton", lambda: False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(steps_of(FOLD)) == 6
    assert not launched


def test_a_compiler_that_fails_is_told_of_once(
    launched: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = steps_of(FOLD)

    def fail(source: str, name: str) -> Any:
        raise RuntimeError("no assembler\nmore")

    monkeypatch.setattr(launches, "made", fail)
    by_kernels._trusted.clear()
    launches.decide_kernel.cache_clear()
    with pytest.warns(st.NotCompiledWarning, match="no assembler") as told:
        found = steps_of(FOLD), steps_of({**FOLD, "clip": 2.0})
    assert found[0] == wanted
    assert found[1][0] == wanted[0]
    assert len(told) == 1


def test_a_kernel_that_decides_otherwise_is_not_used(
    launched: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = steps_of(FOLD)
    honest = launches.printed_decide
    # The scale grows by another factor.
    monkeypatch.setattr(
        launches, "printed_decide", lambda kinds: honest(kinds).replace(" * 0.5)", " * 0.25)")
    )
    by_kernels._trusted.clear()
    launches.decide_kernel.cache_clear()
    launched.clear()
    with pytest.warns(st.NotCompiledWarning, match="decide differently"):
        assert steps_of(FOLD) == wanted
    assert launched["squared"] == 1  # in the trial


@pytest.mark.parametrize(
    "change",
    [
        (" * 2.0)", " * 4.0)"),  # the scale grows by another factor
        (" * 0.5)", " * 0.50003)"),  # and shrinks by one that is hardly another
        (">= 2000)", ">= 2001)"),
        ("tl.argmax(", "1 - tl.argmax("),  # another parameter is called the worst, the first or the second
    ],
)
def test_a_kernel_that_is_wrong_in_a_rare_step_is_not_used_either(
    change: tuple[str, str], launched: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = launches.printed_decide
    monkeypatch.setattr(launches, "printed_decide", lambda kinds: honest(kinds).replace(*change))
    assert honest(Kinds(GuardConfig(loss_scale="dynamic"), 3, False, frozenset())).count(change[0])
    with pytest.warns(st.NotCompiledWarning, match="decide differently"):
        steps_of({"clip": 1.0, "loss_scale": "dynamic"})


@pytest.mark.parametrize("name", few_of(PRINTED, "autoclip", "fold", "spike mean"))
def test_a_right_kernel_is_trusted(name: str, launched: Counter[str]) -> None:
    """Although torch adds up norms in another order, and a quantile may be one of them."""
    for seed in range(10):
        by_kernels._trusted.clear()
        draw = torch.Generator().manual_seed(seed)
        params = [nn.Parameter(torch.randn(3, generator=draw)) for _ in range(12)]
        opt = st.wrap(OPTIMIZERS["fused"](params), **SETTINGS[name])
        for p in params:
            p.grad = torch.randn(p.shape, generator=draw)
        opt.scale(torch.tensor(1.0))
        with warnings.catch_warnings():
            warnings.simplefilter("error", st.NotCompiledWarning)
            opt.step()


def test_a_long_window_has_no_kernel(launched: Counter[str]) -> None:
    """To compile the sort of a long block takes minutes."""
    steps_of({"clip": stablenum.AutoClip(window=3000)})
    assert not launched["decided"]


def test_what_has_no_kernel_is_told_of_to_nobody(launched: Counter[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps_of(RULES["adagc"])
    assert not launched


def test_while_a_graph_is_captured_no_table_is_sent_and_nothing_tried(
    launched: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, opt = train(FOLD, "fused", 3)
    for module in (by_kernels, device_guard, guard_module):
        monkeypatch.setattr(module, "capturing", lambda: True)
    launched.clear()
    opt.scale(torch.tensor(1.0))
    opt.step()
    assert launched == {"decided": 1}  # of the norms that torch measures
    launched.clear()
    other = st.wrap(torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=1.0, fused=True), clip=7.0)
    other.param_groups[0]["params"][0].grad = torch.ones(2)
    other.step()
    assert not launched
    assert other._guard._kernels is None  # to make one copies from the host, which ends a capture


def test_what_a_graph_has_captured_stays_alive(
    launched: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, opt = train(FOLD, "fused", 3)
    kernels = opt._guard._kernels
    with monkeypatch.context() as patch:
        patch.setattr(device_guard, "_captured", kept := [])
        for module in (by_kernels, device_guard, guard_module):
            patch.setattr(module, "capturing", lambda: True)
        opt.scale(torch.tensor(1.0))
        opt.step()
        opt.config = GuardConfig(clip=7.0)
        opt.step()
    assert kept == [kernels]


def test_compiling_may_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_kernels, "has_triton", lambda: True)

    class OnGpu(Tensor):
        is_cuda = True

    on = torch.zeros(()).as_subclass(OnGpu)
    monkeypatch.setattr(by_kernels, "Tensor", OnGpu)
    assert by_kernels.can_launch(on)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    assert not by_kernels.can_launch(on)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    assert by_kernels.can_launch(on)
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # which cannot follow addresses on a device
    assert not by_kernels.can_launch(on)
