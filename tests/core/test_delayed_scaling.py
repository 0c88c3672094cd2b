"""Delayed scaling compared with a float64 oracle; zero and non-finite uses do not enter its history."""

from __future__ import annotations

import math
from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stablenum import DelayedScaling
from tests.backends import BACKENDS, Backend, to_numpy

LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
BAD = (0.0, math.inf, math.nan)


def oracle(amaxes: list[float], rule: DelayedScaling) -> list[float]:
    """The scales, computed with float64 and a deque."""
    seen: deque[float] = deque(maxlen=rule.history)
    scale, scales = 1.0, []
    for amax in amaxes:
        if math.isfinite(amax) and amax > 0:
            seen.append(float(np.float32(amax)))
            top = seen[-1] if rule.amax == "most_recent" else max(seen)
            scale = LARGEST[rule.format] / top / 2.0**rule.margin
            scale = min(max(scale, 2.0**-100), 2.0**100)
            if rule.power_of_two:
                scale = 2.0 ** (math.frexp(scale)[1] - 1)
        scales.append(scale)
    return scales


def scales(backend: Backend, rule: DelayedScaling, amaxes: list[float]) -> list[float]:
    """The scales of the second of two tensors; the first is never used."""
    state, found = rule.init(2, xp=backend.xp), []
    for amax in amaxes:
        state = rule.update(state, backend.asarray([0.0, amax]), xp=backend.xp)
        found.append(float(to_numpy(state.scale)[1]))
    assert float(to_numpy(state.scale)[0]) == 1.0
    assert np.isfinite(to_numpy(state.history)).all()
    return found


@pytest.mark.parametrize("fmt", LARGEST)
@pytest.mark.parametrize("amax", ["max", "most_recent"])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_the_scales_equal_the_oracles(backend: Backend, fmt, amax, power_of_two) -> None:
    rng = np.random.default_rng(3)
    stream = [float(x) for x in np.exp(rng.normal(0.0, 4.0, 120))]
    for i, bad in zip((0, 20, 21, 50, 90), (math.nan, *BAD, math.inf), strict=True):
        stream[i] = bad
    rule = DelayedScaling(format=fmt, history=16, margin=1, amax=amax, power_of_two=power_of_two)
    tolerance = 0.0 if power_of_two else 2e-7
    np.testing.assert_allclose(scales(backend, rule, stream), oracle(stream, rule), rtol=tolerance)


@given(st.lists(st.one_of(st.sampled_from(BAD), st.floats(1e-30, 1e30)), min_size=1, max_size=40))
def test_the_scales_equal_the_oracles_on_any_stream(stream: list[float]) -> None:
    numpy = BACKENDS["numpy"]
    rule = DelayedScaling(history=5)
    np.testing.assert_allclose(scales(numpy, rule, stream), oracle(stream, rule), rtol=3e-7)


@pytest.mark.parametrize("value", ["x", 1, 0, None, []])
def test_a_flag_is_true_or_false(value: object) -> None:
    with pytest.raises(ValueError, match=r"DelayedScaling.power_of_two must be True or False"):
        DelayedScaling(power_of_two=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_use_leaves_the_state_unchanged(backend: Backend, bad: float) -> None:
    rule = DelayedScaling(history=4)
    assert scales(backend, rule, [2.0, bad, bad, 4.0])[1:] == [224.0, 224.0, 112.0]


def test_trap_an_infinite_amax_does_not_make_the_scale_0(backend: Backend) -> None:
    """The usual fp8max / max(amax, 1e-12) gives a scale of 0, and inf x 0 is NaN."""
    theirs = np.float32(448.0) / np.maximum(np.float32(math.inf), np.float32(1e-12))
    with np.errstate(invalid="ignore"):
        assert np.isnan(np.float32(math.inf) * theirs)
    assert scales(backend, DelayedScaling(), [math.inf]) == [1.0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"format": "float16"}, r"DelayedScaling\.format must be"),
        ({"history": 0}, r"DelayedScaling\.history"),
        ({"history": 1.5}, r"DelayedScaling\.history"),
        ({"history": 100_001}, r"DelayedScaling\.history"),
        ({"margin": 17}, r"DelayedScaling\.margin"),
        ({"margin": -17}, r"DelayedScaling\.margin"),
        ({"margin": 0.5}, r"DelayedScaling\.margin"),
        ({"amax": "mean"}, r"DelayedScaling\.amax"),
    ],
)
def test_wrong_settings_are_named(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        DelayedScaling(**settings)


def test_the_ends_of_the_ranges_are_allowed() -> None:
    for settings in ({"margin": 16}, {"margin": -16}, {"history": 1}, {"history": 100_000}):
        made = DelayedScaling(**settings)
        assert {name: getattr(made, name) for name in settings} == settings


def test_a_first_use_is_scaled_by_its_own_largest_element(backend: Backend) -> None:
    rule, xp = DelayedScaling(history=2), backend.xp
    state, scales = rule.init(1, xp=xp), []
    for amax in (math.inf, 2.0, 4.0, math.nan, 0.0, 1.0):
        scale, state = rule.use(state, backend.asarray([amax]), xp=xp)
        scales.append(float(to_numpy(scale)[0]))
    assert scales == [1.0, 224.0, 224.0, 112.0, 112.0, 112.0]
