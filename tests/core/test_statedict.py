"""A guard's state as plain JSON values: bit for bit, and between any two backends."""

from __future__ import annotations

import copy
import itertools
import json
import math
import random

import numpy as np
import pytest

import stablenum
from stablenum import (
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByValue,
    ClipUpdateRMS,
    DynamicLossScale,
    GuardConfig,
)
from stablenum.guard.readout import metrics
from stablenum.guard.statedict import state_from_dict, state_to_dict
from tests.backends import BACKENDS, assert_bit_equal, to_numpy

CONFIG = GuardConfig(
    clip=(ClipByNorm(2.0), ClipByGlobalNorm(3.0)),
    loss_scale=DynamicLossScale(growth_interval=4, hysteresis=2, growth_factor=1.7, backoff_factor=0.3),
    max_skips_in_a_row=20,
)


def stream(backend, n_steps, seed):
    draw = random.Random(seed)
    norms = (0.0, 1e-30, 0.1, 7.0, 1e20, math.inf, math.nan)
    losses = (0.1, 1.0, math.nan, -math.inf)
    return [
        backend.observe(draw.choices(norms, weights=[9, 9, 9, 9, 9, 1, 1], k=3), loss=draw.choice(losses))
        for _ in range(n_steps)
    ]


def strict_json(plain):
    return json.loads(json.dumps(plain, allow_nan=False))


def test_the_dict_is_strict_json_and_loads_bit_for_bit(backend):
    _, state = backend.run(CONFIG, stream(backend, 150, 1))
    plain = strict_json(state_to_dict(state, ["a", "b", "c"]))
    assert set(plain) == {"version", "names", "state"}
    assert (plain["version"], plain["names"]) == (1, ["a", "b", "c"])
    back = state_from_dict(plain, backend.init(CONFIG, 3), xp=backend.xp, names=["a", "b", "c"])
    assert_bit_equal(state, back)
    assert type(back) is type(state)
    assert state_to_dict(back, ["a", "b", "c"]) == plain


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("saved_by", "loaded_by"), list(itertools.permutations(["numpy", "torch", "jax-jit"], 2))
)
def test_a_state_saved_by_one_backend_continues_in_another(saved_by, loaded_by):
    one, other = BACKENDS[saved_by], BACKENDS[loaded_by]
    _, state = one.run(CONFIG, stream(one, 60, 2))
    plain = strict_json(state_to_dict(state))
    crossed = state_from_dict(plain, other.init(CONFIG, 3), xp=other.xp)
    assert_bit_equal(state, crossed)
    stayed_decisions, stayed = one.run(CONFIG, stream(one, 60, 3), state)
    crossed_decisions, crossed = other.run(CONFIG, stream(other, 60, 3), crossed)
    for a, b in zip(stayed_decisions, crossed_decisions, strict=True):
        for name in ("apply", "reason", "worst"):
            assert_bit_equal(getattr(a, name), getattr(b, name))
        np.testing.assert_allclose(a.multiplier, b.multiplier, rtol=1e-6)
    assert_bit_equal(stayed.loss_scale, crossed.loss_scale)
    assert_bit_equal(stayed.recorder.ints, crossed.recorder.ints)


def test_recorded_parameters_are_translated_by_name(backend):
    _, state = backend.run(CONFIG, [backend.observe([1.0, math.inf, 2.0])])
    plain = state_to_dict(state, ["a", "b", "c"])
    here = state_from_dict(plain, backend.init(CONFIG, 3), xp=backend.xp, names=["b", "c", "a"])
    assert metrics(here, ["b", "c", "a"])["worst"] == (0, "b")
    before, after = (to_numpy(s.recorder.ints).tolist() for s in (state, here))
    assert [row[:2] + row[3:] for row in after] == [row[:2] + row[3:] for row in before]
    gone = state_from_dict(plain, backend.init(CONFIG, 3), xp=backend.xp, names=["x", "y", "z"])
    assert metrics(gone, ["x", "y", "z"])["worst"] == (-1, None)
    unnamed = state_from_dict(plain, backend.init(CONFIG, 3), xp=backend.xp)
    assert metrics(unnamed)["worst"] == (1, None)


def broken(path, value):
    def change(plain):
        *parents, last = path
        for key in parents:
            plain = plain[key]
        if value is KeyError:
            del plain[last]
        else:
            plain[last] = value

    return change


WRONG = {
    "version missing": (broken(["version"], KeyError), "guard state must be a dict .*version 1"),
    "version 2": (broken(["version"], 2), "guard state must be a dict .*version 1; got .*'version': 2"),
    "no state": (broken(["state"], KeyError), "guard state must be"),
    "state a list": (broken(["state"], []), "state must be a dict with the keys step, loss_scale"),
    "names a number": (broken(["names"], 5), "names must be a list of strings"),
    "names of numbers": (broken(["names"], [1, 2, 3]), "names must be a list of strings"),
    "field missing": (broken(["state", "halted"], KeyError), "state must be a dict with the keys"),
    "field too many": (broken(["state", "other"], 1), "state must be a dict with the keys"),
    "inner field missing": (
        broken(["state", "loss_scale", "scale"], KeyError),
        "state.loss_scale must be a dict with the keys scale",
    ),
    "scale 0": (
        broken(["state", "loss_scale", "scale"], 0.0),
        "state.loss_scale.scale must be a number from",
    ),
    "scale nan": (broken(["state", "loss_scale", "scale"], "nan"), "state.loss_scale.scale must be a num"),
    "scale inf": (broken(["state", "loss_scale", "scale"], "inf"), "state.loss_scale.scale must be a num"),
    "scale beyond float32": (
        broken(["state", "loss_scale", "scale"], 1e39),
        "state.loss_scale.scale must be a number within float32's range",
    ),
    "scale below float32": (
        broken(["state", "loss_scale", "scale"], 1e-60),
        "state.loss_scale.scale must be a number from",
    ),
    "scale a word": (broken(["state", "loss_scale", "scale"], "big"), "state.loss_scale.scale must be a num"),
    "scale None": (broken(["state", "loss_scale", "scale"], None), "state.loss_scale.scale must be a num"),
    "scale a bool": (broken(["state", "loss_scale", "scale"], True), "state.loss_scale.scale must be a num"),
    "step a float": (broken(["state", "step"], 1.0), "state.step must be a whole number"),
    "step a list": (broken(["state", "step"], [1]), "state.step must be a whole number"),
    "step beyond int32": (
        broken(["state", "step"], 2**31),
        "state.step must be a whole number within int32's range",
    ),
    **{
        f"{count} negative": (
            broken(["state", count], -1),
            f"state.{count} must be a whole number of 0 or more",
        )
        for count in ("step", "skipped_total", "skipped_in_a_row", "nonfinite_in_a_row", "halted")
    },
    "clip a dict": (broken(["state", "clip"], {}), "state.clip must be a list"),
    "recorder of another length": (
        broken(["state", "recorder", "floats"], [[1.0] * 4] * 64),
        "state.recorder.floats must be a list of 128 items",
    ),
    "recorder row too short": (
        broken(["state", "recorder", "ints", 7], [1, 2]),
        r"state.recorder.ints\[7\] must be a list of 4 items",
    ),
    "recorder number": (
        broken(["state", "recorder", "ints", 7, 1], "OK"),
        r"state.recorder.ints\[7\]\[1\] must be a whole number",
    ),
    "recorder number below int32": (
        broken(["state", "recorder", "ints", 7, 2], -(2**31) - 1),
        r"state.recorder.ints\[7\]\[2\] must be a whole number within int32's range",
    ),
    "recorder number beyond float32": (
        broken(["state", "recorder", "floats", 3, 0], 1e39),
        r"state.recorder.floats\[3\]\[0\] must be a number within float32's range",
    ),
    "halted": (broken(["state", "halted"], 7), "state.halted must be 0 or 1"),
    "recorder reason unknown": (
        broken(["state", "recorder", "ints", 127, 1], 99),
        r"state.recorder.ints\[127\]\[1\] must be a reason code",
    ),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_a_dict_of_another_shape_is_rejected_by_field_and_nothing_changes(change, message):
    backend = BACKENDS["numpy"]
    _, state = backend.run(CONFIG, stream(backend, 5, 4))
    before = to_numpy(copy.deepcopy(state))
    plain = state_to_dict(state, ["a", "b", "c"])
    change(plain)
    kept = copy.deepcopy(plain)
    with pytest.raises(ValueError, match=message):
        state_from_dict(plain, state, xp=backend.xp, names=["c", "b", "a"])
    assert plain == kept
    assert_bit_equal(state, before)


STATISTICS = GuardConfig(
    clip=(stablenum.ZClip(warmup_steps=3), stablenum.AdaGC(warmup_steps=3), stablenum.AutoClip(window=4)),
    loss_scale=stablenum.LogMaxLossScale(),
    spike=stablenum.SpikeGuard(window=8, min_samples=4),
)
POISON = {
    "nan in a moving mean": (["clip", 0, "mean"], "nan", r"state.clip\[0\].mean must be a finite number"),
    "inf in a moving mean": (["clip", 0, "mean"], "inf", r"state.clip\[0\].mean must be a finite number"),
    "negative spread": (["clip", 0, "std"], -1.0, r"state.clip\[0\].std must be a number of 0 or more"),
    "negative count": (["clip", 0, "seen"], -3, r"state.clip\[0\].seen must be a number of 0 or more"),
    "nan in a window": (["clip", 0, "first", 1], "nan", r"state.clip\[0\].first\[1\] must be a finite"),
    "negative norm": (["clip", 2, "norms", 3], -1.0, r"state.clip\[2\].norms\[3\] must be a number of 0"),
    "one parameter's limit": (["clip", 1, "gamma", 2], "nan", r"state.clip\[1\].gamma\[2\] must be a fin"),
    "a matrix": (["clip", 1, "lowest", 0, 1], "inf", r"state.clip\[1\].lowest\[0\]\[1\] must be a finite"),
    "nan loss": (["spike", "loss", 0], "nan", r"state.spike.loss\[0\] must be a finite number"),
    "-inf loss": (["spike", "loss", 0], "-inf", r"state.spike.loss\[0\] must be a number of -3.40282e\+38"),
    "negative wait": (["loss_scale", "good_steps"], -1, "state.loss_scale.good_steps must be a number of 0"),
    "nan size": (["loss_scale", "statistics", "variance"], "nan", "statistics.variance must be a finite"),
}


@pytest.mark.parametrize(("path", "value", "message"), POISON.values(), ids=POISON)
def test_statistics_that_would_disable_a_rule_are_rejected(path, value, message):
    backend = BACKENDS["numpy"]
    _, state = backend.run(STATISTICS, [backend.observe([1.0, 2.0, 3.0], loss=-0.5, amax=0.25)] * 6)
    plain = state_to_dict(state)
    assert_bit_equal(state_from_dict(copy.deepcopy(plain), state, xp=backend.xp), state)
    broken(["state", *path], value)(plain)
    with pytest.raises(ValueError, match=message):
        state_from_dict(plain, state, xp=backend.xp)


@pytest.mark.parametrize("plain", [None, [], "text", 1, {}, {"state": {}}])
def test_a_value_that_is_not_a_state_is_rejected(backend, plain):
    with pytest.raises(ValueError, match="guard state must be a dict written by"):
        state_from_dict(plain, backend.init(CONFIG, 3), xp=backend.xp)


@pytest.mark.parametrize("clip", [None, 1.0, (ClipByNorm(1.0), ClipByValue(2.0), ClipUpdateRMS(1.0))])
@pytest.mark.parametrize("states", [[], [[]], [[], [1.0]]])
def test_rules_without_statistics_may_change_between_saving_and_loading(clip, states):
    backend = BACKENDS["numpy"]
    _, state = backend.run(CONFIG, stream(backend, 5, 4))
    plain = state_to_dict(state)
    plain["state"]["clip"] = states
    here = backend.init(GuardConfig(clip=clip), 3)
    loaded = state_from_dict(plain, here, xp=backend.xp)  # a warning would be an error here
    assert loaded.clip == here.clip
    assert_bit_equal(loaded.recorder, state.recorder)


@pytest.mark.parametrize(
    ("saved_with", "loaded_with", "scale"),
    [
        ("dynamic", None, 1.0),  # the gradients would come out 2**15 times too large
        ("dynamic", 512.0, 512.0),
        (None, "dynamic", 2.0**16),
        (512.0, "dynamic", 2.0**16),
        (512.0, 1024.0, 1024.0),
        (512.0, 512.0, 512.0),
        ("dynamic", DynamicLossScale(init_scale=4.0), 2.0**15),
    ],
)
def test_a_fixed_loss_scale_is_a_setting_and_not_loaded(backend, saved_with, loaded_with, scale):
    _, state = backend.run(GuardConfig(loss_scale=saved_with), [backend.observe([math.inf], loss=1.0)])
    here = GuardConfig(loss_scale=loaded_with)
    loaded = state_from_dict(strict_json(state_to_dict(state)), backend.init(here, 1), xp=backend.xp)
    assert float(to_numpy(loaded.loss_scale.scale)) == scale
    assert int(to_numpy(loaded.skipped_total)) == 1
    decisions, _ = backend.run(here, [backend.observe([scale], loss=1.0)], loaded)
    assert decisions[0].grad_norm == 1.0
