"""Which way a parameter lies, and which of several of one size it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from stablenum.diagnosis.diff.weights.axis_roles import apart
from stablenum.diagnosis.diff.weights.neighbours import exchanged, neighbours_of
from stablenum.diagnosis.diff.weights.orientation import in_convention, oriented
from stablenum.diagnosis.diff.weights.origins import Cut, Joined, Origin, Piece
from stablenum.diagnosis.diff.weights.parameter_uses import Use, words_of
from stablenum.diagnosis.diff.weights.weights import guessed
from stablenum.diagnosis.replay.trace import Trace

SUMMED, KEPT = frozenset({"summed"}), frozenset({"kept"})
ROW, COLUMN = (KEPT, SUMMED), (SUMMED, KEPT)


def use(name: str, shape: tuple[int, ...], kind: str, at: int) -> Use:
    return Use(name, shape, kind, (at,), (at,), (at, 0), words_of(name), Piece(name))


def square(name: str, *cuts: Cut, size: int = 4) -> Origin:
    return Origin(Piece(name, cuts), (size, size), (1, 0), ((0, 1),))


@pytest.mark.parametrize(("left", "right", "way"), [(ROW, COLUMN, (1, 0)), (ROW, ROW, (0, 1))])
def test_both_sides_sum_over_the_same_axis(left: Any, right: Any, way: tuple[int, ...]) -> None:
    found = oriented({"b": square("a")}, {"a": left}, {"b": right}, {"a": (4, 4)})["b"]
    assert found.ways == (way,)


def test_what_is_not_known_keeps_all_ways() -> None:
    for left, right in (((), COLUMN), (ROW, ()), ((KEPT, KEPT), COLUMN)):
        found = oriented({"b": square("a")}, {"a": left}, {"b": right}, {"a": (4, 4)})["b"]
        assert found == square("a")


def test_an_axis_that_is_split_into_heads_keeps_its_role() -> None:
    shapes = ((4, 4), (4, 2, 2))
    assert apart(ROW, (SUMMED, KEPT, KEPT), (1, 0), shapes) == (0, 0)
    assert apart(ROW, (SUMMED, KEPT, KEPT), (0, 1), shapes) == (2, 2)


def test_the_axes_of_a_window_tell_kernels_of_one_size() -> None:
    roles = {r: frozenset({r}) for r in ("kept", "summed", "window 0", "window 1")}
    left, right = tuple(roles.values()), tuple(roles[r] for r in ("window 0", "window 1", "summed", "kept"))
    assert apart(left, right, (2, 3, 1, 0), ((3,) * 4, (3,) * 4)) == (0, 0)
    assert apart(left, right, (3, 2, 1, 0), ((3,) * 4, (3,) * 4)) == (0, 2)
    assert apart(left, right, (2, 3, 0, 1), ((3,) * 4, (3,) * 4)) == (2, 2)


def test_the_parts_of_a_stack_are_laid_out_without_its_first_axis() -> None:
    stack = Joined((square("a"), square("b")), (2, 4, 4), 0)
    found = oriented(
        {"w": stack}, {"a": ROW, "b": COLUMN}, {"w": (KEPT, *COLUMN)}, {"a": (4, 4), "b": (4, 4)}
    )["w"]
    assert isinstance(found, Joined)
    assert [part.ways for part in found.parts] == [((1, 0),), ((0, 1),)]


def test_a_layer_of_a_stack_is_laid_out_without_its_first_axis() -> None:
    layer = square("w", Cut(1, 2, 0, 1, 3, layer=True))
    found = oriented({"b": layer}, {"w": (KEPT, *ROW)}, {"b": ROW}, {"w": (3, 4, 4)})["b"]
    assert found.ways == ((0, 1),)


@pytest.mark.parametrize("others", [1, 2])
def test_a_square_matrix_that_a_port_alone_turns_lies_as_the_others(others: int) -> None:
    names = ["odd", *(f"w{i}" for i in range(others))]
    laid = {n: replace(square(n), axes=(1, 0), others=()) for n in names}
    left, shapes = dict.fromkeys(names, COLUMN), dict.fromkeys(names, (4, 4))
    right = {n: ROW if n == "odd" else COLUMN for n in names}
    found = in_convention(laid, left, right, shapes)
    assert {n for n in names if found[n] != laid[n]} == {"odd"}
    assert found["odd"].ways == ((0, 1),)
    assert in_convention(laid, left, dict.fromkeys(names, ROW), shapes) == laid


def two_branches(order: str) -> Trace:
    """Two gains, each of which multiplies the argument before a matrix of its own."""
    trace = Trace()
    x = trace.add_value(role="input")
    given = {
        n: trace.add_value(role="parameter", name=n) for b in order for n in (f"gain {b}", f"matrix {b}")
    }
    for branch in order:
        scaled = trace.add_value()
        trace.add_step("mul", inputs=[x, given[f"gain {branch}"]], outputs=[scaled])
        made = trace.add_value()
        trace.add_step("matmul", inputs=[scaled, given[f"matrix {branch}"]], outputs=[made])
    return trace


def uses_of_branches(order: str, sizes: dict[str, int]) -> list[Use]:
    made = [
        (use(f"gain {b}", (4,), "mul", 2 * i), use(f"matrix {b}", (4, sizes[b]), "matmul", 2 * i + 1))
        for i, b in enumerate(order)
    ]
    return [u for pair in made for u in pair]


def test_gains_of_one_size_are_told_by_the_matrix_after_them() -> None:
    left = uses_of_branches("ab", {"a": 3, "b": 5})
    right = uses_of_branches("cd", {"c": 5, "d": 3})
    before = neighbours_of(two_branches("ab")), neighbours_of(two_branches("cd"))
    assert before[0]["matrix a"] == {"gain a"}
    plain = guessed(left, right)
    revised = guessed(left, right, revised=lambda origins: exchanged(origins, left, right, before))
    arrays = {u.name: np.full(u.shape, float(i)) for i, u in enumerate(left)}
    assert (plain.of(arrays)["gain c"] == arrays["gain a"]).all(), "the order alone misleads"
    for theirs, mine in (("c", "b"), ("d", "a")):
        assert (revised.of(arrays)[f"gain {theirs}"] == arrays[f"gain {mine}"]).all()
        assert revised.origins[f"matrix {theirs}"].names == (f"matrix {mine}",)


def test_kernels_that_are_used_in_another_order_are_not_put_together_from_parts() -> None:
    left = [use("side", (8, 3, 1, 1), "conv", 0), use("main", (8, 3, 3, 3), "conv", 1)]
    right = [use("first", (3, 3, 3, 8), "conv", 0), use("second", (1, 1, 3, 8), "conv", 1)]
    found = guessed(left, right).origins
    assert str(found["first"]) == "main, axes (2, 3, 1, 0)"
    assert str(found["second"]) == "side, axes (2, 3, 1, 0)"


def test_two_equal_networks_are_not_mixed() -> None:
    """Nothing tells one from the other, but each layer follows the one before it."""
    layers = ("x0", "x1", "x2", "y0", "y1", "y2")
    uses = [use(n, (4, 4), "matmul", i) for i, n in enumerate(layers)]
    before = {n: frozenset({f"{n[0]}{int(n[1]) - 1}"} if n[1] != "0" else ()) for n in layers}
    mixed = {"x0": "x0", "y0": "y0", "x1": "y1", "y1": "x1", "x2": "y2", "y2": "x2"}
    origins = {name: square(source) for name, source in mixed.items()}
    found = exchanged(origins, uses, uses, (before, before))
    assert {name: origin.names[0] for name, origin in found.items()} == {n: n for n in layers}
