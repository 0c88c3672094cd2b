"""The decision compiled, as on a GPU, here by inductor for the CPU: the same decisions in fewer kernels."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch._dynamo
from torch._inductor.utils import run_and_get_code
from torch.utils.flop_counter import FlopCounterMode

import stablenum
import stablenum_torch as st
import stablenum_torch._devices.compiled_decide as compiled
import stablenum_torch._step.observe as observe
from stablenum.arrays import leaves
from stablenum_torch._devices.traced import Traced
from stablenum_torch._step.guard import on_device_path
from tests.torch.conftest import RULES, named, parameters, set_gradients, snapshot

FOLD = {"clip": 1.0, "loss_scale": stablenum.DynamicLossScale(init_scale=8.0, growth_interval=3)}
OTHERS = {
    "nothing": {},
    "stops": {"clip": 1.0, "max_skips_in_a_row": 3},
    "escalates": {"loss_scale": "dynamic", "escalate": stablenum.EscalatePrecision(after=1, for_steps=3)},
    **{name: rule for name, rule in RULES.items() if not stablenum.GuardConfig(**rule).unit_rule},
}


@pytest.fixture(autouse=True)
def on_the_device_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(compiled._Compiled, "warned", set())
    compiled._compiled.cache_clear()
    torch._dynamo.reset()
    with on_device_path(), warnings.catch_warnings():
        # Warnings of the compilers are ignored, those of the guard are not.
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", compiled.NotCompiledWarning)
        yield
    compiled._compiled.cache_clear()
    torch._dynamo.reset()


def switch(monkeypatch: pytest.MonkeyPatch, on: bool, backend: Any = "inductor") -> None:
    monkeypatch.setattr(compiled, "_pays_off", lambda _: on)
    monkeypatch.setattr(compiled, "_BACKEND", backend)


def make(settings: dict[str, Any]) -> tuple[list[torch.nn.Parameter], st.GuardedOptimizer]:
    params = parameters()
    return params, st.wrap(torch.optim.AdamW(params, lr=0.01, fused=True), names=named(params), **settings)


def train(settings: dict[str, Any], steps: int = 30) -> tuple[list[torch.nn.Parameter], st.GuardedOptimizer]:
    """A run with every situation that a decision can meet."""
    params, opt = make(settings)
    for i in range(steps):
        set_gradients(params, i, {10: 1e-30, 11: 1e30, 25: 300.0}.get(i, 8.0))
        if i in (2, 3):
            params[1].grad[0] = (math.inf, math.nan)[i - 2]
        if i == 12:
            params[2].grad = None
        opt.scale(torch.tensor(math.nan if i == 14 else 1.0 + 0.01 * i))
        opt.step()
    return params, opt


def assert_same(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    switch(monkeypatch, True)
    params, opt = train(settings)
    switch(monkeypatch, False)
    wanted_params, wanted = train(settings)
    for row, other in zip(opt.history(), wanted.history(), strict=True):
        for key in ("step", "reason", "loss_scale", "worst", "precision_level", "loss"):
            assert row[key] == other[key] or (row[key] != row[key] and other[key] != other[key]), key
        for key in ("grad_norm", "clip_coefficient"):
            assert row[key] == pytest.approx(other[key], rel=1e-6, nan_ok=True), key
    for ours, theirs in zip(leaves(opt.guard_state), leaves(wanted.guard_state), strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0, equal_nan=True)
    for a, b in zip(params, wanted_params, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_decisions_are_those_of_eager_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_same(FOLD, monkeypatch)


@pytest.mark.parametrize(
    "name", [name if name == "stops" else pytest.param(name, marks=pytest.mark.slow) for name in OTHERS]
)
def test_every_rule_decides_as_eager_operations_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_same(OTHERS[name], monkeypatch)


def test_a_decision_is_one_generated_function_and_two_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the norms and the optimizer there is one generated function; the state keeps its memory."""
    switch(monkeypatch, True)
    params, opt = make(FOLD)
    memory = [leaf.data_ptr() for leaf in leaves(opt.guard_state)]
    set_gradients(params, 0, 8.0)
    opt.scale(torch.tensor(1.0))
    _, code = run_and_get_code(opt.step)
    assert len(code) == 1
    body = code[0].split("def call(")[1]
    # In C++ one call contains all loops; an operation that inductor cannot generate would be a call to aten.
    assert body.count("cpp_fused_") == 1
    assert "torch.ops.aten" not in body
    assert "extern_kernels" not in body
    copies: list[int] = []
    honest = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda to, of: (copies.append(len(to)), honest(to, of)))
    set_gradients(params, 1, 8.0)
    opt.step()
    assert len(copies) == 2  # one for each format of the state
    assert [leaf.data_ptr() for leaf in leaves(opt.guard_state)] == memory
    assert opt.last["step"] == 1


@pytest.mark.slow
def test_a_decision_is_compiled_without_dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each kind of arguments: here a loss that is there, in two formats, or not."""
    switch(monkeypatch, True)
    torch._dynamo.utils.counters.clear()
    compilations: list[int] = []
    honest = Traced._compiled

    def counted(self: Traced, *args: Any) -> Any:
        compilations.append(1)
        return honest(self, *args)

    monkeypatch.setattr(Traced, "_compiled", counted)
    params, opt = make({"clip": 1.0})
    for i, dtype in enumerate((None, torch.float32, torch.float64) * 2):
        set_gradients(params, i, 8.0)
        if dtype is not None:
            opt.scale(torch.tensor(1.0, dtype=dtype))
        opt.step()
    assert len(compilations) == 3
    assert graphs() == 0
    assert opt.last["applied"]


@pytest.mark.slow
def test_torch_compile_is_asked_where_the_private_interfaces_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    switch(monkeypatch, True)
    torch._dynamo.utils.counters.clear()

    def other_version(*_: object) -> None:
        raise ImportError("cannot import name 'compile_fx_inner'")

    monkeypatch.setattr(Traced, "_compiled", other_version)
    with pytest.warns(st.NotCompiledWarning, match=r"50 us more.*cannot import name") as messages:
        _, opt = train(FOLD)
    assert len(messages) == 1
    assert graphs() == 1
    switch(monkeypatch, False)
    _, wanted = train(FOLD)
    assert [row["reason"] for row in opt.history()] == [row["reason"] for row in wanted.history()]


def test_a_warning_that_is_an_error_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    switch(monkeypatch, True)

    def other_version(*_: object) -> None:
        raise ImportError("cannot import name 'compile_fx_inner'")

    monkeypatch.setattr(Traced, "_compiled", other_version)
    params, opt = make(FOLD)
    set_gradients(params, 0, 8.0)
    opt.scale(torch.tensor(1.0))
    with pytest.raises(st.NotCompiledWarning, match=r"^the guard.s decision is compiled by torch\.compile"):
        opt.step()


@pytest.mark.parametrize("variable", ["TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"])
def test_a_variable_of_torch_turns_tracing_off(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    switch(monkeypatch, True)
    monkeypatch.setenv(variable, "1")
    monkeypatch.setattr(Traced, "__call__", lambda *_: pytest.fail("this was compiled"))
    params, opt = make(FOLD)
    set_gradients(params, 0, 8.0)
    opt.scale(torch.tensor(1.0))
    opt.step()
    assert opt.last["step"] == 0


@pytest.mark.slow
def test_threads_trace_one_after_the_other() -> None:
    """torch's tracing is not made for several threads at once."""
    functions = [Traced(lambda x, n=n: (x + n,), {}) for n in range(3)]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda f: f(torch.ones(3)), functions))
    assert [x[0].tolist() for x in found] == [[1.0] * 3, [2.0] * 3, [3.0] * 3]


@pytest.mark.slow
def test_tensors_that_lie_otherwise_in_memory_are_traced_anew() -> None:
    twice = Traced(lambda x: (2 * x,), {})
    values = torch.arange(6.0).reshape(2, 3)
    for x in (values, values.t().contiguous().t(), torch.ones(3).expand(2, 3)):
        assert torch.equal(twice(x)[0], 2 * x)


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def test_compiled_once_with_a_loss_and_once_without(monkeypatch: pytest.MonkeyPatch) -> None:
    switch(monkeypatch, True, "eager")
    torch._dynamo.utils.counters.clear()
    params, opt = make(FOLD)
    seen = []
    for i in range(8):
        set_gradients(params, i, 8.0)
        if i % 4 == 3:
            params[0].grad = None
        if i >= 4:
            opt.scale(torch.tensor(1.0))
        opt.step()
        seen.append(graphs())
    assert seen == [1] * 4 + [2] * 4


LIMIT = 2


@torch._dynamo.config.patch(recompile_limit=LIMIT)
def test_more_settings_than_the_recompilation_limit_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    switch(monkeypatch, True, "eager")
    torch._dynamo.utils.counters.clear()
    for i in range(LIMIT + 1):
        params, opt = make({"clip": 1.0 + i})
        set_gradients(params, 0, 8.0)
        opt.step()
    assert graphs() == LIMIT + 1
    params, opt = make({"clip": 1.0})
    set_gradients(params, 0, 8.0)
    opt.step()
    assert graphs() == LIMIT + 1  # optimizers with the same settings share what was compiled


@torch._dynamo.config.patch(recompile_limit=LIMIT)
def test_more_models_than_the_recompilation_limit_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    switch(monkeypatch, True, "eager")
    torch._dynamo.utils.counters.clear()
    for n in range(1, LIMIT + 2):
        params = [torch.nn.Parameter(torch.ones(2)) for _ in range(n)]
        opt = st.wrap(torch.optim.AdamW(params, fused=True), clip=1.0)
        set_gradients(params, 0)
        opt.step()  # a warning that it could not be compiled would be an error here
    assert graphs() == LIMIT + 1


def no_compiler(*_: object) -> None:
    raise RuntimeError("Cannot find a working triton installation.\nand more")


def test_without_a_compiler_training_goes_on_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    switch(monkeypatch, True, no_compiler)
    with pytest.warns(st.NotCompiledWarning, match=r"working triton.*Triton and a C compiler") as messages:
        _, opt = train(FOLD)
    assert len(messages) == 1
    train({"clip": 2.0})  # a second warning would be an error here
    switch(monkeypatch, False)
    _, wanted = train(FOLD)
    assert snapshot(opt) == snapshot(wanted)
    assert opt.last["skipped_total"] == wanted.last["skipped_total"] == 3


def test_wrong_arguments_raise_the_same_errors_as_without_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    switch(monkeypatch, True, "eager")
    params, opt = make({"clip": stablenum.AdaGC(warmup_steps=2)})
    monkeypatch.setattr(observe, "gradient_norms_without_wait", lambda *_: torch.ones(5, dtype=torch.float64))
    set_gradients(params, 0)
    with pytest.raises(
        ValueError, match=r"observation.norms must have one entry for each of the 3 parameters"
    ):
        opt.step()


def test_torchs_own_switch_disables_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    switch(monkeypatch, True, "eager")
    torch._dynamo.utils.counters.clear()
    params, opt = make(FOLD)
    set_gradients(params, 0)
    with torch.compiler.set_stance("force_eager"):
        opt.step()
    assert graphs() == 0
    assert opt.last["step"] == 0


def test_torch_has_every_inductor_option_that_is_set() -> None:
    """Options unknown to torch are left out silently."""
    assert compiled._known_options() == compiled._NUMERICS


def test_a_rule_for_units_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    switch(monkeypatch, True, no_compiler)
    params, opt = make({"clip": stablenum.AdaptiveGradClip(output_axis="first")})
    set_gradients(params, 0)
    opt.step()
    assert opt.last["applied"]
    assert not compiled._Compiled.warned


def test_tensors_without_data_and_on_the_cpu_are_left_alone() -> None:
    assert not compiled._pays_off(torch.zeros(()))
    with torch._subclasses.fake_tensor.FakeTensorMode():
        assert not compiled._pays_off(torch.empty((), device="cuda"))


def test_a_step_under_a_dispatch_mode_leaves_the_later_ones_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would give up compiling the function for good, in some versions in silence."""
    calls = []

    def counting(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            calls.append(1)
            return graph.forward(*args)

        return run

    switch(monkeypatch, True, counting)
    params, opt = make(FOLD)

    def step() -> int:
        calls.clear()
        set_gradients(params, 1, 8.0)
        opt.step()
        return len(calls)

    assert step() == 1
    with FlopCounterMode(display=False):
        assert step() == 0
    assert step() == 1
    assert [row["reason"] for row in opt.history()] == [stablenum.Reason.CLIPPED] * 3
