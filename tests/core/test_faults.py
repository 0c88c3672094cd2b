"""What forbids a step besides its gradients: settings that are not finite, and faults of an adapter."""

from __future__ import annotations

import array_api_compat.numpy as xp
import numpy as np
import pytest

from stablenum import GuardConfig, Reason, decide, init_guard
from stablenum.arrays import leaves
from stablenum.guard.decide import after_fault
from stablenum.guard.faults import bad_setting
from stablenum.guard.observation import Fault, Observation
from stablenum.guard.readout import metrics

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"lr": NAN}, "lr"),
        ({"lr": 0.1, "weight_decay": INF}, "weight_decay"),
        ({"lr": 0.1, "betas": (0.9, NAN)}, "betas"),
        ({"betas": [-INF, 0.9]}, "betas"),
        ({"lr": np.float32(NAN)}, "lr"),
        ({"momentum": np.asarray(INF)}, "momentum"),
        ({"trust": NAN}, "trust"),
        # Without a bound, or no settings at all.
        ({"growth_rate": INF, "max_norm": INF}, None),
        ({"lr": 0.1, "betas": (0.9, 0.99), "foreach": None, "maximize": False, "step": 3}, None),
        ({"params": [object()], "param_names": ["w"], "lr": 1e308, "eps": 5e-324}, None),
        ({"mode": "nan", "buffer": [None, None]}, None),
    ],
)
def test_a_setting_that_is_not_finite_is_found(settings, name):
    def number(value):
        known = isinstance(value, (int, float)) or getattr(value, "shape", None) == ()
        return float(value) if known else None

    found = bad_setting(settings, "group 0", number)
    assert (found and found.place) == (name and f"group 0[{name!r}]")


@pytest.mark.parametrize("reason", [Reason.NONFINITE_SETTING, Reason.NONFINITE_UPDATE])
@pytest.mark.parametrize("norm", [1.0, INF, NAN])
def test_a_fault_skips_the_step_whatever_its_gradients_are(reason, norm):
    config = GuardConfig(loss_scale="dynamic", clip=1.0, max_skips_in_a_row=2)
    before = init_guard(config, 3, xp=xp)
    fault = Fault(np.int32(reason), np.int32(2))
    seen = Observation(np.asarray([norm, 1.0, 1.0], np.float32), fault=fault)
    decision, state = decide(config, before, seen, xp=xp)
    last = metrics(state)
    assert not decision.apply
    assert (last["reason"], last["worst"].index) == (reason, 2)
    # Whatever else is wrong, an overflow lowers the scale: it would come again at the same one.
    factor = 1.0 if norm == 1.0 else 0.5
    assert state.loss_scale.scale == before.loss_scale.scale * factor
    # Such steps count for the limit.
    assert not decide(config, before, seen, xp=xp)[1].halted
    assert decide(config, state, seen, xp=xp)[1].halted


@pytest.mark.parametrize("reason", [Reason.NONFINITE_SETTING, Reason.NONFINITE_UPDATE])
def test_a_fault_is_an_error_although_a_lower_scale_may_avoid_the_overflow(reason):
    config = GuardConfig(loss_scale="dynamic", on_nonfinite="raise")
    seen = Observation(np.asarray([INF], np.float32))
    state = init_guard(config, 1, xp=xp)
    assert not decide(config, state, seen, xp=xp)[1].halted
    fault = Fault(np.int32(reason), np.int32(0))
    assert decide(config, state, seen._replace(fault=fault), xp=xp)[1].halted


@pytest.mark.parametrize("limit", [{}, {"max_skips_in_a_row": 2}, {"on_nonfinite": "raise"}])
@pytest.mark.parametrize("loss_scale", [None, "dynamic"])
@pytest.mark.parametrize("code", [0, Reason.NONFINITE_UPDATE])
@np.errstate(all="ignore")
def test_a_fault_found_after_the_decision_leads_to_the_same_state(code, loss_scale, limit):
    config = GuardConfig(loss_scale=loss_scale, clip=1.0, spike="skip", **limit)
    fault = Fault(np.asarray(code, np.int32), np.asarray(2 if code else -1, np.int32))
    state = init_guard(config, 3, xp=xp)
    for norms in ([1.0, 2.0, 3.0], [1.0, INF, 3.0], [NAN, 1.0, 1.0], [INF, 1.0, 1.0]):
        seen = Observation(np.asarray(norms, np.float32))
        decision, after = decide(config, state, seen, xp=xp)
        if not decision.apply:
            known = decide(config, state, seen._replace(fault=fault), xp=xp)[1]
            after = after_fault(config, state, after, fault, xp=xp)
            assert str(leaves(after)) == str(leaves(known))
        state = after


def test_no_fault_changes_nothing():
    config = GuardConfig(loss_scale="dynamic", clip=1.0)
    state = init_guard(config, 2, xp=xp)
    for norms in ([3.0, 4.0], [INF, 1.0]):
        seen = Observation(np.asarray(norms, np.float32))
        none = seen._replace(fault=Fault(np.asarray(0, np.int32), np.asarray(-1, np.int32)))
        bare, same = (
            [leaf.tolist() for leaf in leaves(decide(config, state, one, xp=xp))] for one in (seen, none)
        )
        assert str(bare) == str(same)  # NaN, too
