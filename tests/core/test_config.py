"""Settings: a wrong value is rejected with the name of its field; a valid one survives its round trips."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys

import numpy as np
import pytest
import tomli_w
import torch
from hypothesis import given
from hypothesis import strategies as st

from stablenum import (
    AdaGC,
    AdaptiveGradClip,
    AutoClip,
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByValue,
    ClipUpdateRMS,
    DynamicLossScale,
    EscalatePrecision,
    GuardConfig,
    LogMaxLossScale,
    MeanStdSpikeGuard,
    SpikeGuard,
    StaticLossScale,
    UnderflowAwareLossScale,
    ZClip,
)
from stablenum.guard.config import make_config

NOT_NUMBERS = ["1.0", "x", b"1", True, [], [1.0], {}, {"a": 1}, object(), math.nan, 1j, np.ones(2), 10**400]
NOT_POSITIVE = [*NOT_NUMBERS, None, math.inf, -math.inf, -1.0, 0, 0.0, -(10**400)]
# 2.5 lies within the range of every count.
NOT_COUNTS = [*NOT_NUMBERS, 1.5, 2.5, 1.0, 0, -1, 2**31, math.inf]
NOT_FRACTIONS = [*NOT_POSITIVE, 1.0, 1, 2.0]
NOT_WORDS = [1, 1.0, True, "other", "", [], ["skip"], {}, object(), math.nan, b"skip", np.ones(2)]

WRONG = {
    (GuardConfig, "clip"): [
        *(value for value in NOT_POSITIVE if value is not None and not isinstance(value, list)),
        [None],
        [[1.0]],
        ["x"],
        [0.0],
        (ClipByNorm(1.0), -1.0),
        DynamicLossScale(),
        ClipByNorm,
    ],
    (GuardConfig, "loss_scale"): [
        *(value for value in NOT_POSITIVE if value is not None),
        "Dynamic",
        2.0**101,
        2.0**-101,
        ClipByNorm(1.0),
        DynamicLossScale,
    ],
    (GuardConfig, "on_nonfinite"): [*NOT_WORDS, None],
    (GuardConfig, "max_skips_in_a_row"): NOT_COUNTS,
    (GuardConfig, "exact_norms"): [None, 0, 1, "yes", [], np.ones(2)],
    (ClipByGlobalNorm, "max_norm"): NOT_POSITIVE,
    (ClipByNorm, "max_norm"): NOT_POSITIVE,
    (ClipByValue, "max_value"): NOT_POSITIVE,
    (StaticLossScale, "scale"): [*NOT_POSITIVE, 2.0**101, 2.0**-101],
    (DynamicLossScale, "init_scale"): [*NOT_POSITIVE, 0.5, 2.0**25],
    (DynamicLossScale, "growth_factor"): [*NOT_POSITIVE, 1.0, 0.5, 2.0**101],
    (DynamicLossScale, "backoff_factor"): [*NOT_POSITIVE, 1.0, 2.0],
    (DynamicLossScale, "growth_interval"): [*NOT_COUNTS, None],
    (DynamicLossScale, "hysteresis"): [*NOT_COUNTS, None],
    (DynamicLossScale, "hysteresis_refill"): [*NOT_WORDS, None],
    (DynamicLossScale, "min_scale"): [*NOT_POSITIVE, 2.0**-101, 2.0**101],
    (DynamicLossScale, "max_scale"): [*NOT_POSITIVE, 0.5, 2.0**101],
    (GuardConfig, "escalate"): [*NOT_NUMBERS, 1.0, "dynamic", EscalatePrecision, ClipByNorm(1.0)],
    (EscalatePrecision, "after"): [*NOT_COUNTS, None],
    (EscalatePrecision, "for_steps"): [*NOT_COUNTS, None],
    (EscalatePrecision, "formats"): [
        *(None, 3, True, math.nan, object(), "float16", "float16, float32", (), [], ["float16"], {}),
        *(("float32", "float16"), ("float16", "float16"), ("float16", "bfloat16", "float16")),
    ],
    (GuardConfig, "spike"): [*NOT_NUMBERS, 1.0, "Skip", ["skip"], SpikeGuard, ClipByNorm(1.0)],
    (AdaptiveGradClip, "clipping"): [*NOT_POSITIVE, 1e39],
    (AdaptiveGradClip, "eps"): [*NOT_POSITIVE, 1e39],
    (AdaptiveGradClip, "exclude"): [None, 1, True, "", [""], ["a", 1], {"a": 1}, object(), b"a", np.ones(2)],
    (AdaptiveGradClip, "output_axis"): [*NOT_WORDS, "First", 0],
    (AutoClip, "quantile"): [*NOT_FRACTIONS],
    (AutoClip, "window"): [*NOT_COUNTS, None, 100_001],
    (ZClip, "alpha"): NOT_FRACTIONS,
    (ZClip, "z_threshold"): [*NOT_POSITIVE, 1e7],
    (ZClip, "max_norm"): [*(value for value in NOT_POSITIVE if value is not None), 1e39],
    (ZClip, "warmup_steps"): [*NOT_COUNTS, None, 1, 100_001],
    (AdaGC, "clip_ratio"): [*NOT_POSITIVE, 1e39],
    (AdaGC, "decay"): NOT_FRACTIONS,
    (AdaGC, "max_norm"): [*NOT_POSITIVE, 1e39],
    (AdaGC, "warmup_steps"): [*NOT_COUNTS, None],
    (ClipUpdateRMS, "max_rms"): [*NOT_POSITIVE, 1e39],
    (ClipUpdateRMS, "per_lr"): [None, 0, 1, "yes", [], np.ones(2)],
    (LogMaxLossScale, "init_scale"): [*NOT_POSITIVE, 0.5, 2.0**25],
    (LogMaxLossScale, "log2_max"): [*NOT_NUMBERS, None, math.inf, -101, 101],
    (LogMaxLossScale, "std_factor"): [*NOT_NUMBERS, None, math.inf, -1, 101],
    (LogMaxLossScale, "mean_decay"): NOT_FRACTIONS,
    (LogMaxLossScale, "std_decay"): NOT_FRACTIONS,
    (LogMaxLossScale, "min_scale"): [*NOT_POSITIVE, 2.0**-101, 2.0**101],
    (LogMaxLossScale, "max_scale"): [*NOT_POSITIVE, 0.5, 2.0**101],
    (UnderflowAwareLossScale, "init_scale"): [*NOT_POSITIVE, 0.5, 2.0**25],
    (UnderflowAwareLossScale, "max_tiny"): [*NOT_NUMBERS, None, math.inf, -0.1, 1.0],
    (UnderflowAwareLossScale, "headroom"): [*NOT_POSITIVE, 1e39],
    (UnderflowAwareLossScale, "recovery_interval"): [*NOT_COUNTS, None],
    (UnderflowAwareLossScale, "min_scale"): [*NOT_POSITIVE, 2.0**-101, 2.0**101],
    (UnderflowAwareLossScale, "max_scale"): [*NOT_POSITIVE, 0.5, 2.0**101],
    **{
        (rule, field): values
        for rule in (SpikeGuard, MeanStdSpikeGuard)
        for field, values in {
            "window": [*NOT_COUNTS, None, 1, 100_001],
            "threshold": [*NOT_POSITIVE, 1e39],
            "min_samples": [*NOT_COUNTS, None, 1, 129],
            "watch": [None, 1, True, "", "norm", (), [], ["loss", "other"], ("loss", 1), {}, np.ones(2)],
            "action": [*NOT_WORDS, None, "raise"],
        }.items()
    },
    (SpikeGuard, "min_spread"): [*NOT_NUMBERS, None, math.inf, -0.01, 1e39],
    (SpikeGuard, "max_in_a_row"): [*NOT_COUNTS, None],
}
# The ends of the ranges, which are allowed.
ALLOWED = {
    (GuardConfig, "loss_scale"): [2.0**-100, 2.0**100],
    (GuardConfig, "max_skips_in_a_row"): [1, 2**31 - 1],
    (StaticLossScale, "scale"): [2.0**-100, 2.0**100],
    (DynamicLossScale, "init_scale"): [1.0, 2.0**24],
    (DynamicLossScale, "growth_factor"): [2.0**100],
    (DynamicLossScale, "growth_interval"): [1, 2**31 - 1],
    (DynamicLossScale, "hysteresis"): [1, 2**31 - 1],
    (DynamicLossScale, "min_scale"): [2.0**-100, 2.0**16],
    (DynamicLossScale, "max_scale"): [2.0**16, 2.0**100],
    (EscalatePrecision, "after"): [1],
    (EscalatePrecision, "for_steps"): [1],
    (EscalatePrecision, "formats"): [("float16", "float32")],
    (AutoClip, "window"): [1, 100_000],
    (ZClip, "z_threshold"): [1e6],
    (ZClip, "warmup_steps"): [2, 100_000],
    (AdaGC, "warmup_steps"): [1],
    (LogMaxLossScale, "log2_max"): [-100, 100],
    (LogMaxLossScale, "std_factor"): [0, 100],
    (UnderflowAwareLossScale, "max_tiny"): [0.0],
    (UnderflowAwareLossScale, "recovery_interval"): [1],
    (SpikeGuard, "window"): [64, 100_000],
    (SpikeGuard, "min_samples"): [2, 128],
    (SpikeGuard, "min_spread"): [0.0],
    (SpikeGuard, "max_in_a_row"): [1],
    (MeanStdSpikeGuard, "min_samples"): [2, 128],
}
DEFAULTS = {
    GuardConfig: {"on_nonfinite": "skip", "exact_norms": False}
    | dict.fromkeys(["clip", "loss_scale", "spike", "escalate", "max_skips_in_a_row"]),
    DynamicLossScale: {
        "init_scale": 65536.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "hysteresis": 1,
        "hysteresis_refill": "good_step",
        "min_scale": 1.0,
        "max_scale": 16777216.0,
    },
    LogMaxLossScale: {
        "init_scale": 65536.0,
        "log2_max": 16.0,
        "std_factor": 3.09,
        "mean_decay": 0.99,
        "std_decay": 0.999,
        "min_scale": 1.0,
        "max_scale": 16777216.0,
    },
    UnderflowAwareLossScale: {
        "init_scale": 65536.0,
        "max_tiny": 0.001,
        "headroom": 32768.0,
        "recovery_interval": 2000,
        "min_scale": 1.0,
        "max_scale": 16777216.0,
    },
    EscalatePrecision: {"after": 3, "for_steps": 100, "formats": ("float16", "float32")},
    AdaptiveGradClip: {"clipping": 0.01, "eps": 0.001, "exclude": (), "output_axis": None},
    AutoClip: {"quantile": 0.1, "window": 1000},
    ZClip: {"alpha": 0.97, "z_threshold": 2.5, "max_norm": 1.0, "warmup_steps": 25},
    AdaGC: {"clip_ratio": 1.05, "decay": 0.98, "max_norm": 1.0, "warmup_steps": 100},
    ClipUpdateRMS: {"per_lr": True},
    MeanStdSpikeGuard: {
        "window": 128,
        "threshold": 6.0,
        "min_samples": 64,
        "watch": ("loss", "grad_norm"),
        "action": "skip",
    },
}
DEFAULTS[SpikeGuard] = {**DEFAULTS[MeanStdSpikeGuard], "min_spread": 0.01, "max_in_a_row": 8}
CASES = [
    pytest.param(cls, field, value, id=f"{cls.__name__}.{field}-{i}")
    for (cls, field), values in WRONG.items()
    for i, value in enumerate(values)
]

positive = st.floats(min_value=1e-30, max_value=1e30)
fractions = st.floats(0.0, 1.0, exclude_min=True, exclude_max=True)
counts = st.integers(2, 100_000)
units = st.builds(
    AdaptiveGradClip,
    clipping=positive,
    eps=positive,
    exclude=st.lists(st.text(min_size=1, max_size=5), max_size=2) | st.just("none"),
    output_axis=st.sampled_from([None, "first", "last"]),
)
on_norms = st.one_of(
    positive.map(ClipByNorm),
    positive.map(ClipByGlobalNorm),
    st.builds(AutoClip, quantile=fractions, window=counts),
    st.builds(
        ZClip,
        alpha=fractions,
        z_threshold=st.floats(0.1, 1e6),
        max_norm=st.none() | positive,
        warmup_steps=counts,
    ),
    st.builds(AdaGC, clip_ratio=positive, decay=fractions, max_norm=positive, warmup_steps=counts),
)
ends = st.sampled_from(
    [(), (ClipByValue(0.1),), (ClipUpdateRMS(1.0),), (ClipByValue(2.0), ClipUpdateRMS(0.5, per_lr=False))]
)
clips = st.one_of(
    st.none(),
    positive,
    on_norms,
    st.tuples(st.lists(on_norms, max_size=2), st.lists(units, max_size=1), ends).map(
        lambda parts: [*parts[0], *parts[1], *parts[2]]
    ),
)
spike_settings = {
    "window": st.integers(64, 100_000),
    "threshold": positive,
    "min_samples": st.integers(2, 64),
    "watch": st.sampled_from(["loss", "grad_norm", ("loss",), ["grad_norm", "loss"]]),
    "action": st.sampled_from(["skip", "clip"]),
}
spikes = st.one_of(
    st.sampled_from([None, "skip", "clip"]),
    st.builds(MeanStdSpikeGuard, **spike_settings),
    st.builds(
        SpikeGuard,
        **spike_settings,
        min_spread=st.floats(0, 1e30),
        max_in_a_row=st.integers(1, 2**31 - 1),
    ),
)
scale_range = {
    "init_scale": st.floats(1.0, 2.0**24),
    "min_scale": st.floats(2.0**-100, 1.0),
    "max_scale": st.floats(2.0**24, 2.0**100),
}
other_scales = st.one_of(
    st.builds(
        LogMaxLossScale,
        **scale_range,
        log2_max=st.floats(-100, 100),
        std_factor=st.floats(0, 100),
        mean_decay=fractions,
        std_decay=fractions,
    ),
    st.builds(
        UnderflowAwareLossScale,
        **scale_range,
        max_tiny=st.floats(0.0, 1.0, exclude_max=True),
        headroom=positive,
    ),
)
dynamic = st.builds(
    DynamicLossScale,
    init_scale=st.floats(1.0, 2.0**24),
    growth_factor=st.floats(1.0, 100.0, exclude_min=True),
    backoff_factor=st.floats(0.0, 1.0, exclude_min=True, exclude_max=True),
    growth_interval=st.integers(1, 2**31 - 1),
    hysteresis=st.integers(1, 100),
    hysteresis_refill=st.sampled_from(["good_step", "growth"]),
)
configs = st.builds(
    GuardConfig,
    escalate=st.none()
    | st.builds(
        EscalatePrecision,
        after=counts,
        for_steps=counts,
        formats=st.sampled_from([("float16", "float32"), ("fp8", "bf16", "f32")]),
    ),
    clip=clips,
    loss_scale=st.one_of(
        st.none(), st.just("dynamic"), st.floats(2.0**-100, 2.0**100), dynamic, other_scales
    ),
    spike=spikes,
    on_nonfinite=st.sampled_from(["skip", "raise"]),
    max_skips_in_a_row=st.none() | st.integers(1, 2**31 - 1),
    exact_norms=st.booleans(),
)


def test_every_field_has_wrong_values_to_test():
    fields = {(cls, field.name) for cls, _ in WRONG for field in dataclasses.fields(cls)}
    assert fields == set(WRONG)


@pytest.mark.parametrize(("cls", "field", "value"), CASES)
def test_a_wrong_value_is_rejected_with_the_fields_name(cls, field, value):
    others = {f.name: 1.0 for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING}
    with pytest.raises(ValueError, match=rf"\b{field}\b.* must be .*; got "):
        cls(**{**others, field: value})


@pytest.mark.parametrize(("cls", "field"), ALLOWED)
def test_the_ends_of_a_range_are_allowed(cls, field):
    for value in ALLOWED[cls, field]:
        made = cls(**{field: value})
        kept = getattr(made, field)
        assert (kept.scale if field == "loss_scale" else kept) == value


@pytest.mark.parametrize("cls", dict.fromkeys(cls for cls, _ in WRONG))
def test_the_defaults_do_not_change_unseen(cls):
    """Runs are repeated, and compared with one another, by settings that leave most of them out."""
    fields = dataclasses.fields(cls)
    found = {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}
    assert found == DEFAULTS.get(cls, {})


@pytest.mark.parametrize(("cls", "field"), WRONG)
def test_configs_are_frozen_and_have_no_other_fields(cls, field):
    required = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]
    made = cls(**dict.fromkeys(required, 1.0))
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, field, 1.0)
    with pytest.raises(TypeError, match="no_such_field"):
        cls(no_such_field=1)


def test_the_message_says_what_is_allowed_what_was_given_and_how_to_fix_it():
    with pytest.raises(
        ValueError, match=re.escape("backoff_factor must be a finite number above 0 and below 1; got -1.")
    ):
        DynamicLossScale(backoff_factor=-1)
    with pytest.raises(ValueError, match="min_scale and max_scale"):
        DynamicLossScale(init_scale=2.0**30)


def test_short_forms():
    assert GuardConfig(clip=1.0).clip == (ClipByGlobalNorm(1.0),)
    assert GuardConfig(clip=[ClipByNorm(1.0), 2.0]).clip == (ClipByNorm(1.0), ClipByGlobalNorm(2.0))
    assert GuardConfig(clip=[]).clip == GuardConfig().clip == ()
    assert GuardConfig(loss_scale="dynamic").loss_scale == DynamicLossScale()
    assert GuardConfig(loss_scale=1024).loss_scale == StaticLossScale(scale=1024.0)


@pytest.mark.parametrize(
    "number",
    [np.float32(0.5), np.float64(0.5), np.asarray(0.5), torch.tensor(0.5)],
    ids=lambda n: type(n).__name__,
)
def test_numbers_of_other_libraries_become_plain_ones(number):
    # A float64 scalar of NumPy kept in the config would turn a float32 state into float64.
    config = GuardConfig(
        clip=(number, ClipByNorm(number), ClipByGlobalNorm(number), ClipByValue(number)),
        loss_scale=DynamicLossScale(
            backoff_factor=number, growth_interval=np.int64(7), min_scale=number, hysteresis=np.int32(2)
        ),
        max_skips_in_a_row=np.int64(3),
    )
    values = [rule.max_norm for rule in config.clip[:3]] + [config.clip[3].max_value]
    assert all(type(value) is float and value == 0.5 for value in values)
    assert type(config.loss_scale.growth_interval) is int
    assert type(config.max_skips_in_a_row) is int
    assert GuardConfig.from_json(config.to_json()) == config
    assert hash(config) == hash(GuardConfig.from_json(config.to_json()))


@given(configs)
def test_round_trips(config):
    plain = config.to_dict()
    assert GuardConfig.from_dict(plain) == config
    assert GuardConfig.from_dict(json.loads(json.dumps(plain, allow_nan=False))) == config
    assert GuardConfig.from_json(config.to_json()) == config
    assert GuardConfig.from_toml(config.to_toml()) == config
    assert GuardConfig.from_toml(tomli_w.dumps(plain)) == config
    assert hash(GuardConfig.from_dict(plain)) == hash(config)


def test_without_tomli_w_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tomli_w", None)
    with pytest.raises(ImportError, match=r"to_toml needs tomli-w: pip install tomli-w$"):
        GuardConfig().to_toml()


def test_none_where_it_is_not_the_default_survives_json_and_toml():
    config = GuardConfig(clip=(ZClip(max_norm=None), ZClip()), spike=SpikeGuard(watch="loss"))
    assert config.to_dict()["clip"][0]["max_norm"] == "none"
    assert GuardConfig.from_json(config.to_json()) == GuardConfig.from_toml(config.to_toml()) == config
    assert GuardConfig.from_toml('clip = { rule = "ZClip", max_norm = "none" }').clip == (
        ZClip(max_norm=None),
    )


def test_every_rule_can_be_named_in_text():
    for cls in {cls for cls, _ in WRONG} - {GuardConfig}:
        required = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]
        rule = cls(**dict.fromkeys(required, 2.0))
        words = {"Spike": "spike", "Scale": "loss_scale", "Escalate": "escalate"}
        field = next((field for word, field in words.items() if word in cls.__name__), "clip")
        made = GuardConfig.from_dict({field: {"rule": cls.__name__, **dict.fromkeys(required, 2.0)}})
        assert made == GuardConfig(**{field: rule})


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ((ClipUpdateRMS(1.0), 1.0), "at most one ClipUpdateRMS, at the end"),
        ((ClipUpdateRMS(1.0), ClipUpdateRMS(1.0)), "at most one ClipUpdateRMS, at the end"),
        ((1.0, ClipUpdateRMS(1.0), ClipByValue(1.0)), "at most one ClipUpdateRMS, at the end"),
        ((ClipByValue(1.0), AdaGC()), "at most one ClipByValue, after all rules that use norms"),
        ((ClipByValue(1.0), AdaptiveGradClip()), "after all rules that use norms"),
        ((ClipByValue(1.0), AutoClip(), ClipUpdateRMS(1.0)), "after all rules that use norms"),
        ((AdaptiveGradClip(), 1.0, AdaptiveGradClip()), "at most one AdaptiveGradClip"),
        (AdaGC, r"clip must be .*got <class .*AdaGC'>. Call the class to make a rule: AdaGC\(\)"),
        ((ZClip(), AutoClip), r"rule: AutoClip\(\)"),
        (SpikeGuard(), "clip must be .* got SpikeGuard"),
        (LogMaxLossScale(), "clip must be .* got LogMaxLossScale"),
    ],
)
def test_rules_in_an_impossible_order_are_rejected(rules, message):
    with pytest.raises(ValueError, match=message):
        GuardConfig(clip=rules)


def test_possible_orders_are_accepted():
    assert (
        len(GuardConfig(clip=(1.0, AdaptiveGradClip(), ZClip(), ClipByValue(1.0), ClipUpdateRMS(1.0))).clip)
        == 5
    )
    for rule in (LogMaxLossScale, SpikeGuard):
        field = "spike" if rule is SpikeGuard else "loss_scale"
        with pytest.raises(ValueError, match=rf"{field} must be .*; got <class"):
            GuardConfig(**{field: rule})


def test_a_window_shorter_than_min_samples_is_rejected():
    for rule in (SpikeGuard, MeanStdSpikeGuard):
        with pytest.raises(ValueError, match=r"min_samples must be a whole number from 2 to 63; got 64"):
            rule(window=63)
        assert rule(window=63, min_samples=63).window == 63


def test_a_config_written_by_hand():
    text = """
        clip = [1.0, { rule = "ClipByValue", max_value = 0.1 }]
        loss_scale = { rule = "DynamicLossScale", growth_interval = 500 }
        max_skips_in_a_row = 20
    """
    assert GuardConfig.from_toml(text) == GuardConfig(
        clip=(1.0, ClipByValue(0.1)),
        loss_scale=DynamicLossScale(growth_interval=500),
        max_skips_in_a_row=20,
    )
    assert GuardConfig.from_dict({"clip": 1.0, "loss_scale": 8.0}) == GuardConfig(clip=1.0, loss_scale=8.0)
    assert GuardConfig.from_dict({}) == GuardConfig()


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({"clips": 1.0}, "config has no field 'clips'; it has clip, loss_scale"),
        ({1: 1.0}, "config has no field 1"),
        ({"clip": {"rule": "Clip"}}, "clip.rule must be one of .*ClipByNorm.*; got 'Clip'"),
        ({"clip": {"max_norm": 1.0}}, "clip.rule must be one of .*; got None"),
        ({"clip": {"rule": ["ClipByNorm"]}}, "clip.rule must be one of"),
        (
            {"clip": [{"rule": "ClipByNorm", "max": 1.0}]},
            r"clip \(ClipByNorm\) has no field 'max'; it has max_norm",
        ),
        ({"clip": {"rule": "ClipByNorm"}}, r"clip \(ClipByNorm\).*max_norm"),
        ({"clip": {"rule": "DynamicLossScale"}}, "clip.rule must be one of .*ClipByNorm"),
        ({"loss_scale": {"rule": "ClipByNorm", "max_norm": 1.0}}, "loss_scale.rule must be one of .*Static"),
        ({"loss_scale": {"rule": "DynamicLossScale", "min_scale": "a"}}, "min_scale must be"),
        ({"loss_scale": "static"}, "loss_scale must be"),
        ([], "config must be a mapping"),
        (None, "config must be a mapping"),
        ("clip", "config must be a mapping"),
    ],
)
def test_from_dict_names_what_it_rejects(plain, message):
    with pytest.raises(ValueError, match=message):
        GuardConfig.from_dict(plain)


@pytest.mark.parametrize("text", ["", "{", "[]", "1", '{"clip": "x"}'])
def test_from_json_rejects(text):
    with pytest.raises(ValueError, match=r"Expecting|config must|clip must"):
        GuardConfig.from_json(text)


@pytest.mark.parametrize(
    "nested", ["[" * 100_000, '{"clip": ' * 100_000, '{"clip": ' + "[" * 900 + "]" * 900 + "}"]
)
def test_from_json_rejects_what_is_nested_too_deeply(nested):
    with pytest.raises(ValueError, match=r"nested too deeply|clip must be"):
        GuardConfig.from_json(nested)
    with pytest.raises(ValueError, match=r"nested too deeply|clip must be"):
        GuardConfig.from_toml("clip = " + "[" * 50_000)


def test_a_value_that_cannot_be_shown_is_rejected_as_any_other():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ValueError, match=r"loss_scale must be .* a list that is nested too deeply"):
        GuardConfig(loss_scale=deep)


@pytest.mark.parametrize("text", ["clip =", "clip = 'x'", "unknown = 1"])
def test_from_toml_rejects(text):
    with pytest.raises(ValueError, match=r"Invalid|clip must|no field"):
        GuardConfig.from_toml(text)


def test_make_config_replaces_fields_by_overrides():
    base = GuardConfig(clip=1.0, loss_scale="dynamic")
    assert make_config(None, {}) == GuardConfig()
    assert make_config(base, {}) == base
    assert make_config(base, {"clip": None}) == GuardConfig(loss_scale="dynamic")
    with pytest.raises(TypeError, match=r"'max_norm': did you mean clip=\? GuardConfig has clip, loss"):
        make_config(base, {"max_norm": 1.0})
    with pytest.raises(TypeError, match="config must be a GuardConfig or None; got float"):
        make_config(1.0, {})
    with pytest.raises(ValueError, match="clip must be"):
        make_config(base, {"clip": -1.0})


@pytest.mark.parametrize(
    ("config", "skip_limit", "per_tensor", "changes"),
    [
        (GuardConfig(), None, False, False),
        (GuardConfig(on_nonfinite="raise"), 1, False, False),
        (GuardConfig(on_nonfinite="raise", max_skips_in_a_row=5), 1, False, False),
        (GuardConfig(max_skips_in_a_row=5), 5, False, False),
        (GuardConfig(clip=1.0), None, False, True),
        (GuardConfig(clip=(1.0, ClipByNorm(1.0))), None, True, True),
        (GuardConfig(loss_scale=1.0), None, False, True),
    ],
)
def test_derived_properties(config, skip_limit, per_tensor, changes):
    assert config.skip_limit == skip_limit
    assert config.per_tensor is per_tensor
    assert config.changes_gradients is changes


def test_one_factor_suffices_unless_a_rule_looks_at_tensors_units_or_elements():
    assert GuardConfig().one_factor
    assert GuardConfig(clip=1.0, loss_scale="dynamic", spike="clip").one_factor
    for rule in (ClipByNorm(1.0), AdaptiveGradClip(), ClipByValue(1.0)):
        assert not GuardConfig(clip=rule).one_factor


LADDER = EscalatePrecision(formats=("float8", "bf16", "f32"))


@pytest.mark.parametrize(
    ("settings", "level", "own", "expected"),
    [
        ({}, 0, None, "bfloat16"),
        ({"loss_scale": 8.0}, 0, None, "float16"),
        ({"loss_scale": 8.0}, 0, "float32", "float32"),
        ({"escalate": LADDER}, 0, None, "float8_e4m3fn"),
        ({"escalate": LADDER}, 0, "float8_e4m3fn", "float8_e4m3fn"),
        ({"escalate": LADDER}, 1, "float8_e4m3fn", "bfloat16"),
        ({"escalate": LADDER}, 2, None, "float32"),
    ],
)
def test_the_format_of_a_level(settings, level, own, expected):
    assert GuardConfig(**settings).compute_format(level, own) == expected


@pytest.mark.parametrize(
    ("clip", "needed"),
    [
        (None, False),
        (1.0, False),
        ((1.0, ClipByValue(1.0), ClipUpdateRMS(1.0)), False),
        (ClipByNorm(1.0), True),
        ((AutoClip(), 1.0), False),
        (AdaptiveGradClip(), False),
        ((AdaptiveGradClip(), 1.0), True),
    ],
)
def test_the_norms_of_single_parameters_are_needed_by_some_rules(clip, needed):
    assert GuardConfig(clip=clip).needs_single_norms == needed


@pytest.mark.parametrize("text", ["[" * 100_000, '{"clip":' * 100_000])
def test_json_that_is_nested_too_deep_is_a_value_error(text):
    with pytest.raises(ValueError, match="nested too deep"):
        GuardConfig.from_json(text)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("max_grad_norm", "clip"),
        ("fp16", "loss_scale"),
        ("loss_scaling", "loss_scale"),
        ("on_non_finite", "on_nonfinite"),
    ],
)
def test_a_setting_by_the_name_of_another_library_or_misspelt_is_recognised(given, meant):
    with pytest.raises(TypeError, match=rf"unknown setting '{given}': did you mean {meant}=\?"):
        make_config(None, {given: 1})


def test_a_setting_that_is_like_none_gets_no_guess():
    with pytest.raises(TypeError, match="unknown setting 'colour'; GuardConfig has"):
        make_config(None, {"colour": 1})
