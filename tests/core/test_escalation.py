"""Escalation: the level compared with plain Python code, what is recorded, what is saved."""

from __future__ import annotations

import json
import math
import random
from collections import UserList

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stablenum import EscalatePrecision, GuardConfig
from stablenum.guard.readout import history, metrics
from stablenum.guard.statedict import state_from_dict, state_to_dict
from tests.backends import BACKENDS, Backend, assert_bit_equal, to_numpy

LADDER = ("float8_e4m3fn", "bfloat16", "float32")


def oracle(events: list[bool], after: int, for_steps: int, top: int) -> list[int]:
    """The level of each step, and that of the next one."""
    levels, bad, good = [0], 0, 0
    for ok in events:
        level = levels[-1]
        bad, good = (0, good + 1) if ok else (bad + 1, 0)
        if bad >= after and level < top:
            level, bad, good = level + 1, 0, 0
        elif good >= for_steps and level > 0:
            level, bad, good = level - 1, 0, 0
        levels.append(level)
    return levels


def levels(backend: Backend, rule: EscalatePrecision, events: list[bool]) -> list[int]:
    config = GuardConfig(escalate=rule)
    run, state, seen = backend.prepare(config), backend.init(config, 1), [0]
    for ok in events:
        _, state = run(state, backend.observe([1.0 if ok else math.inf], loss=0.5))
        seen.append(int(to_numpy(state.escalation.level)))
    return seen


@pytest.mark.parametrize(("after", "for_steps"), [(1, 1), (3, 5), (2, 12)])
def test_the_level_follows_the_documented_rule(backend: Backend, after: int, for_steps: int) -> None:
    events = random.Random(after).choices([True, False], weights=[2, 1], k=150)
    rule = EscalatePrecision(after=after, for_steps=for_steps, formats=LADDER)
    assert levels(backend, rule, events) == oracle(events, after, for_steps, 2)


@given(
    st.lists(st.booleans(), max_size=60),
    st.integers(1, 5),
    st.integers(1, 8),
    st.sampled_from([LADDER, LADDER[1:]]),
)
def test_the_level_follows_the_rule_for_any_events(
    events: list[bool], after: int, for_steps: int, formats
) -> None:
    numpy = BACKENDS["numpy"]
    rule = EscalatePrecision(after=after, for_steps=for_steps, formats=formats)
    assert levels(numpy, rule, events) == oracle(events, after, for_steps, len(formats) - 1)


def test_one_overflow_does_not_escalate_and_several_in_a_row_are_recorded(backend: Backend) -> None:
    config = GuardConfig(escalate=EscalatePrecision(after=2, for_steps=2))
    run, state = backend.prepare(config), backend.init(config, 1)
    for norm in (math.inf, 1.0, math.inf, math.nan, 1.0, 1.0, 1.0):
        _, state = run(state, backend.observe([norm]))
    assert [row["precision_level"] for row in history(state)] == [0, 0, 0, 0, 1, 1, 0]
    assert metrics(state)["precision_level"] == 0


def test_a_skipped_spike_does_not_escalate(backend: Backend) -> None:
    config = GuardConfig(escalate=EscalatePrecision(after=1), spike="skip")
    run, state = backend.prepare(config), backend.init(config, 1)
    for i in range(140):
        _, state = run(state, backend.observe([1.0 + 0.01 * (i % 5)], loss=1.0))
    _, state = run(state, backend.observe([1e6], loss=1.0))
    assert int(to_numpy(state.skipped_total)) == 1
    assert int(to_numpy(state.escalation.level)) == 0


def test_its_state_is_saved() -> None:
    numpy = BACKENDS["numpy"]
    config = GuardConfig(escalate=EscalatePrecision(after=1))
    run, state = numpy.prepare(config), numpy.init(config, 1)
    _, state = run(state, numpy.observe([math.inf]))
    saved = json.loads(json.dumps(state_to_dict(state), allow_nan=False))
    assert_bit_equal(state_from_dict(saved, numpy.init(config, 1), xp=numpy.xp), state)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"after": 0}, r"EscalatePrecision\.after"),
        ({"for_steps": 0}, r"EscalatePrecision\.for_steps"),
        ({"formats": ("float16",)}, r"formats must be two or more formats"),
        ({"formats": "float16"}, r"formats must be two or more formats"),
        ({"formats": ("float32", "float16")}, r"formats that increase in range"),
        ({"formats": ("float16", "int8")}, r"format must be one of"),
    ],
)
def test_wrong_settings_are_named(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        EscalatePrecision(**settings)
    with pytest.raises(ValueError, match="escalate must be None or an EscalatePrecision"):
        GuardConfig(escalate=3)


def test_the_setting_survives_json_and_toml() -> None:
    config = GuardConfig(escalate=EscalatePrecision(after=2, formats=("fp8", "bf16")))
    assert GuardConfig.from_json(config.to_json()) == config
    assert GuardConfig.from_toml(config.to_toml()) == config


def test_formats_may_be_any_sequence_but_text():
    assert EscalatePrecision(formats=UserList(["bf16", "f32"])).formats == ("bfloat16", "float32")
    with pytest.raises(ValueError, match="two or more formats"):
        EscalatePrecision(formats="float32")
