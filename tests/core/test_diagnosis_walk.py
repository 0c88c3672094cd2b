"""The search from a bad result back to its first cause, on small hand-written programs."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stablenum.diagnosis.replay.findings import finding_of
from stablenum.diagnosis.replay.trace import Trace, Value
from stablenum.diagnosis.replay.values import Place
from stablenum.diagnosis.replay.walk import first_causes, is_healed, is_selected

FINE, NAN, INF, NEGINF = (
    (False, False, False),
    (True, False, False),
    (False, True, False),
    (False, False, True),
)


def program(*lines: tuple[str, str, tuple[bool, bool, bool]], **outside: object) -> tuple[Trace, dict]:
    """A program of ``("y", "log x", FLAGS)`` lines; ``outside`` has roles and flags of the other values."""
    trace, known = Trace(), {}
    for name, (role, flags) in outside.items():
        known[name] = trace.add_value(flags=flags, role=role, name=name)
    for name, what, flags in lines:
        operation, *inputs = what.split()
        scalars = [float(i) for i in inputs if i in ("-inf", "inf", "0")]
        read = [known[i] for i in inputs if i in known]
        known[name] = trace.add_value(flags=flags)
        trace.add_step(operation, inputs=read, outputs=[known[name]], scalars=scalars)
    return trace, known


def operations(trace: Trace, *bad: int) -> list[str]:
    return [o.step.operation if o.step else o.value.name for o in first_causes(trace, bad)]


def test_a_computed_infinity_is_the_cause_of_the_nan_it_becomes() -> None:
    trace, v = program(
        ("e", "exp x", INF), ("s", "sum e", INF), ("p", "div e s", NAN), ("loss", "mean p", NAN),
        x=("input", FINE),
    )  # fmt: skip
    assert operations(trace, v["loss"]) == ["exp"]


def test_a_placed_infinity_is_not_the_cause() -> None:
    trace, v = program(
        ("m", "masked_fill x -inf", NEGINF), ("p", "softmax m", NAN), ("loss", "mean p", NAN),
        x=("input", FINE),
    )  # fmt: skip
    (origin,) = first_causes(trace, [v["loss"]])
    assert origin.step is not None
    assert (origin.step.operation, origin.placed, origin.kind) == ("softmax", True, "nan")


@pytest.mark.parametrize("role", ["constant", "input"])
def test_an_infinity_added_as_a_bias_is_not_the_cause(role: str) -> None:
    trace, v = program(
        ("m", "add x bias", NEGINF), ("p", "softmax m", NAN), x=("input", FINE), bias=(role, NEGINF)
    )
    assert operations(trace, v["p"]) == ["softmax"]


def test_an_infinity_under_a_mask_is_still_followed() -> None:
    trace, v = program(
        ("q", "matmul x", INF), ("m", "masked_fill q -inf", (False, True, True)), ("p", "softmax m", NAN),
        x=("input", FINE),
    )  # fmt: skip
    assert operations(trace, v["p"]) == ["matmul"]


def test_bad_data_is_named_by_its_role() -> None:
    trace, v = program(
        ("h", "matmul x w", NAN), ("loss", "mean h", NAN), x=("input", NAN), w=("parameter", FINE)
    )
    assert operations(trace, v["loss"]) == ["x"]
    trace, v = program(("h", "sub x x", NAN), x=("input", INF))
    assert operations(trace, v["h"]) == ["x"]


def test_an_infinity_without_effect_is_ignored() -> None:
    trace, v = program(
        ("m", "masked_fill x -inf", NEGINF), ("p", "softmax m", FINE), ("r", "sqrt p", FINE),
        ("g", "mul r", NAN), x=("input", FINE),
    )  # fmt: skip
    assert operations(trace, v["g"]) == ["mul"]


def test_two_causes_come_in_the_order_of_execution_and_once() -> None:
    trace, v = program(
        ("a", "log x", NEGINF), ("b", "div x", INF), ("c", "add a b", NAN), ("d", "mul c a", NAN),
        x=("input", FINE),
    )  # fmt: skip
    assert operations(trace, v["d"], v["c"]) == ["log", "div"]


def test_an_infinite_loss_from_a_masked_target_is_attributed_to_the_mask() -> None:
    trace, v = program(
        ("m", "masked_fill x -inf", NEGINF), ("n", "neg m", INF), ("loss", "gather n", INF),
        x=("input", FINE),
    )  # fmt: skip
    (origin,) = first_causes(trace, [v["loss"]])
    assert origin.placed
    assert finding_of(trace, origin).operation == "masked_fill"


def test_a_fully_masked_row_is_attributed_to_the_logsumexp() -> None:
    trace, at = program(
        ("s", "where x -inf", NEGINF), ("z", "logsumexp s", NEGINF), ("loss", "neg z", INF), x=("input", FINE)
    )
    (origin,) = first_causes(trace, [at["loss"]])
    assert (origin.step.operation, origin.placed) == ("logsumexp", True)


def test_a_function_that_returns_a_new_infinity_is_named() -> None:
    trace, at = program(("z", "slogdet x -inf", NEGINF), ("loss", "neg z", INF), x=("input", FINE))
    (origin,) = first_causes(trace, [at["loss"]])
    assert (origin.step.operation, origin.placed) == ("slogdet", False)


@pytest.mark.parametrize(("fill", "first"), [("0", ["log", "sqrt"]), ("-inf", ["sqrt"])])
def test_an_infinity_next_to_a_nan_is_followed_unless_it_was_placed(fill: str, first: list[str]) -> None:
    trace, at = program(
        ("a", "log x" if fill == "0" else "where x -inf", NEGINF),
        ("b", "sqrt x", NAN),
        ("both", "stack a b", (True, False, True)),
        x=("input", FINE),
    )
    assert operations(trace, at["both"]) == first


def test_a_logsumexp_that_passes_on_an_overflow_is_not_named() -> None:
    trace, at = program(
        ("y", "mul x", INF), ("m", "neg y", NEGINF), ("z", "logsumexp m", NEGINF), x=("input", FINE)
    )
    assert operations(trace, at["z"]) == ["mul"]


def test_what_is_selected_is_found_through_a_few_steps_forward_only() -> None:
    trace, _ = program(
        ("a", "sqrt x", FINE), ("b", "mul a", FINE), ("c", "where b", FINE), ("d", "sqrt c", FINE),
        x=("input", FINE),
    )  # fmt: skip
    first, last = trace.steps[0], trace.steps[3]
    assert is_selected(trace, first)
    assert not is_selected(trace, first, within=1)
    assert not is_selected(trace, last)
    trace.steps[2].phase = "backward"
    assert not is_selected(trace, first)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.sampled_from("fni")), max_size=25))
def test_every_bad_value_has_an_origin_that_explains_it(lines: list[tuple[int, int, str]]) -> None:
    """For any program: the search ends, and no origin has an input as bad as its output."""
    trace = Trace()
    trace.add_value(role="input", name="x")
    for a, b, kind in lines:
        inputs = {a % len(trace.values), b % len(trace.values)}
        out = trace.add_value(flags={"f": FINE, "n": NAN, "i": INF}[kind])
        trace.add_step("mul", inputs=sorted(inputs), outputs=[out])
    bad = [v.id for v in trace.values if not v.finite]
    origins = first_causes(trace, bad)
    assert bool(origins) == bool(bad)
    assert all(a.order <= b.order for a, b in itertools.pairwise(origins))
    for origin in origins:
        assert origin.step is not None
        read = trace.inputs_of(origin.step)
        assert all(v.finite for v in read) or (origin.kind == "nan" and not any(v.nan for v in read))


def test_zero_times_a_plain_infinity_is_placed() -> None:
    trace, v = program(("bias", "mul mask -inf", NAN), ("loss", "sum bias", NAN), mask=("input", FINE))
    (origin,) = first_causes(trace, [v["loss"]])
    assert origin.step is not None
    assert (origin.step.operation, origin.placed) == ("mul", True)


def test_an_infinite_constant_that_multiplies_is_no_mask() -> None:
    trace, v = program(
        ("wide", "broadcast scale", INF), ("y", "mul x wide", INF), ("loss", "sum y", INF),
        x=("input", FINE), scale=("constant", INF),
    )  # fmt: skip
    (origin,) = first_causes(trace, [v["loss"]])
    assert origin.step is not None
    assert (origin.step.operation, origin.placed) == ("mul", False)
    assert finding_of(trace, origin).constant == "inf"


def test_an_infinite_constant_is_found_behind_the_derivatives_that_it_multiplies() -> None:
    trace = Trace()
    x, scale = trace.add_value(role="input"), trace.add_value(role="constant", flags=INF)
    loss, scaled, cotangent, gradient = (trace.add_value(flags=flags) for flags in (FINE, INF, INF, NAN))
    trace.add_step("log_softmax", inputs=[x], outputs=[loss])
    forward = trace.add_step("mul", inputs=[loss, scale], outputs=[scaled])
    trace.add_step("mul", inputs=[scale], outputs=[cotangent], phase="backward", forward=1)
    trace.add_step("log_softmax", inputs=[cotangent], outputs=[gradient], phase="backward", forward=0)
    assert [o.step for o in first_causes(trace, [gradient])] == [forward]


@pytest.mark.parametrize(
    ("line", "flags"),
    [("where m x big", INF), ("add x bias", INF), ("minimum x big", INF), ("sub x inf", NEGINF)],
)
def test_an_infinity_that_selects_or_biases_is_still_a_mask(
    line: str, flags: tuple[bool, bool, bool]
) -> None:
    trace, v = program(
        ("y", line, flags), ("loss", "sum y", flags), x=("input", FINE), m=("input", FINE),
        big=("constant", INF), bias=("constant", (False, True, False)),
    )  # fmt: skip
    assert all(o.placed for o in first_causes(trace, [v["loss"]]))


def test_a_constant_nan_is_attributed_to_the_function_that_returns_it() -> None:
    trace, v = program(
        ("spread", "broadcast none", NAN), ("s", "std x spread", NAN), ("loss", "sum s", NAN),
        none=("constant", NAN), x=("input", FINE),
    )  # fmt: skip
    assert operations(trace, v["loss"]) == ["std"]
    trace, v = program(("y", "mul x none", NAN), none=("constant", NAN), x=("input", FINE))
    assert operations(trace, v["y"]) == ["mul"]


@pytest.mark.parametrize(("arrives", "trapped"), [(INF, False), (NAN, True)])
def test_a_trap_needs_a_gradient_of_zero(arrives: tuple[bool, bool, bool], trapped: bool) -> None:
    trace = Trace()
    x, root, kept, grad = (trace.add_value() for _ in range(4))
    slope, out = trace.add_value(flags=INF), trace.add_value(flags=arrives)
    trace.add_step("sqrt", inputs=[x], outputs=[root])
    trace.add_step("where", inputs=[root], outputs=[kept])
    trace.add_step("where", inputs=[kept], outputs=[grad], phase="backward", forward=1)
    trace.add_step("sqrt", inputs=[root], outputs=[slope], phase="backward", forward=0)
    trace.add_step("sqrt", inputs=[grad, slope], outputs=[out], phase="backward", forward=0)
    (origin,) = first_causes(trace, [out])
    assert origin.step is not None
    assert (origin.step.index, finding_of(trace, origin).selected) == (3, trapped)


@pytest.mark.parametrize(("made", "first"), [("masked_fill x -inf", "sub"), ("exp x", "exp")])
def test_an_infinity_is_followed_through_the_parts_of_a_function(made: str, first: str) -> None:
    """A logsumexp of -inf alone is exp, sum and log(0): the mask is the cause, not the logarithm."""
    trace, v = program(
        ("m", made, NEGINF), ("e", "logsumexp m", FINE), ("b", "broadcast e", FINE),
        ("s", "logsumexp b", NEGINF), ("y", "sub m s", NAN),
        x=("input", FINE),
    )  # fmt: skip
    assert operations(trace, v["y"]) == [first]


def test_a_value_is_finite_until_flags_say_otherwise() -> None:
    value = Value(id=0)
    assert value.finite
    value.neginf = True
    assert (value.inf, value.finite) == (True, False)


@pytest.mark.parametrize("left", [True, False])
def test_a_selection_heals_if_nothing_bad_is_left_after_it(left: bool) -> None:
    t = Trace()
    x, mask = t.add_value(role="input"), t.add_value(role="constant")
    inf = t.add_value(flags=(False, True, False))
    chosen = t.add_value(flags=(False, left, False))
    step = t.add_step("exp", inputs=[x], outputs=[inf])
    t.add_step("where", inputs=[mask, inf], outputs=[chosen])
    assert is_selected(t, step)
    assert is_healed(t, step) is not left


@pytest.mark.parametrize("computed", [True, False])
def test_bad_data_is_placed_where_something_is_computed_from_it(computed: bool) -> None:
    t = Trace()
    x = t.add_value(role="input", flags=(True, False, False))
    batch, loss = (t.add_value(flags=(True, False, False)) for _ in range(2))
    t.add_step("stack", inputs=[x], outputs=[batch], place=Place("loader.py", 3, "f", "stack(x)"))
    t.add_step("isnan", inputs=[batch], outputs=[t.add_value()], place=Place("model.py", 5, "f", "isnan(x)"))
    if computed:
        t.add_step("sub", inputs=[batch], outputs=[loss], place=Place("model.py", 7, "f", "x - y"))
    (origin,) = first_causes(t, [loss if computed else batch])
    place = finding_of(t, origin).place
    assert place is not None
    assert place.line == (7 if computed else 3)
