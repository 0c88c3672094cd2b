"""How ``stablenum diff`` names causes from values and updates, against torch and plain formulas."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from stablenum.diagnosis.diff.causes.by_update import cause_of_updates, epsilon_like
from stablenum.diagnosis.diff.causes.by_value import Values, factor_of, reason_of
from stablenum.diagnosis.diff.causes.formulas.update_laws import Law, law_of
from stablenum.diagnosis.diff.causes.formulas.window_variants import (
    convolutions_of,
    pools_of,
    resizes_of,
    transposed_convolutions_of,
)
from stablenum.diagnosis.diff.places.results import Update

RNG = np.random.default_rng(0)


# --- values ------------------------------------------------------------------------------------------------


def code(mine: Any, theirs: Any, *read: Any, names: tuple[str, ...] = (), **moved: bool) -> str | None:
    found = reason_of(Values(mine, theirs, read, names, **moved))
    return None if found is None else found.code


SCORES = RNG.normal(size=(2, 5, 5))
FUTURE = np.triu(np.ones((5, 5), bool), 1)


def test_a_mask_that_one_side_lacks() -> None:
    assert code(np.where(FUTURE, -np.inf, SCORES), SCORES) == "mask_missing"


def test_a_mask_that_is_shifted_by_one() -> None:
    strict = np.triu(np.ones((5, 5), bool), 2)
    assert code(np.where(FUTURE, -1e9, SCORES), np.where(strict, -np.inf, SCORES)) == "mask_shifted"


def test_a_mask_that_is_added_as_zeros_and_ones() -> None:
    assert code(np.where(FUTURE, -np.inf, SCORES), SCORES + ~FUTURE, SCORES) == "mask_added"


def test_equal_masks_of_other_values_are_no_difference() -> None:
    assert code(np.where(FUTURE, -np.inf, SCORES), np.where(FUTURE, -1e9, SCORES)) is None


def test_labels_that_only_one_loss_leaves_out() -> None:
    losses = RNG.uniform(1, 2, size=12)
    kept = np.arange(12) % 3 > 0
    assert code(losses * kept, losses, names=("cross_entropy",)) == "ignored_labels"


def test_a_factor() -> None:
    assert code(SCORES * 0.25, SCORES) == "scale"
    assert factor_of(SCORES * 0.25, SCORES) == pytest.approx(0.25, rel=1e-12)
    assert factor_of(SCORES + 1e-3, SCORES) is None


def test_dropped_units_that_are_not_rescaled() -> None:
    kept = np.arange(50).reshape(2, 5, 5) % 4 > 0
    assert code(SCORES * kept / 0.75, SCORES * kept, names=("where", "bernoulli")) == "dropout"
    assert code(SCORES * kept / 0.75, SCORES * kept, names=("where",)) == "scale"  # as of a mask


def test_means_over_other_numbers_of_entries() -> None:
    total, valid = RNG.normal(size=(3, 4)), np.array([[7.0], [5.0], [4.0]])
    assert code(total / valid, total / 7) == "reduction"


def test_rotations_of_neighbours_and_of_halves() -> None:
    x, angle = RNG.normal(size=(3, 8)), RNG.normal(size=(3, 4))
    c, s = np.cos(angle), np.sin(angle)
    a, b = x[:, :4], x[:, 4:]
    halves = np.concatenate([a * c - b * s, b * c + a * s], axis=1)
    a, b = x[:, 0::2], x[:, 1::2]
    neighbours = np.stack([a * c - b * s, b * c + a * s], axis=-1).reshape(3, 8)
    assert code(halves, neighbours, x) == "rotary_layout"
    assert code(halves, halves * 1.5 + 0.1, x) is None


def test_the_same_numbers_in_another_order() -> None:
    x = RNG.normal(size=(4, 2, 6))
    mine, theirs = x.transpose(0, 2, 1).reshape(4, 12), x.reshape(4, 12)
    assert code(mine, theirs, moved=True) == "head_split_order"
    assert code(mine, theirs) is None  # sums do not part where entries are moved


def test_images_in_one_row_and_what_is_turned_round() -> None:
    x = RNG.normal(size=(4, 2, 3, 5))
    mine, theirs = x.transpose(0, 2, 3, 1).reshape(4, 30), x.reshape(4, 30)
    assert code(mine, theirs, moved=True, flattened=True) == "entry_order"
    assert code(x[:, ::-1], x, moved=True) == "entry_order"


def test_entries_in_another_order_and_features_within_each_entry() -> None:
    x = RNG.normal(size=(4, 5, 6))
    assert code(np.roll(x, 1, axis=1), x, moved=True) == "entry_order"  # a class token first or last
    assert code(x[:, [0, 3, 1, 4, 2]], x, moved=True) == "entry_order"
    assert code(x[..., [0, 3, 1, 4, 2, 5]], x, moved=True) == "head_split_order"


# --- windows -----------------------------------------------------------------------------------------------

IMAGE = RNG.normal(size=(2, 3, 9, 9))
KERNEL = RNG.normal(size=(4, 3, 3, 3))


def settings(variants: Any, wanted: torch.Tensor) -> list[dict[str, Any]]:
    y = wanted.numpy()
    return [dict(v.setting) for v in variants if v.values.shape == y.shape and np.allclose(v.values, y)]


@pytest.mark.parametrize(
    ("kernel", "options", "told"),
    [
        (KERNEL, {"stride": 2, "padding": 1}, {"padding": (1, 1), "stride": 2}),
        (KERNEL, {"padding": 2, "dilation": 2}, {"padding": (2, 2), "stride": 1, "dilation": 2}),
        (KERNEL[:3, :1], {"padding": 1, "groups": 3}, {"padding": (1, 1), "stride": 1}),
        (KERNEL[:3, :1], {"groups": 3, "stride": 3}, {"padding": (0, 0), "stride": 3}),
    ],
)
def test_convolutions_are_those_of_torch(kernel: Any, options: dict[str, Any], told: dict[str, Any]) -> None:
    y = functional.conv2d(torch.tensor(IMAGE), torch.tensor(kernel), **options)
    assert told in settings(convolutions_of(IMAGE, kernel, tuple(y.shape[2:])), y)


@pytest.mark.parametrize(
    ("mode", "told"),
    [("reflect", "its mirror image"), ("replicate", "its last entry"), ("circular", "its other end")],
)
def test_what_is_put_beside_an_image_is_that_of_torch(mode: str, told: str) -> None:
    padded = functional.pad(torch.tensor(IMAGE), (1, 1, 1, 1), mode=mode)
    y = functional.conv2d(padded, torch.tensor(KERNEL))
    found = settings(convolutions_of(IMAGE, KERNEL, (9, 9)), y)
    assert found == [{"padding": (1, 1), "stride": 1, "filled with": told}]


def test_a_causal_convolution_is_padded_on_one_side() -> None:
    signal, kernel = IMAGE[..., 0], KERNEL[..., 0]
    y = functional.conv1d(functional.pad(torch.tensor(signal), (8, 0)), torch.tensor(kernel), dilation=4)
    found = settings(convolutions_of(signal, kernel, (9,)), y)
    assert found == [{"padding": (8, 0), "stride": 1, "dilation": 4}]


@pytest.mark.parametrize(("padding", "output_padding"), [(0, 0), (1, 0), (1, 1), (2, 1)])
def test_transposed_convolutions_are_those_of_torch(padding: int, output_padding: int) -> None:
    y = functional.conv_transpose2d(
        torch.tensor(IMAGE),
        torch.tensor(KERNEL.swapaxes(0, 1)),
        stride=2,
        padding=padding,
        output_padding=output_padding,
    )
    (found,) = settings(transposed_convolutions_of(IMAGE, KERNEL, tuple(y.shape[2:])), y)
    low = 2 - padding
    assert (found["padding"], found["stride"]) == ((low, low + output_padding), 2)
    assert found["kernel flipped"]


@pytest.mark.parametrize("counted", [True, False])
def test_average_pooling_is_that_of_torch(counted: bool) -> None:
    y = functional.avg_pool2d(torch.tensor(IMAGE), 3, 2, 1, count_include_pad=counted)
    found = settings(pools_of(IMAGE, (5, 5)), y)
    assert found
    assert all(s["padding counted"] is counted for s in found)


@pytest.mark.parametrize("size", [5, 13, 18])
@pytest.mark.parametrize(
    ("options", "method", "corners"),
    [
        ({"mode": "nearest"}, "nearest", False),
        ({"mode": "bilinear"}, "linear", False),
        ({"mode": "bilinear", "align_corners": True}, "linear", True),
        ({"mode": "bicubic"}, "cubic, a = -0.75", False),
        ({"mode": "bicubic", "align_corners": True}, "cubic, a = -0.75", True),
    ],
)
def test_resizing_is_that_of_torch(options: dict[str, Any], method: str, corners: bool, size: int) -> None:
    y = functional.interpolate(torch.tensor(IMAGE), size=(size, size), **options)
    found = settings(resizes_of(IMAGE, (size, size)), y)
    assert (method, corners) in {(s["method"], s["corners aligned"]) for s in found}


# --- updates -----------------------------------------------------------------------------------------------

SHAPES = ((5, 7), (7,), (7, 3), (3,))


def updates_of(make: Callable[[Any], torch.optim.Optimizer]) -> tuple[list[Any], list[Any], list[Any]]:
    rng = np.random.default_rng(1)
    parameters = [torch.nn.Parameter(torch.tensor(rng.normal(size=s))) for s in SHAPES]
    before = [p.detach().numpy().copy() for p in parameters]
    for p in parameters:
        p.grad = torch.tensor(rng.normal(size=p.shape) * 10.0 ** rng.uniform(-5, 0, size=p.shape))
    gradients = [p.grad.numpy().copy() for p in parameters if p.grad is not None]
    make(parameters).step()
    return before, gradients, [p.detach().numpy() - b for p, b in zip(parameters, before, strict=True)]


def law(make: Callable[[Any], torch.optim.Optimizer]) -> Law:
    found = law_of(*updates_of(make))
    assert found is not None
    return found


def test_the_laws_of_torch_optimizers_are_recovered() -> None:
    sgd = law(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01))
    assert (sgd.name, sgd.coupled) == ("gradient", False)
    assert (sgd.rate, sgd.decay) == pytest.approx((0.19, 0.0019))
    adamw = law(lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1, eps=1e-5))
    assert (adamw.name, adamw.coupled) == ("outside", False)
    assert (adamw.rate, adamw.epsilon, adamw.decay) == pytest.approx((1e-3, 1e-5, 1e-4))
    adam = law(lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=0.1))
    assert (adam.name, adam.coupled) == ("outside", True)
    assert (adam.rate, adam.epsilon, adam.decay) == pytest.approx((1e-3, 1e-8, 0.1))


def test_the_law_says_which_parameters_are_decayed() -> None:
    def groups(p: Any) -> Any:
        kept = [{"params": [p[1], p[2]], "weight_decay": 0.0}, {"params": [p[0], p[3]], "weight_decay": 0.1}]
        return torch.optim.AdamW(kept, lr=1e-3)

    found = law(groups)
    assert found.decayed == (True, False, False, True), "one matrix and one vector"
    assert found.decay == pytest.approx(1e-4)


def test_an_update_that_follows_no_law_has_none() -> None:
    before, gradients, updates = updates_of(lambda p: torch.optim.SGD(p, lr=0.1))
    assert law_of(before, gradients, [u + RNG.normal(size=u.shape) for u in updates]) is None


@pytest.mark.parametrize(
    ("left", "right", "wanted"),
    [
        (lambda p: torch.optim.Adam(p, weight_decay=0.1), lambda p: torch.optim.Adam(p), "decay_coupling"),
        (lambda p: torch.optim.Adam(p), lambda p: torch.optim.Adam(p, eps=1e-6), "epsilon_value"),
        (
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            "nesterov",
        ),
        (lambda p: torch.optim.SGD(p, lr=0.1), lambda p: torch.optim.SGD(p, lr=0.0), "schedule_offset"),
        (lambda p: torch.optim.SGD(p, lr=0.1), lambda p: torch.optim.SGD(p, lr=0.01), "momentum_dampening"),
        (
            lambda p: torch.optim.SGD(p, lr=0.1),
            lambda p: torch.optim.SGD(p, lr=0.1 / 1024),
            "loss_scale_left_in",
        ),
        (lambda p: torch.optim.Adam(p), lambda p: torch.optim.SGD(p), "other_function"),
        (lambda p: torch.optim.AdamW(p), lambda p: torch.optim.AdamW(p, lr=2e-3), "scale"),
        (lambda p: torch.optim.AdamW(p), lambda p: torch.optim.AdamW(p, lr=1.02e-3), "scale"),
        (lambda p: torch.optim.Adam(p), lambda p: torch.optim.Adam(p, lr=2e-3), "scale"),
        (
            lambda p: torch.optim.Adam(p, weight_decay=0.1),
            lambda p: torch.optim.Adam(p, weight_decay=0.05),
            "decay_coupling",
        ),
        (
            lambda p: torch.optim.Adam(p),
            lambda p: torch.optim.Adam([{"params": p[:2]}, {"params": p[2:], "lr": 1e-4}]),
            "scale",
        ),
    ],
)
def test_the_cause_of_two_updates(left: Any, right: Any, wanted: str) -> None:
    assert cause_of(left, right)[0] == wanted


def cause_of(
    left: Any, right: Any, numbers: Any = ((), ()), clips: tuple[int, int] = (0, 0)
) -> tuple[str, str, str]:
    found = cause_of_updates(both(left, right), (), numbers, clips)
    assert found is not None
    return found


def both(left: Any, right: Any) -> list[Update]:
    before, gradients, mine = updates_of(left)
    *_, theirs = updates_of(right)
    return [Update(*row) for row in zip(before, gradients, mine, theirs, strict=True)]


def test_ten_times_the_rate_is_no_dampening_if_both_rates_are_written() -> None:
    left, right = (partial(torch.optim.SGD, lr=rate) for rate in (0.1, 0.01))
    assert cause_of(left, right, ({0.1}, {0.01}))[0] == "scale"
    assert cause_of(left, right, ({0.1}, {0.1, 0.9}))[0] == "momentum_dampening"


def test_a_rate_that_one_side_writes_by_chance_hides_no_missing_correction() -> None:
    before, gradients, mine = updates_of(lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.9, 0.99)))
    right = [-0.01 * g / (np.sqrt(0.01) * np.abs(g) + 1e-8) for g in gradients]
    updates = [Update(*row) for row in zip(before, gradients, mine, right, strict=True)]
    found = cause_of_updates(updates, (), ({0.01, 0.99}, {0.01, 0.1, 0.99}))  # 1 - 0.9, and also the rate
    assert found is not None
    assert found[0] == "bias_correction"


def test_rates_and_limits_are_told_apart_by_the_numbers_of_each_side() -> None:
    before, gradients, _ = updates_of(torch.optim.SGD)
    norm = np.sqrt(sum((g**2).sum() for g in gradients))
    limit = norm / 4

    def told(left: tuple[float, float], right: tuple[float, float]) -> str:
        rows = [
            Update(p, g, *(-rate * c / norm * g for rate, c in (left, right)))
            for p, g in zip(before, gradients, strict=True)
        ]
        found = cause_of_updates(rows, ["clip"], (set(left), set(right)))
        assert found is not None
        return found[1]

    assert told((0.1, limit), (0.2, limit)) == "the rate is 0.1 on the left and 0.2 on the right."
    assert told((0.1, limit), (0.1, 2 * limit)).startswith("the left side clips the gradients to the norm")
    assert told((0.1, limit), (0.1, norm)).startswith("only the left side clips the gradients, to")


def test_the_sign_of_a_gradient_is_another_formula_than_a_tiny_epsilon() -> None:
    before, gradients, mine = updates_of(torch.optim.Adam)
    rows = [Update(p, g, m, -1e-3 * np.sign(g)) for p, g, m in zip(before, gradients, mine, strict=True)]
    found = cause_of_updates(rows, (), ({1e-8}, ()))
    assert found is not None
    assert found[:2] == ("other_function", "only the right side takes the sign of the gradient.")


SIZES = ((5, 7), (9,), (7, 3), (8,))


def in_groups(*settings: tuple[float, float], clip: float, exact: bool) -> list[Any]:
    """The updates of AdamW after clipping, with a rate and a decay for each parameter."""
    rng = np.random.default_rng(2)
    found = []
    for (rate, decay), shape in zip(settings, SIZES, strict=True):
        p, g = rng.normal(size=shape), rng.normal(size=shape) * 10.0 ** rng.uniform(-6, 0, size=shape)
        h = g * clip / (10.0 + (0.0 if exact else 1e-6))
        found.append((p, g, -rate * h / (np.abs(h) + 1e-8) - rate * decay * p))
    return found


@pytest.mark.parametrize(
    ("right", "code", "words"),
    [
        ([(1e-3, 1e-4), (1e-3, 0.0), (5e-4, 1e-4), (1e-3, 0.0)], "decay_coupling", "different amounts"),
        ([(1e-3, 0.1), (1e-3, 0.1), (5e-4, 0.1), (1e-3, 0.1)], "decay_excluded", "only the right side"),
        ([(1e-3, 0.1), (1e-3, 0.0), (1e-3, 0.1), (1e-3, 0.0)], "scale", "for 1 of 4 parameters, such as c"),
    ],
)
def test_groups_are_compared_one_by_one_beside_another_epsilon_of_clipping(
    right: Any, code: str, words: str
) -> None:
    left = [(1e-3, 0.1), (1e-3, 0.0), (5e-4, 0.1), (1e-3, 0.0)]
    rows = [
        Update(p, g, mine, theirs, name)
        for (p, g, mine), (_, _, theirs), name in zip(
            in_groups(*left, clip=0.5, exact=False),
            in_groups(*right, clip=0.5, exact=True),
            "abcd",
            strict=True,
        )
    ]
    found = cause_of_updates(rows, ["clip"])
    assert found is not None
    assert found[0] == code
    assert words in found[1]


def some_decayed(first: float, second: float) -> Any:
    return lambda p: torch.optim.AdamW(
        [{"params": p[:2], "weight_decay": first}, {"params": p[2:], "weight_decay": second}]
    )


def test_less_decay_of_the_same_parameters_is_not_said_to_be_none() -> None:
    code, sentence, evidence, _ = cause_of(some_decayed(0.1, 0.0), some_decayed(1e-4, 0.0))
    assert code == "decay_coupling"
    assert sentence.startswith("the two sides decay 2 of the 4 parameters")
    assert evidence.count("- 0.0001 p") == evidence.count("- 1e-07 p") == 1
    code, sentence, *_ = cause_of(some_decayed(0.1, 0.1), some_decayed(0.1, 0.0))
    assert code == "decay_excluded"
    assert sentence.startswith("only the left side decays 2 of the 4 parameters")


def test_a_decay_beside_an_unknown_formula_is_not_said_to_be_one_sided() -> None:
    rows = both(some_decayed(0.1, 0.1), some_decayed(0.1, 0.0))
    noise = [RNG.normal(size=u.left.shape) * 1e-3 for u in rows]
    unknown = [
        Update(u.parameter, u.gradient, u.left + n, u.right + n) for u, n in zip(rows, noise, strict=True)
    ]
    found = cause_of_updates(unknown, ())
    assert found is not None
    assert found[0] == "decay_excluded"
    assert found[1].endswith("by different amounts, or only the left side does.")


def test_gradients_multiplied_before_adam_show_in_its_epsilon() -> None:
    before, gradients, _ = updates_of(torch.optim.Adam)
    norm = np.sqrt(sum((g**2).sum() for g in gradients))
    known = ({1e-8}, {1e-8, 0.3})
    rows = [
        Update(p, g, -1e-3 * g / (np.abs(g) + 1e-8), -1e-3 * c * g / (c * np.abs(g) + 1e-8))
        for c in (0.3 / norm,)
        for p, g in zip(before, gradients, strict=True)
    ]
    found = cause_of_updates(rows, (), known)
    assert found is not None
    assert found[0] == "clip_missing"
    rows = [
        Update(p, g, -1e-3 * g / (np.abs(g) + 1e-8), -1e-3 * g / (np.abs(g) + 1e-8 / 1024))
        for p, g in zip(before, gradients, strict=True)
    ]
    found = cause_of_updates(rows, (), known)
    assert found is not None
    assert found[:2] == (
        "loss_scale_left_in",
        "a factor of 2^10 is left in the gradients.",
    )


def test_an_unknown_formula_that_differs_where_gradients_are_small_is_only_like_an_epsilon() -> None:
    before, gradients, _ = updates_of(torch.optim.Adam)
    rows = [
        Update(p, g, np.cbrt(g) / (np.abs(np.cbrt(g)) + 1e-3), np.cbrt(g) / (np.abs(np.cbrt(g)) + 1e-2))
        for p, g in zip(before, gradients, strict=True)
    ]
    assert cause_of_updates(rows, ()) is None
    guess = epsilon_like(rows)
    assert guess is not None
    assert guess[0] == "adam_epsilon_placement"


@pytest.mark.parametrize("corrected", [True, False])
def test_an_epsilon_in_the_root_and_a_missing_bias_correction(corrected: bool) -> None:
    before, gradients, mine = updates_of(lambda p: torch.optim.Adam(p))
    if corrected:
        theirs = [-1e-3 * g / np.sqrt(g * g + 1e-10) for g in gradients]
    else:
        theirs = [-1e-3 * 0.1 * g / (np.sqrt(0.001) * np.abs(g) + np.sqrt(0.001) * 1e-8) for g in gradients]
    updates = [Update(*row) for row in zip(before, gradients, mine, theirs, strict=True)]
    found = cause_of_updates(updates, ())
    assert found is not None
    assert found[0] == ("adam_epsilon_placement" if corrected else "bias_correction")


@pytest.mark.parametrize(
    ("theirs", "wanted"),
    [
        (lambda g, v: -1e-3 * 0.1 * g / (np.abs(g) + 1e-8), "bias_correction"),  # of the first moment
        (lambda g, v: -1e-3 * g / (np.sqrt(0.01) * np.abs(g) + 1e-8), "bias_correction"),  # of the second
        (lambda g, v: -1e-3 * g / (np.abs(g) + 1e-7), "adam_epsilon_placement"),  # before its correction
        (lambda g, v: -1e-3 * g / (np.abs(g) + 3e-7), "epsilon_value"),
    ],
)
def test_corrections_of_the_moments_are_told_by_their_decay_rates(theirs: Any, wanted: str) -> None:
    before, gradients, mine = updates_of(lambda p: torch.optim.Adam(p, betas=(0.9, 0.99)))
    right = [theirs(g, None) for g in gradients]
    updates = [Update(*row) for row in zip(before, gradients, mine, right, strict=True)]
    found = cause_of_updates(updates, (), ({0.99}, {0.99}))
    assert found is not None
    assert found[0] == wanted


def test_an_epsilon_before_the_correction_is_no_factor_of_the_gradients_where_both_have_one_epsilon() -> None:
    before, gradients, mine = updates_of(lambda p: torch.optim.Adam(p, betas=(0.9, 0.99)))
    right = [-1e-3 * g / (np.abs(g) + 1e-7) for g in gradients]
    updates = [Update(*row) for row in zip(before, gradients, mine, right, strict=True)]
    found = cause_of_updates(updates, (), ({0.99, 1e-8}, {0.99, 1e-8}))
    assert found is not None
    assert found[0] == "adam_epsilon_placement"


@pytest.mark.parametrize(
    ("factor", "names", "wanted"),
    [
        (1 / (1 + 1e-6), ("clip_grad_norm_",), "clip_epsilon"),
        (0.5, ("clip_grad_norm_",), "clip_missing"),
        (0.5, (), "scale"),
        ("norm", (), "clip_missing"),  # known by its largest norm, 0.25, alone
    ],
)
def test_the_factor_of_a_clipped_norm_is_known(factor: Any, names: tuple[str, ...], wanted: str) -> None:
    gradients = [RNG.normal(size=(4, 3)), RNG.normal(size=3)]
    before = [RNG.normal(size=g.shape) for g in gradients]
    norm = np.sqrt(sum((g**2).sum() for g in gradients))
    factor = 0.25 / norm if factor == "norm" else factor
    decay = 0.01 if names else 0.0
    updates = [
        Update(p, g, -0.1 * g - decay * p, -0.1 * factor * g - decay * p)
        for p, g in zip(before, gradients, strict=True)
    ]
    found = cause_of_updates(updates, names, ({0.25}, ()))
    assert found is not None
    assert found[0] == wanted


# --- clipping before an update that a factor hardly changes ------------------------------------------------


def clipped_by(factors: tuple[float, float], other: tuple[float, float], largest: float) -> Any:
    """Return the cause of RMSprop's first step after the gradients were multiplied by a factor each."""
    updates, epsilon = [], 0.1
    for factor, second, shape in zip(factors, other, ((4, 3), (6,)), strict=True):
        p, g = RNG.normal(size=shape), RNG.normal(size=shape)
        left, right = (-0.01 * f * g / (np.abs(f * g) + epsilon) for f in (factor, second))
        updates.append(Update(p, g, left, right))
    return cause_of_updates(updates, ["norm"], ({largest, epsilon}, {epsilon}), (1, 2))


def test_a_factor_of_each_tensor_before_rmsprop_is_clipping_per_tensor() -> None:
    assert clipped_by((0.5, 0.5), (0.8, 0.3), 2.0)[0] == "clip_per_tensor"


def test_equal_epsilons_after_one_factor_are_no_clipping_unless_it_is_the_limit_over_the_norm() -> None:
    assert clipped_by((0.5, 0.5), (1.0, 1.0), 123.0)[:2] == (
        "scale",
        "the gradients on the left are 0.5 times those on the right.",
    )
