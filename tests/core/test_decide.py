"""What ``decide`` reports about a step: whether it is applied, why, and the worst parameter."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from stablenum import (
    AdaptiveGradClip,
    ClipByNorm,
    GuardConfig,
    Observation,
    Reason,
    SpikeGuard,
    StaticLossScale,
    decide,
    init_guard,
)
from stablenum.guard.recorder import read_rows
from tests.backends import BACKENDS, Backend, assert_bit_equal, to_numpy

INF, NAN = math.inf, math.nan


def decide_once(backend: Backend, norms, config: GuardConfig | None = None, **more):
    decisions, state = backend.run(config or GuardConfig(clip=1.0), [backend.observe(norms, **more)])
    return decisions[0], to_numpy(state)


@pytest.mark.parametrize(
    ("norms", "loss", "found_inf", "reason"),
    [
        ([0.1, 0.2], 1.0, False, Reason.OK),
        ([0.0, 0.0], 0.0, False, Reason.OK),
        ([3.0, 4.0], 1.0, False, Reason.CLIPPED),
        ([3.0, NAN], 1.0, False, Reason.NAN_GRADIENT),
        ([INF, 4.0], 1.0, False, Reason.INF_GRADIENT),
        ([INF, NAN], 1.0, False, Reason.NAN_GRADIENT),
        ([3.0, 4.0], NAN, False, Reason.NONFINITE_LOSS),
        ([3.0, 4.0], -INF, False, Reason.NONFINITE_LOSS),
        ([NAN, INF], INF, True, Reason.NONFINITE_LOSS),  # a bad loss makes bad gradients, not the reverse
        ([NAN, 4.0], 1.0, True, Reason.NAN_GRADIENT),
        ([INF, 4.0], 1.0, True, Reason.INF_GRADIENT),
        ([3.0, 4.0], 1.0, True, Reason.FOUND_INF),
        ([], NAN, False, Reason.NONFINITE_LOSS),
        ([], 1.0, True, Reason.FOUND_INF),
        ([], 1.0, False, Reason.OK),
    ],
)
def test_the_reason_and_its_priority(backend, norms, loss, found_inf, reason):
    decision, state = decide_once(backend, norms, loss=loss, found_inf=found_inf)
    assert Reason(int(decision.reason)) is reason
    assert bool(decision.apply) is (reason in (Reason.OK, Reason.CLIPPED))
    assert int(state.skipped_total) == int(state.skipped_in_a_row) == int(not decision.apply)


@pytest.mark.parametrize(("loss", "found_inf"), list(itertools.product([None, 1.0], [None, False])))
def test_the_loss_and_found_inf_are_optional(backend, loss, found_inf):
    decision, state = decide_once(backend, [0.5], loss=loss, found_inf=found_inf)
    assert bool(decision.apply)
    assert not any(
        map(math.isnan, to_numpy(state.recorder.floats).ravel().tolist())
    )  # which would stop jax.debug_nans
    recorded = read_rows(state.recorder)[-1].loss
    assert math.isnan(recorded) if loss is None else recorded == loss


def test_found_inf_counts_as_an_overflow(backend):
    _, state = decide_once(backend, [0.5], GuardConfig(loss_scale="dynamic"), loss=1.0, found_inf=True)
    assert float(state.loss_scale.scale) == 2.0**15


@pytest.mark.parametrize(
    ("norms", "worst"),
    [
        ([1.0, 3.0, 2.0], 1),
        ([2.0, 2.0, 1.0], 0),
        ([0.0, 0.0], 0),
        ([1e30, NAN, INF], 1),
        ([1e30, INF, NAN], 1),
        ([3.4e38, 1.0, INF], 2),
        ([5.0], 0),
        ([], -1),
    ],
)
def test_worst_is_the_first_nonfinite_norm_else_the_largest(backend, norms, worst):
    decision, state = decide_once(backend, norms)
    assert int(decision.worst) == worst
    assert int(state.recorder.ints[-1, 2]) == worst


def test_counters(backend):
    bad = [False, True, True, False, True]
    decisions, state = backend.run(
        GuardConfig(), [backend.observe([INF if is_bad else 1.0]) for is_bad in bad]
    )
    assert [bool(d.apply) for d in decisions] == [not is_bad for is_bad in bad]
    state = to_numpy(state)
    assert (int(state.step), int(state.skipped_total), int(state.skipped_in_a_row)) == (5, 3, 1)


def test_counters_stay_at_the_largest_number(backend):
    """At 2**31 they would become negative, and a state with negative counters cannot be loaded."""
    full = backend.asarray(2**31 - 2, "int32")
    state = backend.init(GuardConfig(), 1)._replace(
        step=full, skipped_total=full, skipped_in_a_row=full, nonfinite_in_a_row=full
    )
    state = to_numpy(backend.run(GuardConfig(), [backend.observe([INF])] * 3, state)[1])
    assert int(state.step) == int(state.skipped_total) == 2**31 - 1
    assert int(state.skipped_in_a_row) == int(state.nonfinite_in_a_row) == 2**31 - 1


def test_grad_norm_is_unscaled_and_from_before_clipping(backend):
    decision, _ = decide_once(backend, [3072.0, 4096.0], GuardConfig(clip=1.0, loss_scale=1024.0))
    assert float(decision.grad_norm) == pytest.approx(5.0, rel=1e-6)


@pytest.mark.parametrize("n_tensors", [-1, 1.5, "2", None, True, 2**31])
def test_a_wrong_number_of_tensors_is_rejected(backend, n_tensors):
    with pytest.raises(ValueError, match="n_tensors must be a whole number"):
        init_guard(GuardConfig(), n_tensors, xp=backend.xp)


def test_an_observation_needs_only_norms():
    assert Observation(norms=()) == ((), *[None] * 9)


@pytest.mark.parametrize("norm", [1e37, 1.6e38, 2.9e38, 3.4e38])
def test_a_scale_below_one_never_makes_a_finite_gradient_infinite(backend, norm):
    decision, _ = decide_once(backend, [norm], GuardConfig(loss_scale=0.25))
    assert bool(decision.apply)
    # 1e37 is multiplied by 1 / scale; a gradient that would leave float32's range is not enlarged.
    assert float(decision.multiplier) == (4.0 if norm * 4 < 1.7e38 else 1.0)
    assert math.isfinite(norm * float(decision.multiplier))


def test_without_a_loss_scale_the_scale_in_the_state_has_no_effect():
    """For example if a run with a loss scale is continued with a guard that has none."""
    backend = BACKENDS["numpy"]
    config = GuardConfig(clip=(AdaptiveGradClip(clipping=0.1), ClipByNorm(1.0)))
    state = backend.init(config, 2)
    other = state._replace(loss_scale=StaticLossScale(scale=1024.0).init(xp=backend.xp))
    seen = backend.observe([3.0, 4.0], units=([[3.0], [4.0]], [[20.0], [30.0]]))
    (one,), (two,) = (backend.run(config, [seen], start)[0] for start in (state, other))
    assert_bit_equal(one, two)
    assert float(one.grad_norm) == 5.0
    assert one.multiplier.tolist() == pytest.approx([0.5, 1 / 3], rel=1e-5)


CONFIG = GuardConfig(clip=1.0)
STATE = init_guard(CONFIG, 2, xp=np)
SEEN = Observation(norms=np.ones(2, np.float32))


@pytest.mark.parametrize(
    ("error", "words", "config", "state", "observation"),
    [
        (TypeError, "config must be a GuardConfig; got int", 3, STATE, SEEN),
        (TypeError, "state must be a GuardState", CONFIG, 3, SEEN),
        (TypeError, "observation must be an Observation", CONFIG, STATE, 3),
        (ValueError, r"observation.norms must be .*\(n,\)", CONFIG, STATE, Observation(norms=[1.0, 2.0])),
        (ValueError, "shape \\(1, 1\\)", CONFIG, STATE, Observation(norms=np.ones((1, 1), np.float32))),
        (ValueError, "got that of another config, with 1 clip", GuardConfig(), STATE, SEEN),
        (ValueError, "no spike rule", GuardConfig(clip=1.0, spike=SpikeGuard()), STATE, SEEN),
    ],
)
def test_a_wrong_call_names_the_argument(error, words, config, state, observation):
    with pytest.raises(error, match=words):
        decide(config, state, observation, xp=np)


def test_a_state_for_no_config_is_refused():
    with pytest.raises(TypeError, match="config must be a GuardConfig; got NoneType"):
        init_guard(None, 2, xp=np)
