"""On a CPU the core's `decide` runs as generated code: bit for bit the decisions of the specification."""

from __future__ import annotations

import array_api_compat.numpy as np_namespace
import array_api_compat.torch as torch_namespace
import numpy as np
import pytest
import torch

import stablenum_torch as st
from stablenum import DynamicLossScale, EscalatePrecision, GuardConfig, Observation, decide, init_guard
from stablenum.arrays import leaves
from stablenum_torch._devices.generated_decide import written_function
from stablenum_torch._devices.host_decide import HostGuard
from stablenum_torch._devices.recorded_operations import Recording
from stablenum_torch._devices.scalar_namespace import as_scalar, scalars
from tests.backends import BACKENDS, assert_bit_equal
from tests.core.test_rule_extremes import CONFIGS, describe, observe, random_stream

NUMPY = BACKENDS["numpy"]
MORE = [
    GuardConfig(clip=1.0, loss_scale=DynamicLossScale(growth_interval=3, hysteresis=2), max_skips_in_a_row=9),
    GuardConfig(loss_scale="dynamic", escalate=EscalatePrecision(after=2, for_steps=3)),
    GuardConfig(spike="skip", clip=0.5),
    GuardConfig(on_nonfinite="raise"),
]


def on_host(seen: Observation) -> Observation:
    """An observation as the adapter makes it: 0-dimensional arrays become scalars."""
    single = {name: getattr(seen, name) for name in ("loss", "amax", "tiny")}
    return seen._replace(**{name: None if v is None else as_scalar(v) for name, v in single.items()})


@pytest.mark.parametrize("config", [*CONFIGS, *MORE], ids=describe)
def test_generated_decisions_match_the_specification(config):
    state = NUMPY.init(config, 3)
    host = HostGuard(config, init_guard(config, 3, xp=torch_namespace))
    for i, (norms, loss, amax) in enumerate(random_stream(11, 120)):
        seen = observe(NUMPY, config, norms, loss if i % 5 else 2.0, amax)
        if i % 7 == 0:
            seen = seen._replace(loss=None)
        with np.errstate(all="ignore"):
            expected, state = decide(config, state, seen, xp=np_namespace)
            decision, after = host.decide(on_host(seen))
        host.write(after)
        assert_bit_equal(tuple(leaves(decision)), tuple(leaves(expected)))
        for mine, specified in zip(host.read(), leaves(state), strict=True):
            assert_bit_equal(np.asarray(mine), specified)


def test_code_is_generated_once_for_each_kind_of_observation():
    config = GuardConfig(clip=1.0)
    host = HostGuard(config, init_guard(config, 2, xp=torch_namespace))
    norms = np.ones(2, np.float32)
    for loss in (None, np.float32(1), None, np.float32(np.nan)):
        host.decide(Observation(norms=norms, loss=loss))
    assert len(host._written) == 2


def test_a_missing_measurement_raises_every_time():
    from stablenum import LogMaxLossScale

    config = GuardConfig(loss_scale=LogMaxLossScale())
    host = HostGuard(config, init_guard(config, 1, xp=torch_namespace))
    for _ in range(2):
        with pytest.raises(ValueError, match="amax"):
            host.decide(Observation(norms=np.ones(1, np.float32)))


def test_unused_and_constant_operations_are_not_generated():
    xp = Recording()
    x = xp.input(np.float32(3))
    _unused = xp.sqrt(x) * 5
    known = xp.sqrt(np.float32(4)) + xp.ones_like(x)
    assert float(known) == 3.0  # computed when the code was generated
    function = written_function(xp, [x * 2, known])
    assert "sqrt" not in function.__code__.co_names
    assert [float(v) for v in function(np.float32(1))] == [2.0, 3.0]


def test_a_fill_with_a_measured_value_is_not_a_constant():
    xp = Recording()
    x = xp.input(np.float32(3))
    function = written_function(xp, [xp.full_like(np.zeros(2, np.float32), x)])
    assert function(np.float32(5))[0].tolist() == [5, 5]


def test_a_branch_on_a_measured_value_raises():
    xp = Recording()
    x = xp.input(np.float32(3))
    with pytest.raises(TypeError, match=r"use xp\.where"):
        max(x, xp.sqrt(x))


NUMBERS = [np.float32(v) for v in (-np.inf, -1.5, -0.0, 0.0, 2.0**-149, 1.0, 3.4e38, np.inf, np.nan)]


@pytest.mark.parametrize("name", ["minimum", "maximum"])
def test_functions_of_two_scalars_match_numpy(name):
    for a in NUMBERS:
        for b in NUMBERS:
            mine, theirs = getattr(scalars, name)(a, b), getattr(np, name)(a, b)
            assert type(mine) is np.float32
            assert np.array_equal(mine, theirs, equal_nan=True)


@pytest.mark.parametrize("name", ["isfinite", "isnan", "logical_not", "zeros_like", "ones_like", "abs"])
def test_functions_of_one_scalar_match_numpy(name):
    for x in NUMBERS:
        assert np.array_equal(getattr(scalars, name)(x), getattr(np, name)(x), equal_nan=True)


def test_a_choice_between_shapes_broadcasts():
    assert scalars.where(np.bool_(True), np.float32(1), np.zeros(3, np.float32)).tolist() == [1, 1, 1]
    assert scalars.where(np.asarray([True, False]), np.float32(1), np.float32(2)).tolist() == [1, 2]


def guarded(**settings):
    w = torch.nn.Parameter(torch.ones(3))
    return w, st.wrap(torch.optim.SGD([w], lr=1.0), **settings)


def step_with(w, opt, value):
    w.grad = torch.full_like(w, value)
    opt.step()


def test_a_state_that_was_moved_into_shared_memory_is_followed():
    """A tensor that is sent to another process moves; its old memory is freed."""
    w, opt = guarded(clip=1.0)
    step_with(w, opt, 1.0)
    count = opt.guard_state.skipped_total
    view = count.numpy()  # keeps nothing alive: the memory is freed when the tensor moves
    count.share_memory_()
    assert view.ctypes.data != count.data_ptr()
    step_with(w, opt, float("nan"))
    assert opt.last["skipped_total"] == count.item() == 1


def test_a_state_with_other_data_is_followed():
    w, opt = guarded(loss_scale=8.0)
    step_with(w, opt, 8.0)
    opt.guard_state.skipped_total.data = torch.tensor(5, dtype=torch.int32)
    step_with(w, opt, float("inf"))
    assert opt.last["skipped_total"] == 6


def test_the_pickled_form_of_a_guarded_optimizer_is_that_of_its_version():
    """Pickles of released versions have these entries, and no others."""
    w, opt = guarded(clip=1.0, loss_scale=8.0)
    step_with(w, opt, float("nan"))
    saved = opt.__getstate__()
    assert list(saved) == [
        "inner",
        "config",
        "_names",
        "_process_group",
        "_loss_group",
        "_state",
        "_buffers",
        "_check_replicas_every",
    ]
    assert saved["_names"] == {}
    assert saved["_state"] is opt.guard_state
    loaded = st.GuardedOptimizer.__new__(st.GuardedOptimizer)
    loaded.__setstate__(saved)
    assert loaded.last["skipped_total"] == 1
    step_with(w, loaded, 8.0)
    assert loaded.last["applied"]


def test_other_settings_are_followed():
    w, opt = guarded(clip=1.0)
    step_with(w, opt, 1.0)
    opt.config = GuardConfig(clip=0.5)
    before = w.detach().clone()
    step_with(w, opt, 9.0)
    assert float((before - w.detach()).norm()) == pytest.approx(0.5, rel=1e-4)
