"""Norms and factors outside float32's range, compared with 50-digit decimal arithmetic."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stablenum import (
    AdaGC,
    AdaptiveGradClip,
    ClipByGlobalNorm,
    ClipByNorm,
    GuardConfig,
    Observation,
    SpikeGuard,
    StaticLossScale,
)
from stablenum.formats import FLOAT32_MAX
from stablenum.reference.guarded import split_norms
from stablenum.rules.clipping import Units
from tests.backends import BACKENDS, Backend, assert_bit_equal, to_numpy

COMPILED = [BACKENDS["numpy"], BACKENDS["jax-jit"]]
TOP = Decimal(2) ** 127


def observe(backend: Backend, norms: list[Decimal], units: Any = None, **others: Any) -> Observation:
    """What an adapter gives for true norms of any size."""
    values, exponents = split_norms(norms)
    if units is not None:
        parts, weights = units
        found = [split_norms(part) for part in parts]
        units = Units(
            tuple(backend.asarray(v) for v, _ in found),
            tuple(backend.asarray(w) for w in weights),
            tuple(backend.asarray(e, "int32") for _, e in found),
        )
    return Observation(
        norms=backend.asarray(values), exponents=backend.asarray(exponents, "int32"), units=units, **others
    )


def joint(norms: list[Decimal]) -> Decimal:
    return sum((n * n for n in norms), Decimal(0)).sqrt()


def exact(multiplier: Any, shift: Any) -> list[Decimal]:
    return [Decimal(float(m)) * Decimal(2) ** int(s) for m, s in zip(np.ravel(multiplier), np.ravel(shift))]


def assert_close(found: list[Decimal], expected: list[Decimal], rel: float = 4e-6) -> None:
    for one, other in zip(found, expected, strict=True):
        assert abs(one - other) <= Decimal(rel) * other, (one, other)


@pytest.fixture(autouse=True)
def digits():
    with localcontext(prec=50):
        yield


@pytest.mark.sampled
@pytest.mark.parametrize("backend", COMPILED, ids=lambda b: b.name)
@pytest.mark.parametrize("limit", [1.0, 1e-30])
@pytest.mark.parametrize(
    ("norms", "scale"),
    [
        (["3.1e39"], 65536.0),  # the unscaled norm is 4.8e34
        (["3.2e39"], 2.0**100),
        (["9.5e39"], None),
        (["1e39", "1e-3"], None),
        (["1e200", "3"], None),
        (["1e308", "1e308"], 65536.0),
        (["2e38"], 0.5),
        (["1e-3", "3.4e38"], 2.0**-100),
        (["3e38"] * 1000, 1024.0),
        (["1e32"], 2.0**100),
        (["2e-38", "3e38"], None),
    ],
)
def test_the_factor_of_a_norm_of_any_size(backend, norms, scale, limit):
    raw = [Decimal(n) for n in norms]
    config = GuardConfig(clip=limit, loss_scale=scale)
    decision, _ = backend.run(config, [observe(backend, raw)])
    true = joint(raw) / Decimal(scale or 1)
    assert_close(exact(decision[0].multiplier, decision[0].shift), [Decimal(limit) / joint(raw)])
    assert float(decision[0].grad_norm) == pytest.approx(min(float(true), FLOAT32_MAX), rel=1e-6)
    assert decision[0].apply


@pytest.mark.parametrize("backend", COMPILED, ids=lambda b: b.name)
@pytest.mark.parametrize("scale", [None, 65536.0, 0.25])
def test_a_small_tensor_beside_a_huge_one_keeps_its_factor(backend, scale):
    raw = [Decimal("1e200"), Decimal("0.5"), Decimal("4e5"), Decimal("3e39")]
    config = GuardConfig(clip=ClipByNorm(1.0), loss_scale=scale)
    decision, _ = backend.run(config, [observe(backend, raw)])
    s = Decimal(scale or 1)
    expected = [min(Decimal(1), 1 / (n / s + Decimal("1e-6"))) / s for n in raw]
    assert_close(exact(decision[0].multiplier, decision[0].shift), expected)


@pytest.mark.parametrize("backend", COMPILED, ids=lambda b: b.name)
@pytest.mark.parametrize("scale", [None, 65536.0])
def test_units_of_any_size_keep_their_own_factors(backend, scale):
    raw = [[Decimal("1e200"), Decimal("1e-3"), Decimal("5e38")], [Decimal("7")]]
    config = GuardConfig(clip=AdaptiveGradClip(clipping=0.5), loss_scale=scale)
    weights = [[2.0, 2.0, 2.0], [1e9]]
    seen = observe(backend, [joint(part) for part in raw], units=(raw, weights))
    decision, _ = backend.run(config, [seen])
    s = Decimal(scale or 1)
    for part, w, m, shift in zip(
        raw, weights, decision[0].unit_multipliers, decision[0].unit_shifts, strict=True
    ):
        expected = [min(Decimal(1), Decimal(0.5 * x) / (n / s)) / s for n, x in zip(part, w, strict=True)]
        assert_close(exact(m, shift), expected)


@pytest.mark.parametrize("backend", COMPILED, ids=lambda b: b.name)
def test_rules_in_order_see_what_the_first_leaves(backend):
    raw = [Decimal("1e200"), Decimal("3e39"), Decimal("0.5")]
    config = GuardConfig(clip=[ClipByNorm(2.0), ClipByGlobalNorm(1.0)])
    decision, _ = backend.run(config, [observe(backend, raw)])
    left = joint([Decimal(2), Decimal(2), Decimal("0.5")])
    expected = [Decimal(2) / raw[0] / left, Decimal(2) / raw[1] / left, 1 / left]
    assert_close(exact(decision[0].multiplier, decision[0].shift), expected)


@pytest.mark.parametrize("backend", COMPILED, ids=lambda b: b.name)
def test_a_rule_with_two_limits_uses_the_right_norm_of_each(backend):
    """After its warm-up a tensor is clipped at its own mean, before it at the joint norm."""
    config = GuardConfig(clip=AdaGC(warmup_steps=2))
    one, none = Decimal(1), Decimal(0)
    streams = [[one, none], [one, none], [Decimal("1e200"), Decimal("3e39")]]
    decisions, state = backend.run(config, [observe(backend, norms) for norms in streams])
    found = exact(decisions[-1].multiplier, decisions[-1].shift)
    assert_close(found, [Decimal("1.05") / Decimal("1e200"), 1 / Decimal("1e200")], rel=1e-5)
    assert np.isfinite(to_numpy(state.clip[0].gamma)).all()


def test_a_spike_of_any_size_is_shrunk_to_the_median():
    backend = BACKENDS["numpy"]
    config = GuardConfig(spike=SpikeGuard(action="clip", min_samples=8))
    ordinary = [[Decimal(1 + i % 3)] for i in range(20)]
    decisions, _ = backend.run(config, [observe(backend, n) for n in [*ordinary, [Decimal("1e100")]]])
    assert_close(exact(decisions[-1].multiplier, decisions[-1].shift), [2 / Decimal("1e100")])


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_non_finite_norm_beside_a_huge_one_is_skipped(bad):
    backend = BACKENDS["numpy"]
    seen = observe(backend, [Decimal("1e200"), Decimal(1)])
    norms = np.asarray(seen.norms).copy()
    norms[1] = bad
    for scale in (None, 4.0, 0.25):
        config = GuardConfig(clip=1.0, loss_scale=scale)
        decision, _ = backend.run(config, [seen._replace(norms=norms)])
        assert not decision[0].apply
        assert (float(decision[0].multiplier), int(decision[0].shift), int(decision[0].worst)) == (1, 0, 1)
        assert not math.isfinite(decision[0].grad_norm)


def test_the_worst_of_several_norms_beyond_float32_is_the_largest():
    backend = BACKENDS["numpy"]
    seen = observe(backend, [Decimal(7), Decimal("1e39"), Decimal("1e200"), Decimal("1e41")])
    decision, _ = backend.run(GuardConfig(), [seen])
    assert decision[0].worst == 2


@pytest.mark.parametrize("rule", [None, ClipByGlobalNorm(1.0), ClipByNorm(1.0), AdaGC()])
@given(
    norms=st.lists(st.floats(2.0**-60, 2.0**90, width=32), min_size=1, max_size=4),
    power=st.sampled_from([None, -8, 0, 16]),
)
def test_ordinary_norms_are_decided_bit_for_bit_as_without_exponents(rule, norms, power):
    backend = BACKENDS["numpy"]
    scale = None if power is None else StaticLossScale(scale=2.0**power)
    config = GuardConfig(clip=rule, loss_scale=scale)
    plain = backend.observe(norms)
    wide = plain._replace(exponents=backend.asarray([0] * len(norms), "int32"))
    (one,), before = backend.run(config, [plain])
    (other,), after = backend.run(config, [wide])
    assert not other.shift.any()
    assert_bit_equal(one, other._replace(shift=(), unit_shifts=()))
    assert_bit_equal(before, after)
