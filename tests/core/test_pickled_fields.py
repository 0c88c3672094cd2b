"""Settings and reports are pickled by the names of their fields, so that later versions load them."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field

import pytest

from stablenum._support.pickled_fields import pickled_by_name


@pickled_by_name
@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    size: int
    names: list[str] = field(default_factory=list)
    rate: float = 0.5


def loaded(state: object) -> Settings:
    made = Settings.__new__(Settings)
    made.__setstate__(state)
    return made


def test_the_fields_are_pickled_by_name():
    made = Settings(size=3, names=["a"], rate=0.1)
    assert made.__getstate__() == {"size": 3, "names": ["a"], "rate": 0.1}
    assert pickle.loads(pickle.dumps(made)) == made


def test_a_field_that_was_added_since_gets_its_default_and_one_that_is_gone_is_left_out():
    assert loaded({"size": 3, "gone": 1}) == Settings(size=3)


def test_a_field_without_a_default_must_be_there():
    with pytest.raises(pickle.UnpicklingError, match="a Settings must have the field 'size'; it has 'rate'"):
        loaded({"rate": 0.1})
