"""Where two programs use the same values in another way: exchanged, repeated, summed, left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen
from torch import nn

import stablenum
import stablenum_jax
import stablenum_torch
from stablenum.diagnosis.diff.differences import Difference

X = np.random.default_rng(1).normal(size=(12, 5)).astype(np.float32)
W = np.random.default_rng(2).normal(size=(5, 8)).astype(np.float32)
V = np.random.default_rng(3).normal(size=(4, 3)).astype(np.float32)
Function = Callable[[Any, Any, Any], Any]


def first_of(of_torch: Function, of_jax: Function) -> Difference:
    """Return the first difference of two functions of two matrices and the data."""
    w, v = (torch.tensor(a, requires_grad=True) for a in (W, V))
    left = stablenum_torch.program(lambda x: of_torch(w, v, x), torch.tensor(X))
    right = stablenum_jax.program(
        lambda p, x: of_jax(p["w"], p["v"], x), {"w": jnp.asarray(W), "v": jnp.asarray(V)}, jnp.asarray(X)
    )
    first = stablenum.diff(left, right, weights={"w": "w", "v": "v"}).first
    assert first is not None
    assert first.left is not None
    assert first.right is not None
    return first


# --- rows that only one side computes ----------------------------------------------------------------------


def torch_routed(w: Any, v: Any, x: Any) -> Any:
    out = torch.zeros(len(x), 3)
    for i in range(2):
        rows = torch.where((x[:, 0] > 0) == bool(i))[0]
        a, b = (x[rows] @ w).chunk(2, dim=1)
        out = out.index_add(0, rows, (i + 1) * (torch.tanh(a) * b) @ v)  # torch
    return out.square().mean()


def jax_routed(w: Any, v: Any, x: Any, *, exchanged: bool = False) -> Any:
    a, b = jnp.split(x @ w, 2, axis=1)
    h = (jnp.tanh(b) * a if exchanged else jnp.tanh(a) * b) @ v  # jax
    return jnp.mean(jnp.where(x[:, :1] > 0, 2 * h, h) ** 2)


def test_halves_that_are_exchanged_in_picked_rows_are_named() -> None:
    first = first_of(torch_routed, lambda w, v, x: jax_routed(w, v, x, exchanged=True))
    assert first.left.code.endswith("# torch")  # type: ignore[union-attr]
    assert first.right.code.endswith("# jax")  # type: ignore[union-attr]
    assert (first.causes[0].code, first.causes[0].confirmed) == ("head_split_order", True)


# --- what one side does with a value -----------------------------------------------------------------------


def torch_best(w: Any, v: Any, x: Any) -> Any:
    best, at = torch.topk(torch.softmax(x @ w, 1), 2)
    best = best / best.sum(1, keepdim=True)  # torch
    return (torch.zeros(len(x), 8).scatter(1, at, best)[:, :4] @ v).square().mean()


def jax_best(w: Any, v: Any, x: Any) -> Any:
    best, at = jax.lax.top_k(jax.nn.softmax(x @ w, axis=1), 2)  # jax
    spread = jnp.einsum("nk,nkc->nc", best, jax.nn.one_hot(at, 8))  # jax
    return jnp.mean((spread[:, :4] @ v) ** 2)


def test_a_normalisation_of_the_best_that_only_one_side_has_is_named() -> None:
    first = first_of(torch_best, jax_best)
    assert first.left.code.endswith("# torch")  # type: ignore[union-attr]
    assert first.right.code.endswith("# jax")  # type: ignore[union-attr]
    assert first.right.operation is None  # type: ignore[union-attr]
    assert (first.causes[0].code, first.causes[0].confirmed) == ("missing_operation", True)


def torch_overlap(w: Any, v: Any, x: Any) -> Any:
    p = torch.sigmoid((x @ w)[:, :4] @ v).reshape(3, 4, 3)
    t = (x[:, :3] > 0).float().reshape(3, 4, 3)
    both = (p * t).sum(1)  # torch
    return 1 - (both / (p.sum(1) + 1)).mean()  # torch


def jax_overlap(w: Any, v: Any, x: Any) -> Any:
    p = jax.nn.sigmoid((x @ w)[:, :4] @ v)
    t = (x[:, :3] > 0).astype(p.dtype)
    both = jnp.einsum("nc,nc->c", p, t)  # jax
    return 1 - jnp.mean(both / (jnp.einsum("nc->c", p) + 1))  # jax


def test_a_sum_over_more_axes_is_named() -> None:
    first = first_of(torch_overlap, jax_overlap)
    assert first.left.code.endswith("# torch")  # type: ignore[union-attr]
    assert first.right.code.endswith("# jax")  # type: ignore[union-attr]
    assert first.causes[0].code == "reduction"


class Tiled(nn.Module):
    """Scores of four queries and two keys, whose scale is a table in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.tensor(W)), nn.Parameter(torch.tensor(V))
        self.register_buffer("table", 0.1 ** torch.arange(2))

    def forward(self, x: Any) -> Any:
        q = (x @ self.w).reshape(-1, 4, 2) * self.table
        k = (x[:, :4] @ self.v)[:, :2].reshape(-1, 2, 1).expand(-1, 2, 2) * self.table
        k = k[:, None].expand(-1, 2, 2, 2).reshape(-1, 4, 2)  # torch
        return torch.softmax(torch.einsum("nhd,mhd->hnm", q, k), -1).square().mean()


def jax_grouped(p: Any, x: Any) -> Any:
    table = 0.1 ** jnp.arange(2.0)
    q = (x @ p["w"]).reshape(-1, 2, 2, 2) * table * 2.0
    k = (x[:, :4] @ p["v"])[:, :2, None] * table
    scores = jnp.einsum("ngrd,mgd->grnm", q, k) / 2.0  # jax
    return jnp.mean(jax.nn.softmax(scores, axis=-1) ** 2)


def test_keys_repeated_in_another_order_are_named_behind_a_table_in_float32() -> None:
    left = stablenum_torch.program(Tiled(), torch.tensor(X), model=None)
    params = {"w": jnp.asarray(W), "v": jnp.asarray(V)}
    right = stablenum_jax.program(jax_grouped, params, jnp.asarray(X))
    first = stablenum.diff(left, right).first
    assert first is not None
    assert first.left is not None
    assert first.right is not None
    assert first.left.code.endswith("# torch")
    assert first.right.code.endswith("# jax")
    assert (first.causes[0].code, first.causes[0].confirmed) == ("head_split_order", True)


# --- numbers that only one side adds -----------------------------------------------------------------------


def torch_divergence(w: Any, v: Any, x: Any, *, one: float = 1.0) -> Any:
    mean, log_scale = (x @ w).chunk(2, dim=1)
    gap = (2 * log_scale).exp() + mean.square() - one - 2 * log_scale  # torch
    return (0.5 * gap).sum(1).mean() + (mean @ v).square().mean()  # torch


def jax_divergence(w: Any, v: Any, x: Any, *, one: float = 0.0) -> Any:
    mean, log_scale = jnp.split(x @ w, 2, axis=1)
    gap = jnp.exp(2 * log_scale) - 2 * log_scale  # jax
    return jnp.mean(0.5 * jnp.sum(gap + mean**2 - one, axis=1)) + jnp.mean((mean @ v) ** 2)  # jax


@pytest.mark.parametrize(("one", "code"), [(0.0, "missing_operation"), (1.0, "extra_operation")])
def test_a_number_that_only_one_loss_adds_is_named(one: float, code: str) -> None:
    first = first_of(
        lambda w, v, x: torch_divergence(w, v, x, one=1 - one),
        lambda w, v, x: jax_divergence(w, v, x, one=one),
    )
    assert first.left.code.endswith("# torch")  # type: ignore[union-attr]
    assert first.right.code.endswith("# jax")  # type: ignore[union-attr]
    assert (first.causes[0].code, first.causes[0].confirmed) == (code, True)


# --- flipped kernels --------------------------------------------------------------------------------------


def torch_transposed(w: Any, v: Any, x: Any) -> Any:
    y = nn.functional.conv_transpose2d(x.reshape(3, 5, 2, 2), w.reshape(5, 2, 2, 2))
    return y.tanh().mean()


def jax_transposed(w: Any, v: Any, x: Any) -> Any:
    image, kernel = x.reshape(3, 5, 2, 2), w.reshape(5, 2, 2, 2)
    padding, layout = [(1, 1), (1, 1)], ("NCHW", "IOHW", "NCHW")
    y = jax.lax.conv_general_dilated(image, kernel, (1, 1), padding, dimension_numbers=layout)
    return jnp.mean(jnp.tanh(y))


def test_a_kernel_that_one_side_flips_is_named() -> None:
    first = first_of(torch_transposed, jax_transposed)
    assert [(c.code, c.confirmed) for c in first.causes] == [("flipped_kernel", True)]
    assert first.right is not None
    assert "conv_general_dilated" in first.right.code


def test_two_paddings_that_give_other_sizes_are_both_named() -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 4, 2, stride=2)
    images = np.random.default_rng(0).normal(size=(2, 5, 5, 3)).astype(np.float32)
    left = stablenum_torch.program(
        lambda x: torch.sin(layer(x)).square().mean(), torch.tensor(images.transpose(0, 3, 1, 2)), model=layer
    )
    numbers = ("NHWC", "HWIO", "NHWC")

    def loss(p: Any, x: Any) -> Any:
        made = jax.lax.conv_general_dilated(x, p["kernel"], (2, 2), "SAME", dimension_numbers=numbers)
        return jnp.mean(jnp.sin(made + p["bias"]) ** 2)

    params = {"kernel": jnp.ones((2, 2, 3, 4)), "bias": jnp.zeros(4)}
    report = stablenum.diff(left, stablenum_jax.program(loss, params, images))
    assert (report.causes[0].code, report.causes[0].confirmed) == ("padding", True)
    assert "padding (0, 0)" in report.causes[0].sentence
    assert "padding (0, 1)" in report.causes[0].sentence


# --- the same numbers in another order ---------------------------------------------------------------------


def torch_images(w: Any, v: Any, x: Any) -> Any:
    h = torch.tanh(x @ w).view(2, 3, 4, 4)
    return torch.conv2d(h, v.reshape(2, 3, 2, 1)).exp().mean()


def jax_images(w: Any, v: Any, x: Any, order: Callable[[Any], Any]) -> Any:
    h = order(jnp.tanh(x @ w))
    kernel = v.reshape(2, 3, 2, 1).transpose(2, 3, 1, 0)
    dims = ("NHWC", "HWIO", "NHWC")
    return jnp.mean(jnp.exp(jax.lax.conv_general_dilated(h, kernel, (1, 1), "VALID", dimension_numbers=dims)))


@pytest.mark.parametrize(
    "order",
    [
        lambda h: h.reshape(2, 4, 4, 3),
        lambda h: h.reshape(2, 3, 4, 4).transpose(0, 2, 3, 1)[:, jnp.array([1, 0, 2, 3])],
        lambda h: h.reshape(2, 3, 4, 4).transpose(0, 2, 3, 1)[..., ::-1],
    ],
    ids=["another layout", "rows exchanged", "channels the other way round"],
)
def test_images_whose_entries_lie_in_another_order_are_named(order: Callable[[Any], Any]) -> None:
    first = first_of(torch_images, lambda w, v, x: jax_images(w, v, x, order))
    cause = first.causes[0]
    assert (cause.code, cause.confirmed) == ("entry_order", True), cause.sentence


def test_values_put_together_the_other_way_round_are_named() -> None:
    first = first_of(
        lambda w, v, x: torch.cat([torch.tanh(x), x], 1).matmul(torch.cat([w, 2 * w])).exp().mean(),
        lambda w, v, x: jnp.exp(
            jnp.concatenate([x, jnp.tanh(x)], 1) @ jnp.concatenate([w, 2 * w])
        ).mean(),
    )  # fmt: skip
    cause = first.causes[0]
    assert (cause.code, cause.confirmed) == ("entry_order", True), cause


# --- one mask in several layers ----------------------------------------------------------------------------

PARTS = np.array([[0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 1, 1]])


def torch_layers(w: Any, v: Any, x: Any) -> Any:
    h = x.reshape(2, 6, 5)
    parts = torch.tensor(PARTS)
    mask = (parts[:, :, None] == parts[:, None, :]) & torch.ones(6, 6, dtype=torch.bool).tril()
    for _ in range(2):
        scores = (h @ w @ w.T @ h.mT).masked_fill(~mask, float("-inf"))  # torch
        h = h + torch.softmax(scores, -1) @ h
    return h.tanh().exp().mean()


def jax_layers(w: Any, v: Any, x: Any) -> Any:
    h = x.reshape(2, 6, 5)
    for _ in range(2):
        scores = h @ w @ w.T @ jnp.swapaxes(h, 1, 2)
        scores = jnp.where(jnp.tril(jnp.ones((6, 6), bool)), scores, -1e30)
        h = h + jax.nn.softmax(scores, -1) @ h
    return jnp.mean(jnp.exp(jnp.tanh(h)))


def test_a_mask_that_differs_in_several_layers_is_confirmed() -> None:
    cause = first_of(torch_layers, jax_layers).causes[0]
    assert (cause.code, cause.confirmed) == ("mask_missing", True), cause


@pytest.mark.parametrize(
    ("left", "right", "code"),
    [
        pytest.param(
            nn.MaxPool2d(3, 2, padding=1),
            lambda x: linen.max_pool(x, (3, 3), (2, 2), "SAME"),
            "padding",
            id="padding of a maximum",
        ),
        pytest.param(
            nn.AvgPool2d(3, 2, padding=1),
            lambda x: linen.avg_pool(x, (3, 3), (2, 2), "SAME"),
            "padding",
            id="padding of a mean",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            nn.AvgPool2d(3, 1, padding=1, count_include_pad=False),
            lambda x: linen.avg_pool(x, (3, 3), (1, 1), "SAME"),
            "pooling_count",
            id="count of a mean",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            nn.AvgPool2d(2, 2),
            lambda x: linen.avg_pool(x, (2, 2), (2, 2), ((1, 0), (1, 0)), count_include_pad=False),
            "padding",
            id="padding on one side only",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            nn.MaxPool2d(2, 2),
            lambda x: linen.avg_pool(x, (2, 2), (2, 2)),
            "other_function",
            id="maximum or mean",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_pooling_is_named_by_the_setting_that_differs(left: nn.Module, right: Any, code: str) -> None:
    image = np.random.default_rng(0).normal(size=(2, 3, 8, 8)).astype(np.float32)
    first = stablenum.diff(
        stablenum_torch.program(lambda x: left(x).permute(0, 2, 3, 1), torch.tensor(image)),
        stablenum_jax.program(lambda p, x: right(jnp.moveaxis(x, 1, -1)), {}, image),
    ).first
    assert first is not None
    assert (first.causes[0].code, first.causes[0].confirmed) == (code, True)


def test_a_padding_that_is_the_same_on_both_sides_is_said_so() -> None:
    """With stride 2 and an even size, padding=1 gives what one more entry at the start alone gives."""
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 4, 3, stride=2, padding=1)
    images = np.random.default_rng(0).normal(size=(2, 6, 6, 3)).astype(np.float32)
    left = stablenum_torch.program(
        lambda x: torch.sin(layer(x)).square().mean(), torch.tensor(images.transpose(0, 3, 1, 2)), model=layer
    )

    def loss(p: Any, x: Any) -> Any:
        numbers = ("NHWC", "HWIO", "NHWC")
        made = jax.lax.conv_general_dilated(x, p["kernel"], (2, 2), "SAME", dimension_numbers=numbers)
        return jnp.mean(jnp.sin(made + p["bias"]) ** 2)

    params = {"kernel": jnp.ones((3, 3, 3, 4)), "bias": jnp.zeros(4)}
    report = stablenum.diff(left, stablenum_jax.program(loss, params, images))
    assert (report.causes[0].code, report.causes[0].confirmed) == ("padding", True)
    assert "computes convolution (padding (1, 1), stride 2)" in report.causes[0].sentence
    assert "right one convolution (padding (0, 1), stride 2)" in report.causes[0].sentence


@pytest.mark.parametrize(
    ("of_torch", "of_jax", "code", "said"),
    [
        (lambda h: h.mean(0), lambda h: jnp.sum(h, 0), "reduction", "only the left program divides"),
        pytest.param(
            lambda h: h.sum(0),
            lambda h: jnp.mean(h, 0),
            "reduction",
            "only the right program divides",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda h: h.sum(0),
            lambda h: 0.7 * jnp.sum(h, 0),
            "scale",
            "1.42857",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["mean on the left", "mean on the right", "another factor"],
)
def test_a_factor_that_is_the_number_of_entries_is_a_sum_against_a_mean(
    of_torch: Any, of_jax: Any, code: str, said: str
) -> None:
    first = first_of(
        lambda w, v, x: torch.tanh(of_torch(x @ w)[:4] @ v).square().sum(),
        lambda w, v, x: jnp.sum(jnp.tanh(of_jax(x @ w)[:4] @ v) ** 2),
    )
    assert (first.causes[0].code, first.causes[0].confirmed) == (code, True)
    assert said in first.causes[0].sentence
