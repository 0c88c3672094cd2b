"""The parts of ``stablenum diff`` that need no framework."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stablenum.diagnosis.diff.causes.by_update import cause_of_updates
from stablenum.diagnosis.diff.causes.formulas.variants import variants_of
from stablenum.diagnosis.diff.causes.remedies import REMEDIES
from stablenum.diagnosis.diff.places.arrangement import laid_apart, same_arrangement
from stablenum.diagnosis.diff.places.results import Update
from stablenum.diagnosis.diff.sides.exact_constants import exact_constant, exact_constants
from stablenum.diagnosis.diff.sides.fingerprints import distance, fingerprint
from stablenum.diagnosis.diff.weights.layouts import layouts

RNG = np.random.default_rng(7)


# --- fingerprints ------------------------------------------------------------------------------------------


@given(st.permutations([0, 1, 2]), st.integers(0, 2**32 - 1))
def test_a_fingerprint_does_not_depend_on_the_layout(axes: list[int], seed: int) -> None:
    x = np.random.default_rng(seed).normal(size=(3, 4, 5))
    assert distance(fingerprint(x), fingerprint(x.transpose(axes).reshape(-1))) < 1e-13


def test_a_fingerprint_sees_one_entry_that_changes() -> None:
    x = RNG.normal(size=(8, 8))
    y = x.copy()
    y[3, 3] += 1e-6
    assert distance(fingerprint(x), fingerprint(y)) > 1e-9


def test_padding_and_masks_leave_a_fingerprint_as_it_is() -> None:
    x = RNG.normal(size=(4, 4))
    padded = np.pad(x, 2)
    filled = [np.where(np.eye(4, dtype=bool), fill, x) for fill in (-np.inf, -1e9, np.finfo(np.float32).min)]
    assert distance(fingerprint(x), fingerprint(padded)) == pytest.approx(0, abs=1e-14)
    assert max(distance(fingerprint(filled[0]), fingerprint(f)) for f in filled) < 1e-14


def test_the_rounding_error_of_a_zero_changes_no_fingerprint() -> None:
    x = np.asarray([0.0, 0.5, -0.25])
    assert distance(fingerprint(x), fingerprint(x + 1e-13)) < 1e-12


def test_a_nan_is_never_equal_to_a_number() -> None:
    assert distance(fingerprint([1.0, np.nan]), fingerprint([1.0])) == math.inf


def test_copies_of_a_round_number_tell_nothing() -> None:
    assert fingerprint(np.ones(5)).simple
    assert fingerprint(np.zeros(5)).simple
    assert fingerprint(np.full(5, 1 / 7)).simple
    assert not fingerprint(np.full(5, 0.123456789)).simple
    for n in (100, 8192, 8193, 100_000):  # sums of many copies are rounded more
        for round_number in (0.1, 1 / 3, 0.9, -7.0):
            assert fingerprint(np.full(n, round_number)).simple, (n, round_number)


# --- constants ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "number",
    [
        1e-5,
        0.1,
        0.999,
        3e-4,
        math.sqrt(2 / math.pi),
        1 / math.sqrt(2),
        1 / 7,
        math.log(2),
        8**-0.5,
        0.044715,
        0.5 * 17 * math.log(2 * math.pi),
        1.5 * math.pi,
        math.pi / 5,
        2 * math.pi / 360,
    ],
)
def test_the_number_that_was_written_is_restored(number: float) -> None:
    assert exact_constant(float(np.float32(number))) == pytest.approx(number, rel=1e-15)


def test_a_number_that_no_one_writes_stays_as_it_is() -> None:
    odd = float(np.float32(0.837192643))
    assert exact_constant(odd) == odd
    assert math.isnan(exact_constant(math.nan))
    assert exact_constant(math.inf) == math.inf


def test_small_arrays_are_constants_and_large_ones_are_data() -> None:
    small, large = np.asarray([[0.1, 1.2]], np.float32), np.full(17, 0.1, np.float32)
    assert exact_constants(small).tolist() == [[0.1, 1.2]]
    assert exact_constants(large).tolist() == large.astype(np.float64).tolist()


def test_of_a_buffer_all_numbers_are_restored_or_none() -> None:
    table = np.linspace(0, 5, 8, dtype=np.float32)
    measured = np.asarray([0.1, 0.837192643, 0.5], np.float32)
    assert exact_constants(table, whole=True) == pytest.approx(np.arange(8) * 5 / 7, rel=1e-15)
    assert exact_constants(measured, whole=True).tolist() == measured.astype(np.float64).tolist()


# --- layouts -----------------------------------------------------------------------------------------------


def test_layouts_know_what_frameworks_do() -> None:
    assert layouts((8, 3, 5, 5), (5, 5, 3, 8), "conv")[0] == (2, 3, 1, 0)
    assert layouts((16, 4), (4, 2, 8), "matmul") == ((1, 0),)
    assert layouts((4, 4), (4, 4), "matmul")[0] == (1, 0)
    assert layouts((4, 4), (4, 4), "gather")[0] == (0, 1)
    assert layouts((6,), (4,), "add") == ()


def test_another_order_of_heads_is_another_arrangement() -> None:
    x = RNG.normal(size=(2, 5, 12))
    heads = x.reshape(2, 5, 3, 4)
    assert same_arrangement(heads.transpose(0, 2, 1, 3), heads)
    assert not same_arrangement(heads, x.reshape(2, 5, 4, 3))
    assert not same_arrangement(x, np.roll(x, 1, axis=-1)), "the slices come in another order"


def test_an_operand_that_lies_otherwise_than_the_others_is_told() -> None:
    scores, kept = RNG.normal(size=(2, 5, 5)), np.tril(np.ones((5, 5), bool))
    shapes = scores.shape, scores.shape
    turned = scores.transpose(0, 2, 1)
    assert laid_apart([(kept, ~kept), (scores, scores)], shapes) is None
    assert laid_apart([(kept, kept), (scores, turned)], shapes) == 1
    assert laid_apart([(kept, kept.T), (scores, turned)], shapes) is None, "both are transposed"
    assert laid_apart([(kept, np.tril(kept, -1)), (scores, scores)], shapes) is None, "another mask"
    assert laid_apart([(scores, scores), (scores[0], np.roll(scores[0], 1, 0))], shapes) == 1
    assert laid_apart([(scores, scores[:1])], (shapes[0], (1, 5, 5))) is None


# --- causes ------------------------------------------------------------------------------------------------


def test_variants_agree_with_plain_python() -> None:
    x = RNG.normal(size=(3, 4)) * 2
    made = {(v.family, v.setting): v.values for v in variants_of(x)}
    point = float(x[1, 2])
    erf = 0.5 * point * (1 + math.erf(point / math.sqrt(2)))
    tanh = 0.5 * point * (1 + math.tanh(math.sqrt(2 / math.pi) * (point + 0.044715 * point**3)))
    assert made["gelu", (("by", "erf"),)][1, 2] == pytest.approx(erf, rel=1e-14)
    assert made["gelu", (("by", "tanh"),)][1, 2] == pytest.approx(tanh, rel=1e-14)
    row = [math.exp(v) for v in x[1]]
    assert made["softmax", (("axis", 1),)][1, 2] == pytest.approx(row[2] / sum(row), rel=1e-14)
    mean = sum(x[1]) / 4
    spread = sum((v - mean) ** 2 for v in x[1]) / 4
    told = (("epsilon", 1e-5), ("correction", 0), ("axis", 1), ("placed", "inside"))
    expected = (x[1, 2] - mean) / math.sqrt(spread + 1e-5)
    assert made["layer_norm", told][1, 2] == pytest.approx(expected, rel=1e-13)


def updates(change: Any, other: Any) -> list[Update]:
    found = []
    for shape in ((5, 4), (4,), (6, 5)):
        p, g = RNG.normal(size=shape), RNG.normal(size=shape)
        found.append(Update(p, g, change(p, g), other(p, g)))
    return found


def code_of(change: Any, other: Any, *names: str) -> str | None:
    found = cause_of_updates(updates(change, other), names)
    return None if found is None else found[0]


def sgd(p: Any, g: Any) -> Any:
    return -0.1 * g


def adam(p: Any, g: Any) -> Any:
    return -0.1 * g / (np.abs(g) + 1e-3)


@pytest.mark.parametrize(
    ("change", "names", "code"),
    [
        (lambda p, g: sgd(p, g) - 0.01 * p, (), "decay_coupling"),
        (lambda p, g: sgd(p, g) - 0.01 * p * (p.ndim == 1), (), "decay_excluded"),
        (lambda p, g: 1024 * sgd(p, g), (), "loss_scale_left_in"),
        (lambda p, g: 0.9 * sgd(p, g), (), "scale"),
        (lambda p, g: 0.9 * sgd(p, g), ("clip",), "clip_missing"),
        (lambda p, g: sgd(p, g) * (1 - 1e-6), ("clip",), "clip_epsilon"),
        (lambda p, g: sgd(p, g) / np.linalg.norm(g), ("clip",), "clip_per_tensor"),
        (lambda p, g: sgd(p, g) * RNG.normal(size=p.shape), (), None),
    ],
)
def test_what_updates_differ_by_names_the_cause(
    change: Any, names: tuple[str, ...], code: str | None
) -> None:
    assert code_of(change, sgd, *names) == code


@pytest.mark.parametrize("side", ["left", "right"])
def test_entries_that_one_side_clips_by_value_are_named(side: str) -> None:
    def clipped(p: Any, g: Any) -> Any:
        return -0.1 * (np.clip(g, -0.4, 0.4) + 0.05 * p)

    def plain(p: Any, g: Any) -> Any:
        return -0.1 * (g + 0.05 * p)

    given = updates(*((clipped, plain) if side == "left" else (plain, clipped)))
    found = cause_of_updates(given, ("clamp",), ([0.05, 0.4, 0.1], [0.05, 0.1]))
    assert found is not None
    assert found[:2] == ("clip_missing", f"only the {side} side clips each entry of the gradients, to 0.4.")
    assert cause_of_updates(given, (), ([0.05, 0.4, 0.1], [0.05, 0.1])) is None


def test_a_number_far_below_all_gradients_is_not_taken_for_a_limit_of_each_entry() -> None:
    given = updates(lambda p, g: -0.1 * g * (1 - 1e-6), lambda p, g: -0.1 * g)
    found = cause_of_updates(given, ("clamp",), ([1e-12, 0.1], [0.1]))
    assert found is not None
    assert found[0] == "clip_epsilon"


def test_parameters_that_are_zero_show_no_decay_on_either_side() -> None:
    rates = (0.01, 0.0001)
    found = []
    for shape, zero in (((5, 4), False), ((4,), True), ((6, 5), False)):
        p, g = RNG.normal(size=shape) * (not zero), RNG.normal(size=shape)
        found.append(Update(p, g, *(sgd(p, g) - rate * p for rate in rates)))
    cause = cause_of_updates(found, ())
    assert cause is not None
    assert cause[0] == "decay_coupling"


@pytest.mark.parametrize("law", [True, False])
def test_parameters_that_one_side_decays_are_not_said_to_be_decayed_by_the_other(law: bool) -> None:
    decays, found = {"reg_w": (0.02, 0.0), "w": (0.0, 0.01), "v": (0.0, 0.01), "b": (0.0, 0.0)}, []
    for name, (left, right) in decays.items():
        p, g = RNG.normal(size=(5, 4)), RNG.normal(size=(5, 4))
        step = sgd(p, g) if law else -0.1 * np.sin(40 * g)
        found.append(Update(p, g, step - left * p, step - right * p, name))
    cause = cause_of_updates(found, ())
    assert cause is not None
    assert cause[:2] == (
        "decay_excluded",
        "only the left side decays reg_w, and only the right side decays w, v."
        if law
        else "the left side takes away more of reg_w, and the right side takes away more of w, v.",
    )


@pytest.mark.parametrize(("left", "right", "side"), [(0.01, 0.0, "left"), (0.0, 0.01, "right")])
def test_the_side_that_decays_more_parameters_is_named_with_three_of_them(
    left: float, right: float, side: str
) -> None:
    found = []
    for i in range(6):
        p, g = RNG.normal(size=(4, 3)), RNG.normal(size=(4, 3))
        made = (sgd(p, g) - rate * p * (i > 1) for rate in (left, right))
        found.append(Update(p, g, *made, f"layer{i}.bias"))
    cause = cause_of_updates(found, ())
    assert cause is not None
    said = (
        f"only the {side} side decays 4 of the 6 parameters, such as layer2.bias, layer3.bias, layer4.bias."
    )
    assert cause[1] == said


def test_an_epsilon_shows_where_gradients_are_small() -> None:
    assert code_of(lambda p, g: -0.1 * g / np.sqrt(g * g + 1e-6), adam) == "adam_epsilon_placement"


def test_every_cause_has_a_remedy() -> None:
    assert all(text.endswith(".") for text in REMEDIES.values())
