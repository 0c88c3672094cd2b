"""Nested values as JSON and named arrays: put together, they are what was taken apart."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stablenum.checkpoints.structure import put_together, taken_apart


class Array:
    """Stands for an array: equal to itself alone."""


class Pair(NamedTuple):
    a: int
    b: int


def carried(state: Any) -> Any:
    plain, arrays = taken_apart(state, lambda value: isinstance(value, Array))
    return put_together(json.loads(json.dumps(plain, allow_nan=False)), arrays)


KEYS = st.one_of(st.text(max_size=3), st.integers(), st.booleans(), st.tuples(st.integers(), st.text()))
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.builds(Array),
)
STATES = st.recursive(
    LEAVES,
    lambda inside: st.one_of(
        st.lists(inside, max_size=3),
        st.lists(inside, max_size=3).map(tuple),
        st.dictionaries(KEYS, inside, max_size=3),
        st.sets(st.integers(), max_size=3),
    ),
    max_leaves=12,
)


def typed(value: Any) -> Any:
    """The value with the types of everything in it, as 1, 1.0 and True are equal."""
    if isinstance(value, dict):
        return [(typed(key), typed(part)) for key, part in value.items()]
    if isinstance(value, (list, tuple)):
        return (type(value), [typed(part) for part in value])
    return (type(value), value, math.copysign(1, value) if isinstance(value, float) else 0)


@given(STATES)
def test_what_is_put_together_is_what_was_taken_apart(state):
    assert typed(carried(state)) == typed(state)


def test_nan_and_the_special_key_are_carried():
    assert math.isnan(carried({"x": math.nan})["x"])
    state = {"$": "array", "name": {"$": 1}}
    assert carried(state) == state


def test_arrays_are_named_by_their_place_and_never_alike():
    a, b, c = Array(), Array(), Array()
    plain, arrays = taken_apart({"x": {"y.z": a, "y": {"z": b}}, 3: [c]}, lambda v: isinstance(v, Array))
    assert arrays == {"x.y.z": a, "x.y.z#2": b, "3.0": c}
    assert put_together(plain, arrays) == {"x": {"y.z": a, "y": {"z": b}}, 3: [c]}


def test_the_metadata_of_a_module_is_carried():
    state: Any = OrderedDict(weight=1.0)
    state._metadata = OrderedDict({"": {"version": 2}})
    found = carried({"model": state})["model"]
    assert found == {"weight": 1.0}
    assert found._metadata == {"": {"version": 2}}


@pytest.mark.parametrize(
    ("state", "name"),
    [
        ({"a": [1, object()]}, r"a\.1 is builtins\.object"),
        ({"p": Pair(1, 2)}, r"p is .*\.Pair"),
        (len, " is "),
    ],
)
def test_other_values_are_named(state, name):
    with pytest.raises(TypeError, match=f"the state must hold arrays and plain values .*; {name}"):
        carried(state)
