"""The map of the weights: which parameter of the one program corresponds to which of the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from stablenum.diagnosis.diff.sides.fingerprints import Fingerprint, fingerprint
from stablenum.diagnosis.diff.weights.origins import Piece
from stablenum.diagnosis.diff.weights.parameter_uses import Use, words_of
from stablenum.diagnosis.diff.weights.weights import UnmappedError, guessed

STATE = Fingerprint(0)  # a state that is zero at first
INPUT = fingerprint(np.arange(1.0, 7.0))


def use(name: str, shape: tuple[int, ...], kind: str, at: int, team: int | None = None, **more: Any) -> Use:
    """A parameter in its own team, or in one that is given; a bias is not of the group of the matrices."""
    team = at if team is None else team
    return Use(name, shape, kind, (at,), (team,), (team, kind), words_of(name), Piece(name), **more)


def made(left: Sequence[Use], right: Sequence[Use]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The left side's arrays, and what the map makes of them."""
    rng = np.random.default_rng(7)
    arrays = {u.name: rng.normal(size=u.shape) for u in left}
    return arrays, guessed(left, right).of(arrays)


def test_parameters_are_mapped_by_order_shape_and_name() -> None:
    left = [
        use("a.weight", (6, 4), "matmul", 0),
        use("a.bias", (6,), "add", 1),
        use("b.weight", (4, 6), "matmul", 2),
    ]
    right = [
        use("x.kernel", (4, 6), "matmul", 0),
        use("x.bias", (6,), "add", 1),
        use("y.kernel", (6, 4), "matmul", 2),
    ]
    given, found = made(left, right)
    assert np.array_equal(found["x.kernel"], given["a.weight"].T)
    assert np.array_equal(found["y.kernel"], given["b.weight"].T)
    assert np.array_equal(found["x.bias"], given["a.bias"])


def test_a_fused_projection_is_split() -> None:
    left = [use("qkv.weight", (12, 4), "matmul", 0)]
    right = [use(f"{n}.kernel", (4, 4), "matmul", i) for i, n in enumerate("qkv")]
    given, found = made(left, right)
    for i, n in enumerate("qkv"):
        assert np.array_equal(found[f"{n}.kernel"], given["qkv.weight"][4 * i : 4 * i + 4].T)


def test_a_bias_comes_from_where_its_matrix_does() -> None:
    """A kernel's bias is as long as that of a matrix that is two on the right, and is added later there."""
    left = [
        use("up.weight", (16, 16, 3, 3), "conv", 0),
        use("up.bias", (16,), "add", 1),
        use("emb.weight", (16, 8), "matmul", 2),
        use("emb.bias", (16,), "add", 3),
    ]
    right = [
        use("up.kernel", (3, 3, 16, 16), "conv", 0),
        use("scale.bias", (8,), "add", 1),
        use("shift.bias", (8,), "add", 2),
        use("scale.kernel", (8, 8), "matmul", 3),
        use("shift.kernel", (8, 8), "matmul", 4),
        use("up.bias", (16,), "add", 5),
    ]
    given, found = made(left, right)
    assert np.array_equal(found["up.bias"], given["up.bias"])
    for i, name in enumerate(("scale", "shift")):
        assert np.array_equal(found[f"{name}.kernel"], given["emb.weight"][8 * i : 8 * i + 8].T)
        assert np.array_equal(found[f"{name}.bias"], given["emb.bias"][8 * i : 8 * i + 8])


def test_parts_may_be_of_unequal_sizes() -> None:
    left = [
        use(f"{n}_proj.weight", (size, 6), "matmul", i) for i, (n, size) in enumerate(zip("qkv", (6, 3, 3)))
    ]
    given, found = made(left, [use("wqkv", (6, 12), "matmul", 0)])
    assert np.array_equal(found["wqkv"], np.concatenate([given[u.name].T for u in left], axis=1))


def test_matrices_that_multiply_one_value_are_told_apart_by_name_not_by_order() -> None:
    left = [use(f"attn.{n}_proj.weight", (4, 4), "matmul", i, team=0) for i, n in enumerate("qkv")]
    right = [use(f"attn.{n}.kernel", (4, 4), "matmul", i, team=0) for i, n in enumerate("vkq")]
    given, found = made(left, right)
    for n in "qkv":
        assert np.array_equal(found[f"attn.{n}.kernel"], given[f"attn.{n}_proj.weight"].T)


def test_matrices_that_multiply_one_value_may_be_fused_in_another_order() -> None:
    left = [
        use(f"{n}.weight", (size, 4), "matmul", i, team=0)
        for i, (n, size) in enumerate(zip("qkvu", (4, 4, 4, 8)))
    ]
    right = [use("up", (4, 8), "matmul", 0, team=0), use("qkv", (4, 12), "matmul", 1, team=0)]
    given, found = made(left, right)
    assert np.array_equal(found["up"], given["u.weight"].T)
    assert np.array_equal(found["qkv"], np.concatenate([given[f"{n}.weight"].T for n in "qkv"], axis=1))


def test_queries_may_be_computed_after_the_keys() -> None:
    left = [use("q.weight", (4, 4), "matmul", 0), use("k.weight", (4, 4), "matmul", 1, team=1)]
    left += [use("v.weight", (4, 4), "matmul", 2, team=1)]
    right = [use("kv.w", (4, 8), "matmul", 0), use("query.w", (4, 4), "matmul", 1)]
    given, found = made(left, right)
    assert np.array_equal(found["query.w"], given["q.weight"].T)
    assert np.array_equal(found["kv.w"], np.concatenate([given["k.weight"].T, given["v.weight"].T], axis=1))


def test_weights_of_the_state_are_not_those_of_an_input_of_its_width() -> None:
    left = [
        use("rnn.weight_ih", (6, 2), "matmul", 0, data=INPUT),
        use("rnn.weight_hh", (6, 2), "matmul", 1, data=STATE),
    ]
    right = [use(f"h{g}", (2, 2), "matmul", i, team=0, data=STATE) for i, g in enumerate("rzn")]
    right += [use(f"i{g}", (2, 2), "matmul", 3 + i, team=1, data=INPUT) for i, g in enumerate("rzn")]
    given, found = made(left, right)
    for i, gate in enumerate("rzn"):
        assert np.array_equal(found[f"h{gate}"], given["rnn.weight_hh"][2 * i : 2 * i + 2].T)
        assert np.array_equal(found[f"i{gate}"], given["rnn.weight_ih"][2 * i : 2 * i + 2].T)


def test_two_biases_of_a_recurrent_layer_become_one() -> None:
    left = [
        use("lstm.weight_ih", (8, 3), "matmul", 0), use("lstm.bias_ih", (8,), "add", 1),
        use("lstm.weight_hh", (8, 2), "matmul", 2), use("lstm.bias_hh", (8,), "add", 3),
    ]  # fmt: skip
    right = [use(f"cell.i{g}.kernel", (3, 2), "matmul", i) for i, g in enumerate("ifgo")]
    right += [use(f"cell.h{g}.kernel", (2, 2), "matmul", 4 + i) for i, g in enumerate("ifgo")]
    right += [use(f"cell.h{g}.bias", (2,), "add", 8 + i) for i, g in enumerate("ifgo")]
    given, found = made(left, right)
    both = given["lstm.bias_ih"] + given["lstm.bias_hh"]
    for i, gate in enumerate("ifgo"):
        assert np.allclose(found[f"cell.h{gate}.bias"], both[2 * i : 2 * i + 2])
        assert np.array_equal(found[f"cell.i{gate}.kernel"], given["lstm.weight_ih"][2 * i : 2 * i + 2].T)


def test_one_matrix_for_input_and_state_is_cut_along_both_axes() -> None:
    left = [use("lstm.joint.weight", (8, 5), "matmul", 0, columns=(3, 2))]
    right = [use(f"i{g}", (3, 2), "matmul", i, team=0) for i, g in enumerate("ifgo")]
    right += [use(f"h{g}", (2, 2), "matmul", 4 + i, team=1) for i, g in enumerate("ifgo")]
    given, found = made(left, right)
    joint = given["lstm.joint.weight"]
    for i, gate in enumerate("ifgo"):
        assert np.array_equal(found[f"i{gate}"], joint[2 * i : 2 * i + 2, :3].T)
        assert np.array_equal(found[f"h{gate}"], joint[2 * i : 2 * i + 2, 3:].T)


def test_layers_are_stacked() -> None:
    left = [use(f"layers.{i}.up.weight", (6, 4), "matmul", i) for i in range(3)]
    right = [use("layers.up", (3, 4, 6), "matmul", 0)]
    given, found = made(left, right)
    assert np.array_equal(found["layers.up"], np.stack([given[u.name].T for u in left]))


def test_the_parts_of_a_layer_are_fused_and_then_stacked() -> None:
    left = [
        use(f"layers.{i}.{n}.weight", (4, 4), "matmul", 4 * i + k, team=4 * i)
        for i in range(2)
        for k, n in enumerate("qkv")
    ]
    given, found = made(left, [use("layers.qkv", (2, 4, 12), "matmul", 0, layers=2)])
    for i in range(2):
        fused = np.concatenate([given[f"layers.{i}.{n}.weight"].T for n in "qkv"], axis=1)
        assert np.array_equal(found["layers.qkv"][i], fused)


def test_a_stack_is_taken_apart() -> None:
    left = [use("layers.up", (3, 4, 6), "matmul", 0, layers=3)]
    right = [use(f"layers.{i}.up.weight", (6, 4), "matmul", i) for i in range(3)]
    given, found = made(left, right)
    for i in range(3):
        assert np.array_equal(found[f"layers.{i}.up.weight"], given["layers.up"][i].T)


def test_a_parameter_without_a_counterpart_is_refused_by_name() -> None:
    with pytest.raises(UnmappedError, match=r"head\.kernel \[4, 9\].*left over: fc\.weight \[7, 4\]"):
        guessed([use("fc.weight", (7, 4), "matmul", 0)], [use("head.kernel", (4, 9), "matmul", 0)])


def test_a_matrix_is_not_taken_for_a_bias_of_its_size() -> None:
    left = [use("fc.weight", (3, 4), "matmul", 0), replace(use("readout.weight", (2, 6), "matmul", 1))]
    right = [use("fc.kernel", (4, 3), "matmul", 0), use("bias", (12,), "add", 1)]
    with pytest.raises(UnmappedError, match=r"bias \[12\]"):
        guessed(left, right)


def test_a_table_may_be_multiplied_on_one_side_and_subtracted_on_the_other() -> None:
    given, found = made([use("codebook.weight", (10, 4), "add", 0)], [use("table", (10, 4), "matmul", 0)])
    assert np.array_equal(found["table"], given["codebook.weight"])
