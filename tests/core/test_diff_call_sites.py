"""Which lines made an argument of a call: variables and functions of the user's are followed."""

from __future__ import annotations

import sys
from typing import Any

from stablenum.diagnosis.diff.sides.call_sites import CallSite, argument_site


class Chain:
    """Stands for a library's optimizer, which is made of others."""

    def __init__(self, *parts: object) -> None:
        self.parts = parts


def scale(rate: float) -> object:
    return rate


def clip(norm: float) -> object:
    return norm


def descent(rate: float) -> object:
    return Chain(scale(rate))


def made_by(*, optimizer: object) -> CallSite:
    site = argument_site(sys._getframe(1), "optimizer")
    assert site is not None
    return site


def make_optimizer() -> Any:
    clipping = clip(1.0)  # the clipping
    return Chain(  # the whole
        clipping,
        descent(0.1),  # the descent
    )


def make_by_name() -> Any:
    chosen = Chain()  # chosen here
    chosen.parts = (1,)
    return chosen


def make_with_schedule() -> tuple[Any, object]:
    chosen = Chain(scale(0.1))  # the first of two
    return chosen, object()


def test_one_of_several_variables_leads_to_its_part() -> None:
    chosen, _ = make_with_schedule()
    assert made_by(optimizer=chosen).place.code.endswith("# the first of two")
    other, kept = object(), Chain()
    assert made_by(optimizer=kept).place.code == "other, kept = object(), Chain()"
    assert other is not kept


def test_a_variable_leads_to_its_last_assignment() -> None:
    chosen = object()
    assert made_by(
        optimizer=chosen,
    ).place.code == "chosen = object()"  # fmt: skip


def test_without_a_variable_it_is_the_argument_itself() -> None:
    direct = made_by(optimizer=object())
    assert direct.place.code.startswith("direct = made_by(")


def test_an_assignment_in_another_function_does_not_count() -> None:
    def other() -> list[object]:
        outside = [1.0]
        outside.append(2.0)
        return [*outside]

    site = made_by(optimizer=outside)
    assert other()
    assert site.place.code == "outside = object()"


outside = object()


def test_a_function_of_the_users_leads_to_what_it_returns() -> None:
    assert made_by(optimizer=make_optimizer()).place.code.endswith("# the whole")
    made = make_by_name()
    assert made_by(optimizer=made).place.code.endswith("# chosen here")


def test_the_parts_stand_in_lines_of_their_own() -> None:
    site = made_by(optimizer=make_optimizer())
    assert site.line_of("optax.clip").code.endswith("# the clipping")
    assert site.line_of("optax.descent").code.endswith("# the descent")
    assert site.line_of("optax.scale").code.endswith("# the descent")  # which calls it
    assert site.line_of("optax.trace") == site.place


def test_two_calls_in_one_line_are_told_apart() -> None:
    sites = made_by(optimizer=[1.0]), made_by(optimizer=make_by_name())
    assert sites[0].place.code.startswith("sites = ")
    assert sites[1].place.code.endswith("# chosen here")
