"""The clip rules compared with an independent oracle."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from stablenum import ClipByGlobalNorm, ClipByNorm, ClipByValue, GuardConfig, Reason, StaticLossScale
from stablenum.formats import FLOAT32_TINY
from tests.backends import Backend, to_numpy
from tests.oracles import clip_factors

RULES = {
    "global": (ClipByGlobalNorm(1.0),),
    "norm": (ClipByNorm(0.5),),
    "norm, global": (ClipByNorm(0.5), ClipByGlobalNorm(0.6)),
    "global, norm": (ClipByGlobalNorm(2.0), ClipByNorm(0.5)),
    "global, global": (ClipByGlobalNorm(2.0), ClipByGlobalNorm(0.1)),
}
NORMS = {
    "ordinary": [3.0, 4.0, 0.25],
    "huge": [1e20, 3e20, 1.0],
    "tiny": [1e-30, 2e-30, 0.0],
    "zero": [0.0, 0.0, 0.0],
    "one tensor": [5.0],
}


def oracle_rules(rules):
    return [("global" if isinstance(rule, ClipByGlobalNorm) else "norm", rule.max_norm) for rule in rules]


def decide_once(backend: Backend, config: GuardConfig, norms: list[float]):
    decisions, state = backend.run(config, [backend.observe(norms)])
    return decisions[0], to_numpy(state)


@pytest.mark.parametrize("scale", [None, 1024.0])
@pytest.mark.parametrize("norms", NORMS.values(), ids=NORMS)
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_the_multiplier_equals_the_oracles(backend, rules, norms, scale):
    config = GuardConfig(clip=rules, loss_scale=scale)
    decision, _ = decide_once(backend, config, [norm * (scale or 1) for norm in norms])
    factors = clip_factors(norms, oracle_rules(rules))
    expected = [factor / (scale or 1) for factor in factors]
    assert bool(decision.apply)
    assert decision.multiplier.dtype == np.float32
    assert decision.multiplier.shape == ((len(norms),) if config.per_tensor else ())
    np.testing.assert_allclose(
        np.broadcast_to(decision.multiplier, len(norms)), np.float64(expected), rtol=2e-6, atol=0
    )
    assert float(decision.clip_coefficient) == pytest.approx(min(factors), rel=2e-6, abs=0)
    assert Reason(int(decision.reason)) is (Reason.CLIPPED if min(factors) < 1 else Reason.OK)


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize("loss_scale", [None, "dynamic"])
def test_an_empty_tree_is_applied(backend, rules, loss_scale):
    config = GuardConfig(clip=rules, loss_scale=loss_scale)
    decision, state = decide_once(backend, config, [])
    assert bool(decision.apply)
    assert Reason(int(decision.reason)) is Reason.OK
    assert [field.shape for field in decision[:6]] == [(), (0,) if config.per_tensor else (), (), (), (), ()]
    assert decision.unit_multipliers == ()
    assert (float(decision.grad_norm), float(decision.clip_coefficient)) == (0.0, 1.0)
    assert int(decision.worst) == -1
    assert int(state.step) == 1


def test_the_coefficient_is_clip_grad_norms(backend):
    gradients = [torch.tensor([3.0, 1.0]), torch.tensor([[0.5, -2.0]])]
    weights = [torch.nn.Parameter(torch.zeros_like(g)) for g in gradients]
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient.clone()
    torch.nn.utils.clip_grad_norm_(weights, 1.5)
    decision, _ = decide_once(backend, GuardConfig(clip=1.5), [float(g.norm()) for g in gradients])
    for weight, gradient in zip(weights, gradients, strict=True):
        torch.testing.assert_close(weight.grad, gradient * float(decision.multiplier), rtol=1e-6, atol=0)


@pytest.mark.parametrize("rules", [ClipByGlobalNorm(1e-30), ClipByNorm(1e-30), (ClipByNorm(1e-30), 1e-30)])
@pytest.mark.parametrize("scale", [None, 2.0**24])
def test_trap_a_factor_never_flushes_to_zero(backend, rules, scale):
    # torch and optax silently turn such gradients into zeros.
    decision, state = decide_once(backend, GuardConfig(clip=rules, loss_scale=scale), [1e30, 1e20])
    assert bool(decision.apply)
    assert (decision.multiplier > 0).all()
    assert decision.clip_coefficient > 0
    assert (state.recorder.floats[-1] > 0).tolist() == [False, True, True, True]  # no loss was given


def test_the_floor_of_the_multiplier_includes_the_loss_scale(backend):
    norm, scale = 1e6, 2.0**24
    plain, _ = decide_once(backend, GuardConfig(clip=1e-30), [norm])
    scaled, _ = decide_once(backend, GuardConfig(clip=1e-30, loss_scale=scale), [norm * scale])
    assert float(plain.multiplier) == float(plain.clip_coefficient) == pytest.approx(1e-36, rel=1e-5)
    assert float(scaled.clip_coefficient) == pytest.approx(1e-36, rel=1e-5)
    assert float(scaled.multiplier) == FLOAT32_TINY  # and not 1e-36 / scale, which is below it


def test_a_gradient_at_the_bound_of_the_format_is_clipped_and_not_zeroed(backend):
    decision, _ = decide_once(backend, GuardConfig(clip=1.0), [1e20] * 3)
    assert float(decision.grad_norm) == pytest.approx(math.sqrt(3) * 1e20, rel=1e-6)
    assert float(decision.multiplier) * float(decision.grad_norm) == pytest.approx(1.0, rel=1e-5)


def test_clip_by_value_does_not_change_the_multiplier_and_sets_max_value(backend):
    config = GuardConfig(clip=(ClipByGlobalNorm(1.0), ClipByValue(0.1)))
    decision, _ = decide_once(backend, config, [3.0, 4.0])
    assert config.max_value == 0.1
    assert float(decision.multiplier) == pytest.approx(0.2, rel=2e-6)
    assert GuardConfig(clip=ClipByGlobalNorm(1.0)).max_value is None


@pytest.mark.parametrize(
    "rules", [(ClipByValue(1.0), ClipByGlobalNorm(1.0)), (ClipByValue(1.0), ClipByValue(2.0))]
)
def test_clip_by_value_before_a_norm_rule_is_rejected(rules):
    with pytest.raises(ValueError, match=r"clip must be .*ClipByValue.* after all rules that use norms"):
        GuardConfig(clip=rules)


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_skipped_step_has_a_neutral_multiplier(backend, rules, bad):
    decision, _ = decide_once(backend, GuardConfig(clip=rules, loss_scale=8.0), [1.0, bad])
    assert not decision.apply
    assert (decision.multiplier == 1).all()
    assert float(decision.clip_coefficient) == 1.0


def test_a_tiny_scale_does_not_make_a_finite_norm_infinite(backend):
    config = GuardConfig(clip=1.0, loss_scale=StaticLossScale(scale=2.0**-100))
    decision, _ = decide_once(backend, config, [1e20, 1.0])
    assert bool(decision.apply)
    assert np.isfinite(decision.grad_norm)
    assert np.isfinite(decision.multiplier)
    assert decision.multiplier > 0
