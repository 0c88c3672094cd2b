"""Torch and JAX agree; so do the fast paths with the core, and every transformation with the plain call."""

from __future__ import annotations

import inspect
import itertools
import math
from typing import Any

import array_api_compat.torch as torch_namespace
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import stablenum_jax.losses as jax_losses
import stablenum_torch.losses as torch_losses
from stablenum import losses as core
from stablenum.losses.classes import class_sums
from stablenum_torch.losses import fused
from stablenum_torch.losses.fused import fused_class_sums
from tests.losses.examples import EXAMPLES, INDEX, LABELS, LOGITS, MASK, OTHER, SOFT, C, N, Z
from tests.losses.running import run
from tests.selection import one_in_three, only, slow_unless

EDGES = np.asarray([0.0, -0.0, 1e-30, 1.0, -1.0, 20.0, -20.0, 88.0, -89.0, 104.0, 3e38, -3e38])


def _call(name: str) -> tuple[str, list[np.ndarray], dict[str, Any], tuple[int, ...]]:
    arrays, options, wrt = EXAMPLES[name]
    return name.split()[0], arrays, options, wrt


@pytest.mark.parametrize(
    ("name", "reduction"),
    slow_unless(
        lambda name, reduction: reduction == "mean" and one_in_three(name),  # the oracles test all in both
        [*((n, "mean") for n in EXAMPLES), ("cross_entropy", "sum"), ("info_nce", "none")],
    ),
)
def test_torch_and_jax_agree(name: str, reduction: str) -> None:
    name, arrays, options, wrt = _call(name)
    one, other = (run(r, name, arrays, wrt=wrt, reduction=reduction, **options) for r in ("torch", "jax jit"))
    np.testing.assert_allclose(one[0], other[0], rtol=2e-6, atol=2e-6)
    for a, b in zip(one[1], other[1], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    "name", ["binary_cross_entropy", "binary_focal", "huber", "log_cosh", "hinge", "poisson_nll"]
)
def test_torch_and_jax_agree_at_edges(name: str) -> None:
    z, y = (np.asarray(c) for c in zip(*itertools.product(EDGES, [0.0, 1.0])))
    (value, (grad,)), (other, (other_grad,)) = (run(r, name, [z, y]) for r in ("torch", "jax jit"))
    np.testing.assert_allclose(value, other, rtol=3e-6, atol=1e-37)
    np.testing.assert_allclose(grad, other_grad, rtol=3e-6, atol=1e-37)
    assert np.isfinite(grad).all()
    assert not np.isnan(value).any()


@pytest.mark.sampled
@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.2}, {"label_smoothing": 0.2, "weight": "w"}, {"z_loss": 0.1}]
)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_the_fast_path_matches_the_core(
    options: dict[str, Any], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks, rows with -inf, ignored rows with any values, upstream gradients of 0."""
    monkeypatch.setattr(fused, "_BLOCK", 2 * C)
    x = np.concatenate([LOGITS, LOGITS])
    x[1, 2] = x[2, INDEX[2]] = -np.inf
    x[3, :] = -np.inf
    x[4, 0] = np.nan
    x[6, 1] = 1000.0
    target = np.concatenate([INDEX, INDEX])
    target[4] = -100
    w = np.linspace(0.0, 2.0, C)
    upstream = np.linspace(0.0, 1.0, len(x))

    def both(function: Any, asarray: Any, **more: Any) -> Any:
        chosen = {k: asarray(w) if k == "weight" else v for k, v in options.items()}
        return function(asarray(x), asarray(target, None), reduction="none", **chosen, **more)

    def torch_tensor(a: np.ndarray, kind: Any = dtype) -> torch.Tensor:
        t = torch.tensor(a, dtype=kind and getattr(torch, kind))
        return t.requires_grad_() if a is x else t

    results = []
    for sums in (fused_class_sums, class_sums):
        leaf = torch_tensor(x)
        value = both(
            lambda x, t, leaf=leaf, sums=sums, **o: core.cross_entropy(
                leaf, t, sums=sums, xp=torch_namespace, **o
            ),
            torch_tensor,
        )
        (grad,) = torch.autograd.grad(value, leaf, torch.tensor(upstream, dtype=value.dtype))
        results.append((value.detach().double().numpy(), grad.double().numpy()))
    if dtype == "float32":
        for sums in (None, class_sums):

            def loss(logits: Any, sums: Any = sums) -> Any:
                chosen = {k: jnp.asarray(w) if k == "weight" else v for k, v in options.items()}
                if sums is None:
                    return jax_losses.cross_entropy(logits, target, reduction="none", **chosen)
                return core.cross_entropy(
                    logits, jnp.asarray(target), sums=sums, reduction="none", xp=jnp, **chosen
                )

            value, pull = jax.vjp(jax.jit(loss), jnp.asarray(x, jnp.float32))
            results.append((np.asarray(value), np.asarray(pull(jnp.asarray(upstream, value.dtype))[0])))
    eps = {"float32": 3e-6, "float64": 1e-13, "bfloat16": 1e-2}[dtype]
    for value, grad in results[:-1]:
        np.testing.assert_allclose(value, results[-1][0], rtol=eps, atol=eps)
        np.testing.assert_allclose(grad, results[-1][1], rtol=eps, atol=eps)
    assert not np.isnan(results[0][0]).any()
    assert not np.isnan(results[0][1]).any()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_fast_binary_total_matches_the_core(
    reduction: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "_BLOCK", 4)
    for z in (Z, np.concatenate([Z, [math.inf, -math.inf]])):
        y = np.concatenate([LABELS, [1.0, 0.0]])[: len(z)]
        for s in (0.0, 0.1)[: 2 if np.isfinite(z).all() else 1]:
            t = torch.tensor(z, dtype=dtype, requires_grad=True)
            options = {"label_smoothing": s, "reduction": reduction}
            quick = torch_losses.binary_cross_entropy(t, torch.tensor(y), **options)
            slow = core.binary_cross_entropy(t, torch.tensor(y), xp=torch_namespace, **options)
            torch.testing.assert_close(quick, slow)
            torch.testing.assert_close(torch.autograd.grad(quick, t), torch.autograd.grad(slow, t))


@pytest.mark.parametrize("name", EXAMPLES)
def test_torch_transformations(name: str) -> None:
    """grad, vmap of grad, jacfwd of grad, batched gradients, double backward: as the plain call."""
    name, arrays, options, _ = _call(name)
    function = getattr(torch_losses, name)
    options = {"dim" if k == "axis" else k: v for k, v in options.items()}
    x, *rest = (torch.tensor(a) for a in arrays)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return function(x, *rest, **options)

    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    (plain,) = torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(grad, plain)
    torch.testing.assert_close(torch.func.grad(loss)(x), plain)
    batch = torch.stack([x, 0.5 * x])
    torch.testing.assert_close(torch.func.vmap(loss)(batch)[0], loss(x))
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss))(batch)[0], plain)
    direction = torch.linspace(-1, 1, x.numel(), dtype=x.dtype).reshape(x.shape)
    (second,) = torch.autograd.grad(grad, leaf, direction)
    assert torch.isfinite(second).all()
    _, forwards = torch.func.jvp(torch.func.grad(loss), (x,), (direction,))
    torch.testing.assert_close(second, forwards)
    items = function(leaf, *rest, **options | {"reduction": "none"})
    eye = torch.eye(items.numel(), dtype=x.dtype).reshape(-1, *items.shape)
    (rows,) = torch.autograd.grad(items, leaf, eye, is_grads_batched=True)
    one = torch.autograd.grad(function(leaf, *rest, **options | {"reduction": "none"}), leaf, eye[1])[0]
    torch.testing.assert_close(rows[1], one)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, direction)
        tangent = torch.autograd.forward_ad.unpack_dual(loss(dual)).tangent
    torch.testing.assert_close(tangent, (plain * direction).sum())


@pytest.mark.parametrize("name", ["binary_cross_entropy", "cross_entropy", "focal"])
def test_torch_gradcheck(name: str) -> None:
    name, arrays, options, _ = _call(name)
    x, y = torch.tensor(arrays[0], requires_grad=True), torch.tensor(arrays[1])
    function = getattr(torch_losses, name)
    assert torch.autograd.gradcheck(lambda x: function(x, y, **options), (x,))
    assert torch.autograd.gradgradcheck(lambda x: function(x, y, **options), (x,))


# A loss of each kind.
@pytest.mark.parametrize("name", only(["binary_focal", "cross_entropy", "cosine_embedding"], EXAMPLES))
def test_jax_transformations(name: str) -> None:
    """jit, vmap, grad of grad, forward over reverse: as the plain call."""
    name, arrays, options, _ = _call(name)
    x, *rest = (jnp.asarray(a) for a in arrays)

    def loss(x: jax.Array) -> jax.Array:
        return getattr(jax_losses, name)(x, *rest, **options)

    @jax.jit
    def everything(x: jax.Array, direction: jax.Array) -> Any:
        grad = jax.grad(loss)
        batch = jnp.stack([x, 0.5 * x])
        twice = jax.grad(lambda x: jnp.sum(grad(x) * direction))
        plain, forwards = jax.jvp(grad, (x,), (direction,))
        return plain, jax.vmap(grad)(batch)[0], twice(x), forwards

    direction = jnp.linspace(-1, 1, x.size).reshape(x.shape)
    plain, mapped, twice, forwards = everything(x, direction)
    np.testing.assert_allclose(plain, mapped, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(twice, forwards, rtol=1e-3, atol=1e-4)
    assert np.isfinite(twice).all()


@pytest.mark.parametrize("name", EXAMPLES)
def test_autocast_gives_float32_as_torch_does(name: str) -> None:
    name, arrays, options, _ = _call(name)
    options = {"dim" if k == "axis" else k: v for k, v in options.items()}
    function = getattr(torch_losses, name)
    given = [torch.tensor(a, dtype=torch.bfloat16 if a.dtype.kind == "f" else None) for a in arrays]
    exact = function(*(t.double() if t.is_floating_point() else t for t in given), **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = function(*given, **options)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=1e-5)
    assert function(*given, **options).dtype == torch.bfloat16
    assert function(*given, dtype=torch.float64, **options).dtype == torch.float64


def test_other_layouts() -> None:
    """Classes in any dimension, one row, no rows, labels of any integer format, images."""
    image = torch.tensor(np.random.default_rng(0).normal(size=(2, C, 3, 4)), requires_grad=True)
    labels = torch.randint(0, C, (2, 3, 4), generator=torch.Generator().manual_seed(0))
    ours, theirs = torch_losses.cross_entropy(image, labels), torch.nn.functional.cross_entropy(image, labels)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(torch.autograd.grad(ours, image), torch.autograd.grad(theirs, image))
    last = jax_losses.cross_entropy(np.moveaxis(image.detach().numpy(), 1, -1), labels.numpy())
    assert float(last) == pytest.approx(ours.item(), rel=1e-5)
    row = torch.tensor(LOGITS[0])
    assert torch_losses.cross_entropy(row, torch.tensor(2)).item() == pytest.approx(
        torch.nn.functional.cross_entropy(row, torch.tensor(2)).item()
    )
    for kind in (torch.uint8, torch.int32):
        same = torch_losses.cross_entropy(torch.tensor(LOGITS), torch.tensor(INDEX).to(kind))
        torch.testing.assert_close(
            same, torch_losses.cross_entropy(torch.tensor(LOGITS), torch.tensor(INDEX))
        )
    torch_losses.focal(torch.tensor(LOGITS), torch.tensor(INDEX).to(torch.uint8))


@pytest.mark.parametrize(
    ("name", "route", "reduction"),
    slow_unless(
        lambda name, route, _: route == "torch" or one_in_three(name),
        [(n, *how) for how in (("torch", "mean"), ("torch", "sum"), ("jax jit", "mean")) for n in EXAMPLES],
    ),
)
def test_an_empty_batch_gives_0_with_gradient_0(name: str, route: str, reduction: str) -> None:
    name, arrays, options, wrt = _call(name)
    empty = [a[:0] for a in arrays]
    value, grads = run(route, name, empty, wrt=wrt, reduction=reduction, **options)
    assert value == 0
    assert all(g.size == 0 for g in grads)
    nothing = {"mask": np.zeros((N, N) if name == "info_nce" else N, dtype=bool)}
    broken = [np.full_like(a, np.nan) if i in wrt else a for i, a in enumerate(arrays)]
    value, grads = run(route, name, broken, wrt=wrt, reduction=reduction, **options, **nothing)
    assert value == 0
    assert all((g == 0).all() for g in grads)


@pytest.mark.parametrize(
    ("name", "route"),
    slow_unless(
        lambda name, route: route == "torch" or one_in_three(name),
        itertools.product([n for n in EXAMPLES if n != "info_nce"], ["torch", "jax jit"]),
    ),
)
def test_masked_items_count_as_removed_whatever_they_hold(name: str, route: str) -> None:
    name, arrays, options, wrt = _call(name)
    masked = [a.copy() for a in arrays]
    for i in wrt:
        masked[i][~MASK] = math.nan
        masked[i][np.flatnonzero(~MASK)[0]] = math.inf
    value, grads = run(route, name, masked, wrt=wrt, reduction="mean", mask=MASK, **options)
    alone, alone_grads = run("torch", name, [a[MASK] for a in arrays], wrt=wrt, reduction="mean", **options)
    np.testing.assert_allclose(value, alone, rtol=1e-5)
    for g, a in zip(grads, alone_grads, strict=True):
        np.testing.assert_allclose(g[MASK], a, rtol=1e-4, atol=1e-6)
        assert (g[~MASK] == 0).all()


@pytest.mark.parametrize("name", ["kl_divergence", "js_divergence"])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_mask_of_fewer_axes_is_broadcast_with_the_rows_of_a_divergence(name: str, axis: int) -> None:
    """The rows are (2, 6), so a mask of 6 leaves out the same columns of both."""
    x, y = (np.moveaxis(np.stack([a, a[::-1]]), -1, axis) for a in (LOGITS, SOFT))
    short, full = (
        run("torch", name, [x, y], wrt=(0, 1), mask=mask, axis=axis) for mask in (MASK, np.stack([MASK] * 2))
    )
    assert full[0].shape == (2, N)
    assert (full[0] == 0).tolist() == [(~MASK).tolist()] * 2
    np.testing.assert_array_equal(short[0], full[0])
    np.testing.assert_array_equal(short[1], full[1])


@pytest.mark.parametrize("route", ["torch", "jax jit"])
def test_masked_classes_are_removed(route: str) -> None:
    there = np.asarray([True, True, False, True, False])
    x, t = LOGITS.copy(), np.asarray([0, 1, 3, 3, 1, 0])
    x[:, ~there] = np.nan
    renumbered = np.cumsum(there)[t] - 1
    for options in ({"label_smoothing": 0.1, "z_loss": 0.1}, {}):
        value, (grad,) = run(route, "cross_entropy", [x, t], class_mask=there, reduction="mean", **options)
        alone, (alone_grad,) = run(
            route, "cross_entropy", [x[:, there], renumbered], reduction="mean", **options
        )
        np.testing.assert_allclose(value, alone, rtol=1e-6)
        np.testing.assert_allclose(grad[:, there], alone_grad, rtol=1e-5, atol=1e-7)
        assert (grad[:, ~there] == 0).all()
    value, _ = run(route, "focal", [x, t], class_mask=there, reduction="mean")
    alone, _ = run(route, "focal", [x[:, there], renumbered], reduction="mean")
    np.testing.assert_allclose(value, alone, rtol=1e-6)


def test_targets_out_of_range_give_nan_under_jit_and_vmap() -> None:
    x = jnp.asarray(LOGITS)
    value, grad = jax.jit(jax.value_and_grad(jax_losses.cross_entropy))(x, jnp.asarray([0, 1, 2, 3, 4, C]))
    assert np.isnan(value)
    assert (np.asarray(grad)[5] == 0).all()
    items = torch.func.vmap(lambda x, t: torch_losses.cross_entropy(x, t))(
        torch.tensor(LOGITS), torch.tensor([0, 1, 2, 3, 4, -1])
    )
    assert items.isnan().tolist() == [False] * 5 + [True]


@pytest.mark.parametrize("weight", [None, np.linspace(0.5, 2.0, C)])
@pytest.mark.parametrize("name", ["cross_entropy", "focal"])
def test_the_first_index_on_either_side_of_the_classes_is_out_of_range(
    name: str, weight: np.ndarray | None
) -> None:
    x, index = torch.tensor(LOGITS, requires_grad=True), torch.tensor([-1, 0, C - 1, C, 0, 0])
    options = {"weight": None if weight is None else torch.tensor(weight), "xp": torch_namespace}
    items = getattr(core, name)(x, index, reduction="none", **options)
    (grad,) = torch.autograd.grad(items.sum(), x)
    assert items.isnan().tolist() == [True, False, False, True, False, False]
    assert (grad == 0).all(dim=1).tolist() == items.isnan().tolist()
    with pytest.raises(
        ValueError, match="targets must be whole numbers from 0 to 4"
    ):  # where it can be checked
        getattr(torch_losses, name)(x[:1], torch.tensor([C]))


def test_one_hot_targets_give_the_loss_of_indices() -> None:
    one_hot = np.eye(C)[INDEX]
    for options in ({}, {"label_smoothing": 0.1}, {"weight": np.linspace(0.5, 2, C)}):
        if "weight" in options:
            hard, _ = run("torch", "cross_entropy", [LOGITS, INDEX], reduction="sum", **options)
            soft, _ = run("torch", "cross_entropy", [LOGITS, one_hot], reduction="sum", axis=1, **options)
        else:
            hard, _ = run("torch", "cross_entropy", [LOGITS, INDEX], reduction="mean", **options)
            soft, _ = run("torch", "cross_entropy", [LOGITS, one_hot], reduction="mean", axis=1, **options)
        assert soft == pytest.approx(hard, rel=1e-6)
    assert SOFT.sum(axis=1) == pytest.approx(1.0)


def test_every_loss_is_among_the_examples() -> None:
    assert {name.split()[0] for name in EXAMPLES} | {"cosine_similarity"} == set(core.__all__)


WITH_AXIS: dict[str, list[np.ndarray]] = {
    "cross_entropy": [LOGITS, INDEX],
    "cross_entropy soft": [LOGITS, SOFT],
    "focal": [LOGITS, INDEX],
    "kl_divergence": [LOGITS, SOFT],
    "js_divergence": [LOGITS, OTHER],
    "cosine_similarity": [LOGITS, OTHER],
    "cosine_embedding": [LOGITS, OTHER, LABELS],
}


@pytest.mark.parametrize("axis", [0, 1, -3])
@pytest.mark.parametrize("name", WITH_AXIS)
def test_a_loss_along_another_axis_is_that_of_the_moved_axes(name: str, axis: int) -> None:
    """Items of shape (2, 6), each with its own target and mask."""
    arrays = [np.stack([a, a[::-1]]) for a in WITH_AXIS[name]]
    moved = [np.moveaxis(a, -1, axis) if a.ndim == 3 else a for a in arrays]
    options = {} if name == "cosine_similarity" else {"mask": np.stack([MASK, ~MASK])}
    name = name.split()[0]
    value, (grad,) = run("torch", name, moved, axis=axis, **options)
    last, (of_last,) = run("torch", name, arrays, axis=-1, **options)
    assert value.shape == (2, N)
    np.testing.assert_allclose(value, last, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(np.moveaxis(grad, axis, -1), of_last, rtol=1e-5, atol=1e-6)


def test_every_loss_with_an_axis_is_tested_along_another_one() -> None:
    with_axis = {n for n in core.__all__ if "axis" in inspect.signature(getattr(core, n)).parameters}
    assert {name.split()[0] for name in WITH_AXIS} == with_axis


def test_vmap_of_cosine_similarity_and_of_classes_in_front() -> None:
    x, y = np.stack([LOGITS, OTHER]), np.stack([np.abs(OTHER), SOFT])
    index = np.stack([INDEX[:C], INDEX[1:]]) % N
    for name, second in (("cosine_similarity", y), ("kl_divergence", y), ("cross_entropy", index)):
        in_torch, in_jax = (getattr(m, name) for m in (torch_losses, jax_losses))
        xs, ys = torch.tensor(x), torch.tensor(second)
        mapped = torch.func.vmap(lambda a, b, f=in_torch: f(a, b, dim=0))(xs, ys)
        each = torch.stack([in_torch(a, b, dim=0) for a, b in zip(xs, ys, strict=True)])
        torch.testing.assert_close(mapped, each)
        theirs = jax.vmap(lambda a, b, f=in_jax: f(a, b, axis=0))(jnp.asarray(x), jnp.asarray(second))
        np.testing.assert_allclose(theirs, each, rtol=1e-5, atol=1e-6)
