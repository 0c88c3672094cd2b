"""States of rules: strict JSON bit for bit, between backends, and rows matched by parameter name."""

from __future__ import annotations

import itertools
import json
import math
import random
import warnings

import numpy as np
import pytest

from stablenum import (
    AdaGC,
    AdaptiveGradClip,
    AutoClip,
    ClipByNorm,
    ClipUpdateRMS,
    GuardConfig,
    LogMaxLossScale,
    MeanStdSpikeGuard,
    SpikeGuard,
    UnderflowAwareLossScale,
    ZClip,
)
from stablenum.arrays import leaves
from stablenum.guard.decide import init_guard
from stablenum.guard.statedict import StatisticsNotLoadedWarning, state_from_dict, state_to_dict
from tests.backends import BACKENDS, assert_bit_equal, to_numpy
from tests.selection import slow_unless

NUMPY = BACKENDS["numpy"]
CONFIGS = {
    "AutoClip": GuardConfig(clip=AutoClip(window=20)),
    "ZClip": GuardConfig(clip=ZClip(warmup_steps=10)),
    "AdaGC": GuardConfig(clip=AdaGC(warmup_steps=10)),
    "all": GuardConfig(
        clip=(AdaptiveGradClip(), AutoClip(window=20), AdaGC(), ZClip(max_norm=None), ClipUpdateRMS(1.0)),
        loss_scale=LogMaxLossScale(),
        spike=SpikeGuard(window=20, min_samples=5),
        max_skips_in_a_row=50,
    ),
    "UnderflowAwareLossScale": GuardConfig(loss_scale=UnderflowAwareLossScale()),
    "MeanStdSpikeGuard": GuardConfig(spike=MeanStdSpikeGuard(window=20, min_samples=5)),
}


def stream(backend, n: int, seed: int):
    """Lognormal norms of three parameters, spikes, zeros and bad values."""
    draw = random.Random(seed)
    for _ in range(n):
        norms = [draw.lognormvariate(0, 0.5) * draw.choice([1, 1, 1, 1, 30]) for _ in range(3)]
        if draw.random() < 0.1:
            norms[draw.randrange(3)] = draw.choice([0.0, math.nan, math.inf, 1e30])
        units = ([[norms[0]], [norms[1]], []], [[1.0], [0.1], []])
        loss = draw.lognormvariate(1, 0.1) if draw.random() < 0.95 else draw.choice([math.nan, 50.0])
        yield backend.observe(norms, loss, units=units, amax=max(norms), tiny=draw.choice([0.0, 0.5]))


def strict_json(plain):
    return json.loads(json.dumps(plain, allow_nan=False))


NAMES = ("numpy", "torch", "jax-jit")
# The configs that together hold every kind of state.
HOLD_ALL = ("all", "UnderflowAwareLossScale", "MeanStdSpikeGuard")
# Each backend saves once and loads once.
RING = (("numpy", "jax-jit"), ("jax-jit", "torch"), ("torch", "numpy"))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "case"),
    slow_unless(lambda name, case: name == "numpy" or case in HOLD_ALL, itertools.product(NAMES, CONFIGS)),
)
def test_every_rules_state_round_trips_bit_for_bit(name, case):
    backend, config = BACKENDS[name], CONFIGS[case]
    _, state = backend.run(config, list(stream(backend, 40, 1)))
    plain = strict_json(state_to_dict(state, ["a", "b", "c"]))
    back = state_from_dict(plain, backend.init(config, 3), xp=backend.xp, names=["a", "b", "c"])
    assert_bit_equal(state, back)
    assert state_to_dict(back, ["a", "b", "c"]) == plain


@pytest.mark.parametrize(
    ("saved_by", "loaded_by", "case"),
    slow_unless(
        lambda *row: row[:2] in RING and row[2] in HOLD_ALL,
        [(*pair, case) for pair in itertools.permutations(NAMES, 2) for case in CONFIGS],
    ),
)
def test_another_backend_continues_with_the_same_decisions(saved_by, loaded_by, case):
    config = CONFIGS[case]
    one, other = BACKENDS[saved_by], BACKENDS[loaded_by]
    _, state = one.run(config, list(stream(one, 40, 2)))
    crossed = state_from_dict(strict_json(state_to_dict(state)), other.init(config, 3), xp=other.xp)
    assert_bit_equal(state, crossed)
    stayed, _ = one.run(config, list(stream(one, 30, 3)), state)
    went, _ = other.run(config, list(stream(other, 30, 3)), crossed)
    for a, b in zip(stayed, went, strict=True):
        assert (bool(a.apply), int(a.reason), int(a.worst)) == (bool(b.apply), int(b.reason), int(b.worst))
        np.testing.assert_allclose(a.multiplier, b.multiplier, rtol=1e-5)


# -------------------------------------------------------- rows of parameters, by name

ADAGC = CONFIGS["AdaGC"]


def adagc_state(n_steps: int = 40):
    _, state = NUMPY.run(ADAGC, list(stream(NUMPY, n_steps, 4)))
    return state


def loaded(here: list[str] | None, n: int, saved: list[str] | None = ("a", "b", "c")):
    state = adagc_state()
    plain = strict_json(state_to_dict(state, saved and list(saved)))
    like = NUMPY.init(ADAGC, n)
    return state.clip[0], state_from_dict(plain, like, xp=NUMPY.xp, names=here).clip[0]


def test_rows_of_adagc_are_matched_by_name():
    saved, here = loaded(["c", "a", "b"], 3)
    for before, after in zip(saved, here, strict=True):
        assert after.tolist() == before[[2, 0, 1]].tolist()
    assert len(set(saved.gamma.tolist())) == 3


def test_an_added_parameter_starts_from_scratch_and_a_removed_one_is_dropped():
    with pytest.warns(
        StatisticsNotLoadedWarning, match=r"2 of this guard's 4 parameters \(new, other\)"
    ) as seen:
        saved, here = loaded(["new", "c", "a", "other"], 4)
    assert [w.filename for w in seen] == [__file__]  # the line that loads, not one of the reader's
    fresh = NUMPY.init(ADAGC, 4).clip[0]
    for before, after, own in zip(saved, here, fresh, strict=True):
        assert after.tolist() == [own[0].tolist(), before[2].tolist(), before[0].tolist(), own[3].tolist()]


def test_without_names_rows_keep_their_order():
    for here, names in ((None, ("a", "b", "c")), (["a", "b", "c"], None), (None, None)):
        saved, after = loaded(here, 3, names)
        assert_bit_equal(saved, after)


def test_without_names_another_number_of_parameters_warns():
    with pytest.warns(StatisticsNotLoadedWarning, match=r"state\.clip\[0\].*AdaGC"):
        _, here = loaded(None, 2)
    assert_bit_equal(here, NUMPY.init(ADAGC, 2).clip[0])


# ------------------------------------------------------------- rules that changed since

CHANGED = {
    "another window": (AutoClip(window=20), AutoClip(window=30), 1),
    "another warm-up": (ZClip(warmup_steps=10), ZClip(warmup_steps=12), 1),
    "a much longer warm-up": (AdaGC(warmup_steps=1), AdaGC(), 1),
    "another rule": (AutoClip(window=20), ZClip(), 1),
    "a rule that was added": (None, (AutoClip(window=20), ZClip()), 2),
    "a rule that was added before": (ZClip(), (AutoClip(window=20), ZClip()), 1),
    "a rule that left": ((AutoClip(window=20), ZClip()), AutoClip(window=20), 0),
    "another order": ((AutoClip(window=20), ZClip()), (ZClip(), AutoClip(window=20)), 0),
    "another threshold": (ZClip(z_threshold=2.0), ZClip(z_threshold=3.0), 0),
    "rules without statistics": (ZClip(), (ClipByNorm(1.0), ZClip(), 1.0), 0),
}


@pytest.mark.parametrize(("before", "after", "n_warnings"), CHANGED.values(), ids=CHANGED)
def test_statistics_load_into_fitting_rules_and_missing_ones_warn(before, after, n_warnings, recwarn):
    _, state = NUMPY.run(GuardConfig(clip=before), list(stream(NUMPY, 40, 5)))
    here = NUMPY.init(GuardConfig(clip=after), 3)
    got = state_from_dict(strict_json(state_to_dict(state)), here, xp=NUMPY.xp)
    seen = [w for w in recwarn if issubclass(w.category, StatisticsNotLoadedWarning)]
    assert len(seen) == n_warnings == len(recwarn)
    saved = {(type(part), np.shape(part[0])): part for part in state.clip if part}
    for own, part in zip(here.clip, got.clip, strict=True):
        if part:
            assert_bit_equal(part, saved.get((type(own), np.shape(own[0])), own) if n_warnings == 0 else part)
    kept = [
        own is not part and bool(own) and to_numpy(own[0]).tobytes() == to_numpy(part[0]).tobytes()
        for own, part in zip(here.clip, got.clip, strict=True)
    ]
    assert sum(kept) == n_warnings


def test_missing_spike_or_scale_statistics_warn():
    _, state = NUMPY.run(GuardConfig(loss_scale="dynamic"), list(stream(NUMPY, 10, 6)))
    here = NUMPY.init(GuardConfig(loss_scale=LogMaxLossScale(), spike="skip"), 3)
    with pytest.warns(StatisticsNotLoadedWarning) as seen:
        got = state_from_dict(state_to_dict(state), here, xp=NUMPY.xp)
    assert sorted(str(w.message).split(":")[0] for w in seen) == [
        "state.loss_scale.statistics",
        "state.spike",
    ]
    assert {w.filename for w in seen} == {__file__}
    assert_bit_equal(got.spike, here.spike)
    assert_bit_equal(got.loss_scale.statistics, here.loss_scale.statistics)
    assert float(got.loss_scale.scale) == float(state.loss_scale.scale)


def test_the_windows_load_into_either_spike_rule():
    _, state = NUMPY.run(CONFIGS["MeanStdSpikeGuard"], list(stream(NUMPY, 40, 7)))
    here = NUMPY.init(GuardConfig(spike=SpikeGuard(window=20, min_samples=5)), 3)
    assert_bit_equal(state_from_dict(state_to_dict(state), here, xp=NUMPY.xp).spike, state.spike)


@pytest.mark.parametrize("field", ["gamma", "lowest", "seen", "far"])
def test_rows_of_another_length_warn_and_are_not_loaded(field):
    plain = strict_json(state_to_dict(adagc_state(), ["a", "b", "c"]))
    plain["state"]["clip"][0][field].pop()
    for names in (["a", "b", "c"], ["c", "b", "a"]):
        like = NUMPY.init(ADAGC, 3)
        with pytest.warns(StatisticsNotLoadedWarning):
            got = state_from_dict(plain, like, xp=NUMPY.xp, names=names)
        assert_bit_equal(got.clip, like.clip)


@pytest.mark.parametrize("rule", [AdaGC(), AdaGC(warmup_steps=2), ZClip(), AutoClip(window=3)])
@pytest.mark.parametrize("names", [None, (), ("a", "b")])
def test_the_state_of_a_guard_without_parameters_keeps_its_shape(rule, names):
    """A rank may hold no parameter, and a list without rows says nothing of their columns."""
    config = GuardConfig(clip=rule)
    saved = state_to_dict(init_guard(config, 0, xp=np), None if names is None else [])
    like = init_guard(config, len(names or ()), xp=np)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StatisticsNotLoadedWarning)
        loaded = state_from_dict(saved, like, xp=np, names=names)
    assert [leaf.shape for leaf in leaves(loaded)] == [leaf.shape for leaf in leaves(like)]
    assert [leaf.dtype for leaf in leaves(loaded)] == [leaf.dtype for leaf in leaves(like)]
