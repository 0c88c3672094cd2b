"""The modules follow torch.nn; wrong input raises an error that names it."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import stablenum_jax.losses as jl
import stablenum_torch.losses as tl
from stablenum import losses as core
from tests.losses.examples import COUNTS, EXAMPLES, INDEX, LABELS, LOGITS, OTHER, POSITIVE, SOFT, C, Z

Tensors = tuple[Any, ...]


def _t(*arrays: np.ndarray) -> list[torch.Tensor]:
    return [torch.tensor(a, dtype=torch.float32 if a.dtype.kind == "f" else None) for a in arrays]


W = torch.linspace(0.5, 2.0, C)
SAME_AS_TORCH_NN: dict[str, tuple[dict[str, Any], list[np.ndarray]]] = {
    "CrossEntropyLoss": (
        {"weight": W, "ignore_index": 2, "reduction": "sum", "label_smoothing": 0.1},
        [LOGITS, INDEX],
    ),
    "BCEWithLogitsLoss": ({"pos_weight": torch.tensor(2.0), "reduction": "mean"}, [Z, LABELS]),
    "GaussianNLLLoss": ({"full": True, "eps": 1e-4, "reduction": "sum"}, [Z, LABELS, POSITIVE]),
    "PoissonNLLLoss": ({"log_input": False, "eps": 1e-7, "reduction": "mean"}, [POSITIVE, COUNTS]),
    "HuberLoss": ({"reduction": "sum", "delta": 0.5}, [Z, LABELS]),
    "CosineEmbeddingLoss": ({"margin": 0.2, "reduction": "sum"}, [LOGITS, OTHER, 2 * LABELS - 1]),
    "KLDivLoss": ({"reduction": "batchmean"}, [np.log(SOFT), SOFT[::-1].copy()]),
}


@pytest.mark.parametrize("name", SAME_AS_TORCH_NN)
def test_modules_have_the_arguments_and_results_of_torch_nn(name: str) -> None:
    options, arrays = SAME_AS_TORCH_NN[name]
    ours, theirs = getattr(tl, name)(**options), getattr(torch.nn, name)(**options)
    torch.testing.assert_close(ours(*_t(*arrays)), theirs(*_t(*arrays)), rtol=1e-6, atol=1e-6)
    assert set(ours.state_dict()) == set(theirs.state_dict())
    accepted = set(inspect.signature(getattr(torch.nn, name)).parameters) - {"size_average", "reduce"}
    assert accepted <= set(inspect.signature(getattr(tl, name)).parameters)


MODULES: dict[str, tuple[dict[str, Any], list[np.ndarray], str]] = {
    "CrossEntropyLoss": (
        {"z_loss": 1e-4},
        [LOGITS, INDEX],
        "CrossEntropyLoss(ignore_index=-100, reduction='mean', label_smoothing=0.0, z_loss=0.0001)",
    ),
    "BCEWithLogitsLoss": ({}, [Z, LABELS], "BCEWithLogitsLoss(reduction='mean', label_smoothing=0.0)"),
    "FocalLoss": (
        {"gamma": 0.5},
        [LOGITS, INDEX],
        "FocalLoss(gamma=0.5, ignore_index=-100, reduction='mean')",
    ),
    "BinaryFocalLoss": (
        {"alpha": 0.25},
        [Z, LABELS],
        "BinaryFocalLoss(gamma=2.0, alpha=0.25, reduction='mean')",
    ),
    "KLDivLoss": ({}, [LOGITS, SOFT], "KLDivLoss(reduction='mean', log_targets=False, dim=-1)"),
    "JSDivLoss": ({}, [LOGITS, OTHER], "JSDivLoss(reduction='mean', dim=-1)"),
    "GaussianNLLLoss": (
        {},
        [Z, LABELS, POSITIVE],
        "GaussianNLLLoss(full=False, eps=1e-06, reduction='mean')",
    ),
    "PoissonNLLLoss": (
        {},
        [Z, COUNTS],
        "PoissonNLLLoss(log_input=True, full=False, eps=1e-08, reduction='mean')",
    ),
    "NegativeBinomialNLLLoss": (
        {},
        [Z, COUNTS, POSITIVE],
        "NegativeBinomialNLLLoss(log_input=True, full=False, eps=1e-08, reduction='mean')",
    ),
    "HuberLoss": ({}, [Z, LABELS], "HuberLoss(reduction='mean', delta=1.0)"),
    "LogCoshLoss": ({}, [Z, LABELS], "LogCoshLoss(reduction='mean')"),
    "HingeLoss": ({}, [Z, LABELS], "HingeLoss(margin=1.0, squared=False, reduction='mean')"),
    "CosineEmbeddingLoss": ({}, [LOGITS, OTHER], "CosineEmbeddingLoss(margin=0.0, reduction='mean', dim=-1)"),
    "InfoNCELoss": (
        {},
        [LOGITS, OTHER],
        "InfoNCELoss(temperature=0.07, normalized=False, symmetric=False, reduction='mean')",
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_can_be_copied_pickled_and_printed(name: str) -> None:
    options, arrays, shown = MODULES[name]
    module = getattr(tl, name)(**options)
    assert repr(module) == shown
    value = module(*_t(*arrays))
    assert value.shape == ()
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(*_t(*arrays)), value)
    module.load_state_dict(module.state_dict())
    with pytest.raises(ValueError, match=r"reduction must be"):
        getattr(tl, name)(**options, reduction="average")


def test_every_loss_has_a_module_and_every_module_is_tested() -> None:
    assert {n for n in tl.__all__ if n[0].isupper()} == set(MODULES)
    assert set(core.__all__) == {n for n in tl.__all__ if n[0].islower()} == set(jl.__all__)
    assert {n.split()[0] for n in EXAMPLES} | {"cosine_similarity"} == set(core.__all__)


def test_buffers_move_with_the_module() -> None:
    module = tl.CrossEntropyLoss(weight=W).to(torch.float64)
    assert module.weight.dtype == torch.float64
    masked = module(*_t(LOGITS, INDEX), mask=torch.arange(len(INDEX)) < 3)
    torch.testing.assert_close(masked, module(*_t(LOGITS[:3], INDEX[:3])))


@pytest.mark.parametrize("name", core.__all__)
def test_signatures_are_those_of_the_core_in_the_framework_s_spelling(name: str) -> None:
    hidden = {"xp", "sums", "items"}
    names = [p for p in inspect.signature(getattr(core, name)).parameters if p not in hidden]
    assert list(inspect.signature(getattr(jl, name)).parameters) == names
    in_torch = ["dim" if p == "axis" else p for p in names]
    assert list(inspect.signature(getattr(tl, name)).parameters) == in_torch
    for module in (jl, tl):
        text = getattr(module, name).__doc__
        assert "array_api_compat" not in text
        assert "xp:" not in text
    assert "axis:" not in getattr(tl, name).__doc__


X, T = _t(LOGITS, INDEX)
WRONG: list[tuple[Any, str]] = [
    (
        lambda: tl.cross_entropy(X, T, reduction="avg"),
        r'reduction must be "mean", "sum" or "none"; got \'avg\'',
    ),
    (
        lambda: tl.cross_entropy(X, T, label_smoothing=1.0),
        r"label_smoothing must be .*at least 0 and below 1; got 1.0",
    ),
    (lambda: tl.cross_entropy(X, T, z_loss=-1), r"z_loss must be"),
    (lambda: tl.cross_entropy(X, T[:3]), r"targets must be of shape \(6,\), that of the logits without"),
    (
        lambda: tl.cross_entropy(X, X[:, :2]),
        r"targets must be of shape \(6, 5\), that of the logits, if they",
    ),
    (
        lambda: tl.cross_entropy(X, T > 0),
        r"targets must be integers or floating-point numbers; got 'torch.bool'",
    ),
    (lambda: tl.cross_entropy(X, T, weight=torch.ones(3)), r"weight must be of shape \(5,\)"),
    (lambda: tl.cross_entropy(X, T, mask=torch.ones(4, dtype=torch.bool)), r"mask must be broadcastable"),
    (lambda: tl.cross_entropy(X, T, mask=torch.ones(6)), r"mask must be a bool array"),
    (
        lambda: tl.cross_entropy(X, T, class_mask=torch.ones(4, dtype=torch.bool)),
        r"class_mask must be broadcastable",
    ),
    (lambda: tl.cross_entropy(X, T, dim=2), r"dim must be a whole number from -2 to 1; got 2"),
    (lambda: jl.cross_entropy(LOGITS, INDEX, axis=(0,)), r"axis must be a whole number; got \(0,\)"),
    (lambda: jl.kl_divergence(LOGITS, LOGITS, axis=1.5), r"axis must be a whole number; got 1.5"),
    (lambda: tl.cosine_similarity(X, X, dim=(0,)), r"dim must be a whole number or None; got \(0,\)"),
    (
        lambda: tl.cross_entropy(X, torch.full_like(T, 5)),
        r"targets must be whole numbers from 0 to 4.*; got 5",
    ),
    (lambda: tl.cross_entropy(X, torch.full_like(T, -1)), r"got -1"),
    (lambda: tl.cross_entropy(X[:, :0], T), r"logits must be an array with at least one class"),
    (lambda: tl.focal(X[:, :0], T), r"logits must be an array with at least one class"),
    (lambda: tl.kl_divergence(X[:, :0], X[:, :0]), r"logits must be an array with at least one class"),
    (
        lambda: jl.js_divergence(LOGITS[:, :0], LOGITS[:, :0]),
        r"logits must be an array with at least one class",
    ),
    (lambda: tl.focal(X, torch.full_like(T, 5)), r"targets must be whole numbers from 0 to 4"),
    (lambda: tl.focal(X, X), r"targets must be"),
    (lambda: tl.focal(X, T, gamma=-1.0), r"gamma must be"),
    (lambda: tl.focal(X, T, weight=torch.ones(3)), r"weight must be of shape"),
    (lambda: jl.cross_entropy(LOGITS, np.full(6, 5)), r"targets must be whole numbers from 0 to 4.*; got 5"),
    (
        lambda: tl.binary_cross_entropy(X, X[:1]),
        r"targets must be of the same shape as logits, \(6, 5\); got \(1, 5\)",
    ),
    (lambda: tl.binary_cross_entropy(X, X, weight=torch.ones(2)), r"weight must be broadcastable"),
    (
        lambda: tl.binary_cross_entropy(X, X, mask=torch.ones(2, 6, 5, dtype=torch.bool)),
        r"mask must be broadcastable to the shape of the items, \(6, 5\); got \(2, 6, 5\)",
    ),
    (lambda: tl.huber(X, X, mask=torch.ones(6, 5)), r"mask must be a bool array"),
    (lambda: tl.binary_cross_entropy(X, X, pos_weight=torch.ones(2)), r"pos_weight must be broadcastable"),
    (lambda: tl.binary_cross_entropy(X, X, reduction=None), r"reduction must be"),
    (lambda: tl.binary_focal(X, X, alpha=2.0), r"alpha must be"),
    (lambda: tl.kl_divergence(X, X[:2]), r"targets must be of the same shape as logits"),
    (lambda: tl.js_divergence(X, X[:2]), r"other must be of the same shape as logits"),
    (lambda: tl.gaussian_nll(X, X, X[:2]), r"var must be broadcastable"),
    (lambda: tl.gaussian_nll(X, X, X, eps=0.0), r"eps must be"),
    (lambda: tl.gaussian_nll(X, X, X, eps=1e-45), r"eps must be a finite number at least 1.17549e-38"),
    (lambda: tl.poisson_nll(X, X, max_log_rate=math.inf), r"max_log_rate must be"),
    (lambda: tl.negative_binomial_nll(X, X, X[:2]), r"total_count must be broadcastable"),
    (lambda: tl.huber(X, X, delta=0.0), r"delta must be"),
    (lambda: tl.hinge(X, X, margin=math.nan), r"margin must be"),
    (lambda: tl.cosine_similarity(X, X[:2]), r"y must be of the same shape as x"),
    (lambda: tl.cosine_embedding(X, X, T[:2]), r"targets must be of shape \(6,\), that of x without axis 1"),
    (lambda: tl.cosine_embedding(X, X, margin=2.0), r"margin must be"),
    (lambda: tl.info_nce(X, X[:2]), r"keys must be as many as the queries"),
    (lambda: tl.info_nce(X, X[:, :2]), r"queries and keys must be"),
    (lambda: tl.info_nce(X, X, positives=torch.ones(2, 2)), r"positives must be of shape \(6, 6\)"),
    (lambda: tl.info_nce(X, X, temperature=0.0), r"temperature must be"),
    # A learned temperature: as a number it would silently lose its gradient. Divide the embeddings instead.
    (lambda: tl.info_nce(X, X, temperature=torch.tensor(0.1, requires_grad=True)), r"temperature must be"),
]


@pytest.mark.parametrize("case", range(len(WRONG)))
def test_wrong_input_raises(case: int) -> None:
    call, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("margin", [-1.5, 1.5, math.nan])
def test_a_margin_that_no_cosine_reaches_raises_when_the_module_is_made(margin: float) -> None:
    with pytest.raises(ValueError, match=r"margin must be a finite number .*-1.* 1"):
        tl.CosineEmbeddingLoss(margin)
    for edge in (-1.0, 1.0):
        assert tl.CosineEmbeddingLoss(edge).margin == edge


def test_input_that_is_not_a_floating_tensor_raises() -> None:
    with pytest.raises(TypeError, match="predictions must be a tensor; got list"):
        tl.huber([1.0], X)
    with pytest.raises(TypeError, match="logits must be a tensor; got NoneType"):
        tl.cross_entropy(targets=T)
    with pytest.raises(TypeError, match="floating-point format"):
        tl.huber(T, T)
    with pytest.raises(TypeError, match="floating-point format"):
        tl.poisson_nll(T, T)
    with pytest.raises(TypeError, match="floating-point format"):
        jl.huber(jnp.arange(3), jnp.arange(3))


@pytest.mark.parametrize("name", ["log_cosh", "poisson_nll", "binary_cross_entropy"])
def test_a_loss_copies_no_tensor_that_has_the_format_of_the_computation(name: str) -> None:
    found: list[str] = []

    class Copies(TorchDispatchMode):
        """Records the operations that copy a whole tensor."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            copied = any(word in str(func) for word in ("_to_copy", "clone", "copy_"))
            if copied and args[0].numel() > 1:
                found.append(str(func))
            return func(*args, **(kwargs or {}))

    x, y = torch.full((2, 8), 0.5)
    with Copies():
        getattr(tl, name)(x, y)
    assert not found


WRONG_TYPES = [
    ("cross_entropy", lambda x, y, t: ((x, None), {}), "targets must be an? (tensor|array); got NoneType"),
    ("cross_entropy", lambda x, y, t: ((x, "x"), {}), "targets must be an? (tensor|array); got str"),
    ("cross_entropy", lambda x, y, t: ((x, t + 0j), {}), "targets must hold real numbers; got .*complex64"),
    ("cross_entropy", lambda x, y, t: ((x, t), {"mask": "x"}), "mask must be .* or None; got str"),
    ("cross_entropy", lambda x, y, t: ((x, t), {"weight": 3}), "weight must be .* or None; got int"),
    ("cross_entropy", lambda x, y, t: ((x, t), {"weight": x[0] + 0j}), "weight must hold real numbers"),
    ("cross_entropy", lambda x, y, t: ((x, t), {"ignore_index": "x"}), "ignore_index must be a whole number"),
    ("cross_entropy", lambda x, y, t: ((x, t), {"ignore_index": math.nan}), "ignore_index must be a whole"),
    ("cross_entropy", lambda x, y, t: ((x, t), {"dtype": "x"}), "dtype must be a floating-point .*; got 'x'"),
    (
        "cross_entropy",
        lambda x, y, t: ((x, t), {"axis": "x"}),
        "(dim|axis) must be a whole number.*; got 'x'",
    ),
    ("focal", lambda x, y, t: ((x, t), {"ignore_index": None}), "ignore_index must be a whole number"),
    ("focal", lambda x, y, t: ((x, t), {"class_mask": 1.0}), "class_mask must be .* or None; got float"),
    (
        "binary_cross_entropy",
        lambda x, y, t: ((x, y), {"pos_weight": 2.0}),
        "pos_weight must be .*; got float",
    ),
    ("binary_cross_entropy", lambda x, y, t: ((x, y + 0j), {}), "targets must hold real numbers"),
    ("huber", lambda x, y, t: ((x + 0j, y), {}), "predictions must hold real numbers; got .*complex64"),
    ("huber", lambda x, y, t: ((x, None), {}), "targets must be an? (tensor|array); got NoneType"),
    ("log_cosh", lambda x, y, t: ((x, y), {"dtype": 3}), "dtype must be a floating-point .*; got 3"),
    ("gaussian_nll", lambda x, y, t: ((x, y, None), {}), "var must be an? (tensor|array); got NoneType"),
    ("gaussian_nll", lambda x, y, t: ((x, y, y), {"full": "no"}), "full must be True or False; got str"),
    ("poisson_nll", lambda x, y, t: ((x, y), {"log_input": 0}), "log_input must be True or False; got int"),
    ("cosine_similarity", lambda x, y, t: ((x, y + 0j), {}), "y must hold real numbers"),
    ("info_nce", lambda x, y, t: ((x, None), {}), "keys must be an? (tensor|array); got NoneType"),
]


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize(("name", "arguments", "message"), WRONG_TYPES)
def test_an_argument_of_a_wrong_type_is_named(
    name: str, arguments: Any, message: str, framework: str
) -> None:
    if framework == "torch":
        args, options = arguments(X, torch.rand(6, 5), T)
        options = {("dim" if k == "axis" else k): v for k, v in options.items()}
        loss = getattr(tl, name)
    else:
        args, options = arguments(jnp.ones((6, 5)), jnp.ones((6, 5)), jnp.zeros(6, jnp.int32))
        loss = getattr(jl, name)
    with pytest.raises((TypeError, ValueError), match=message):
        loss(*args, **options)


@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64"])
def test_a_result_in_a_format_that_is_not_floating_point(dtype: str) -> None:
    with pytest.raises(TypeError, match="dtype must be a floating-point"):
        tl.huber(X, X, dtype=getattr(torch, dtype))
    with pytest.raises(TypeError, match="dtype must be a floating-point"):
        jl.huber(jnp.ones(3), jnp.ones(3), dtype=dtype)


def test_symmetric_info_nce_is_the_mean_of_both_directions_without_padding() -> None:
    x, y = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0))
    both = tl.info_nce(x, y, symmetric=True)
    torch.testing.assert_close(both, (tl.info_nce(x, y) + tl.info_nce(y, x)) / 2)
    there = torch.tensor([True, True, True, False])
    for side in ("queries", "keys"):
        q, k = x.clone(), y.clone()
        (q if side == "queries" else k)[3] = torch.nan
        k.requires_grad_()
        value = tl.info_nce(q, k, mask=there[:, None] & there, symmetric=True)
        torch.testing.assert_close(value, tl.info_nce(x[:3], y[:3], symmetric=True))
        value.backward()
        assert k.grad.isfinite().all()


def test_info_nce_with_several_positives_is_the_mean_over_them() -> None:
    """L_out, not L_in, of Khosla et al. 2020, arXiv 2004.11362; a query without positives is left out."""
    q, k = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0))
    positives = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 1], [0, 0, 0, 0], [0, 0, 1, 0]]).bool()
    log_p = torch.log_softmax(torch.nn.functional.cosine_similarity(q[:, None], k[None], dim=2) / 0.5, dim=1)
    each = [-log_p[i][there].mean() for i, there in enumerate(positives) if there.any()]
    found = tl.info_nce(q, k, positives=positives, temperature=0.5)
    torch.testing.assert_close(found, torch.stack(each).mean())


def test_the_z_loss_is_divided_by_the_number_of_items_not_by_their_weights() -> None:
    x, t = _t(LOGITS, INDEX)
    weight = torch.arange(1.0, 1.0 + x.shape[1])
    with_it, without = (tl.cross_entropy(x, t, weight=weight, z_loss=z) for z in (0.5, 0.0))
    z_part = 0.5 * torch.logsumexp(x, 1)[t != -100].square().mean()
    torch.testing.assert_close(with_it - without, z_part.to(with_it.dtype))


@pytest.mark.parametrize("shape", [(4, 3), (4, 1), (4,)])
def test_a_variance_without_the_last_dimension_is_the_same_along_it(shape):
    g = torch.Generator().manual_seed(2)
    mean, target = torch.randn(4, 3, generator=g), torch.randn(4, 3, generator=g)
    var = torch.rand(shape, generator=g) + 0.5
    ours = tl.GaussianNLLLoss()(mean, target, var)
    torch.testing.assert_close(ours, torch.nn.GaussianNLLLoss()(mean, target, var))
