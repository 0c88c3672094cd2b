"""Layers and functions of PyTorch beside those of flax (linen and nnx), equinox, jax and optax."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from flax import linen, nnx
from torch import nn
from torch.nn import functional as F  # noqa: N812

import stablenum_jax
import stablenum_torch

KEY = jax.random.key(0)


class Pair(NamedTuple):
    """Two layers.

    Attributes:
        left, right: make the programs.
        cause: what the report must name first; "" if the programs agree, None if no cause is expected, and
            "!word" for any but that one.
        why: what differs, according to the sources.
        weights: as in ``diff``.
        shortfall: what the report says instead, or "".
        refused: part of the message if the parameters cannot be matched, so that ``weights`` is needed.
    """

    left: Callable[[], Any]
    right: Callable[[], Any]
    cause: str | None = ""
    why: str = ""
    weights: Any = "match"
    shortfall: str = ""
    refused: str = ""


# --- programs ----------------------------------------------------------------------------------


def drawn(*shape: int) -> np.ndarray:
    """Return a fixed random array."""
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


FLAT, SEQUENCE, NARROW, IMAGE = drawn(6, 8), drawn(3, 4, 8), drawn(3, 4, 5), drawn(2, 4, 6, 6)
TOKENS = np.array([[0, 3, 1, 2], [4, 0, 0, 5]])


def channels_last(x: Any) -> Any:
    return jnp.moveaxis(jnp.asarray(x), 1, -1)


def channels_first(x: Any) -> Any:
    return jnp.moveaxis(x, -1, 1)


def in_torch(module: nn.Module, x: Any, after: Callable[[Any], Any] = lambda y: y) -> Any:
    """Return a program: the mean of the squares of the output times a fixed array."""
    drawing = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in module.parameters():
            gain = bool((p == 1).all())
            p.copy_(gain + 0.4 * torch.randn(p.shape, generator=drawing))

    def loss_fn(x: Any) -> Any:
        y = after(module(x))
        return (y * torch.from_numpy(drawn(*y.shape))).square().mean()

    return stablenum_torch.program(loss_fn, torch.as_tensor(x), model=module)


def in_jax(params: Any, apply: Callable[[Any, Any], Any], x: Any) -> Any:
    """Return the same of a function of parameters and input; it returns the output in the order of torch."""

    def loss_fn(params: Any, x: Any) -> Any:
        y = apply(params, x)
        return jnp.square(y * drawn(*y.shape)).mean()

    return stablenum_jax.program(loss_fn, params, jnp.asarray(x))


def in_linen(module: linen.Module, x: Any, after: Callable[[Any], Any] = lambda y: y) -> Any:
    params = module.init(KEY, jnp.asarray(x))
    return in_jax(params, lambda p, x: after(module.apply(p, x)), x)


def in_nnx(module: Any, x: Any, after: Callable[[Any], Any] = lambda y: y) -> Any:
    return in_jax(module, lambda m, x: after(m(x)), x)


def in_equinox(module: Any, x: Any) -> Any:
    """Return a program of a layer for one example, mapped over the batch."""
    return in_jax(module, lambda m, x: jax.vmap(m)(x), x)


def functions(left: Callable[[Any], Any], right: Callable[[Any], Any], x: Any) -> tuple[Any, Any]:
    """Return programs of two functions, whose outputs are compared."""
    return (
        lambda: stablenum_torch.program(lambda x: left(x), torch.as_tensor(x)),
        lambda: stablenum_jax.program(lambda _, x: right(x), {}, jnp.asarray(x)),
    )


def named(*parts: str) -> str:
    return ".".join(parts)


def gates(names: str, size: int, x: np.ndarray) -> dict[str, np.ndarray]:
    """Return the rows of each gate."""
    return {name: x[i * size : (i + 1) * size] for i, name in enumerate(names)}


# --- normalisation -----------------------------------------------------------------------------

EPSILON = "the default epsilon is 1e-5 in torch, 1e-6 in flax"

NORMS = {
    "LayerNorm, linen": Pair(
        lambda: in_torch(nn.LayerNorm(8), FLAT),
        lambda: in_linen(linen.LayerNorm(), FLAT),
        "epsilon_value",
        EPSILON,
    ),
    "LayerNorm, linen, same epsilon": Pair(
        lambda: in_torch(nn.LayerNorm(8), FLAT),
        lambda: in_linen(linen.LayerNorm(epsilon=1e-5), FLAT),
    ),
    "LayerNorm, nnx": Pair(
        lambda: in_torch(nn.LayerNorm(8), FLAT),
        lambda: in_nnx(nnx.LayerNorm(8, rngs=nnx.Rngs(0)), FLAT),
        "epsilon_value",
        EPSILON,
    ),
    "LayerNorm, nnx, same epsilon": Pair(
        lambda: in_torch(nn.LayerNorm(8), FLAT),
        lambda: in_nnx(nnx.LayerNorm(8, epsilon=1e-5, rngs=nnx.Rngs(0)), FLAT),
    ),
    "LayerNorm, equinox": Pair(
        lambda: in_torch(nn.LayerNorm(8), FLAT),
        lambda: in_equinox(eqx.nn.LayerNorm(8), FLAT),
    ),
    "GroupNorm, linen": Pair(
        lambda: in_torch(nn.GroupNorm(2, 4), IMAGE),
        lambda: in_linen(linen.GroupNorm(num_groups=2), channels_last(IMAGE), channels_first),
        "epsilon_value",
        EPSILON,
    ),
    "GroupNorm, linen, same epsilon": Pair(
        lambda: in_torch(nn.GroupNorm(2, 4), IMAGE),
        lambda: in_linen(linen.GroupNorm(num_groups=2, epsilon=1e-5), channels_last(IMAGE), channels_first),
    ),
    "GroupNorm, equinox": Pair(
        lambda: in_torch(nn.GroupNorm(2, 4), IMAGE),
        lambda: in_equinox(eqx.nn.GroupNorm(2, 4), IMAGE),
    ),
    "RMSNorm, linen": Pair(
        lambda: in_torch(nn.RMSNorm(8), FLAT),
        lambda: in_linen(linen.RMSNorm(), FLAT),
        "epsilon_value",
        "torch takes the machine epsilon of the format, 1.2e-7 in float32; flax 1e-6",
    ),
    "RMSNorm, linen, same epsilon": Pair(
        lambda: in_torch(nn.RMSNorm(8, eps=1e-6), FLAT),
        lambda: in_linen(linen.RMSNorm(), FLAT),
    ),
    "RMSNorm, equinox": Pair(
        lambda: in_torch(nn.RMSNorm(8), FLAT),
        lambda: in_equinox(eqx.nn.RMSNorm(8, use_bias=False), FLAT),
        "epsilon_value",
        "torch takes the machine epsilon of the format, 1.2e-7 in float32; equinox 1e-5",
    ),
    "RMSNorm, equinox, same epsilon": Pair(
        lambda: in_torch(nn.RMSNorm(8, eps=1e-5), FLAT),
        lambda: in_equinox(eqx.nn.RMSNorm(8, use_bias=False), FLAT),
    ),
}


class ConvNorm(linen.Module):
    """A convolution and a batch norm."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = linen.Conv(5, (3, 3), padding=1, use_bias=False)(x)
        return linen.BatchNorm(use_running_average=False)(x)


def conv_norm() -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 5, 3, padding=1, bias=False), nn.BatchNorm2d(5))


def linen_conv_norm() -> Any:
    module, x = ConvNorm(), channels_last(IMAGE)
    variables = module.init(KEY, x)
    statistics = variables["batch_stats"]

    def apply(params: Any, x: Any) -> Any:
        given = {"params": params, "batch_stats": statistics}
        return channels_first(module.apply(given, x, mutable=["batch_stats"])[0])

    return in_jax(variables["params"], apply, x)


def torch_statistics(momentum: float = 0.1) -> Any:
    """Return a program whose outputs are the running statistics after one batch."""
    norm = nn.BatchNorm2d(4, momentum=momentum)

    def run(x: Any) -> Any:
        norm(x)
        return norm.running_mean, norm.running_var

    return stablenum_torch.program(run, torch.from_numpy(IMAGE), model=norm)


def linen_statistics(module: linen.Module, factor: float = 1.0) -> Any:
    x = channels_last(IMAGE)
    variables = module.init(KEY, x)

    def run(params: Any, x: Any) -> Any:
        _, found = module.apply({**variables, "params": params}, x, mutable=["batch_stats"])
        mean, var = found["batch_stats"]["mean"], found["batch_stats"]["var"]
        return mean, var + (factor - 1) * (var - module.momentum)

    return stablenum_jax.program(run, variables["params"], x)


ROWS = IMAGE.size // IMAGE.shape[1]

BATCH_NORMS = {
    "BatchNorm2d in training, linen": Pair(lambda: in_torch(conv_norm(), IMAGE), linen_conv_norm),
    "running statistics, linen": Pair(
        torch_statistics,
        lambda: linen_statistics(linen.BatchNorm(use_running_average=False)),
        "scale",
        "torch's momentum 0.1 is the share of the new batch, flax's 0.99 that of the old value",
    ),
    "running statistics, linen, same momentum": Pair(
        torch_statistics,
        lambda: linen_statistics(linen.BatchNorm(use_running_average=False, momentum=0.9)),
        "variance_correction",
        "torch's running variance divides by n - 1, flax's by n",
        shortfall="the cause is said to be normalising by running statistics",
    ),
    "running statistics, linen, unbiased": Pair(
        torch_statistics,
        lambda: linen_statistics(linen.BatchNorm(use_running_average=False, momentum=0.9), ROWS / (ROWS - 1)),
    ),
}

# --- convolution, pooling, resizing ------------------------------------------------------------


def flipped(left: Mapping[str, Any], name: str, axes: tuple[int, ...]) -> dict[str, Any]:
    return {name: left["weight"][:, :, ::-1, ::-1].transpose(axes)}


CONVOLUTIONS = {
    "Conv2d, linen": Pair(
        lambda: in_torch(nn.Conv2d(4, 5, 3, padding=1), IMAGE),
        lambda: in_linen(linen.Conv(5, (3, 3)), channels_last(IMAGE), channels_first),
    ),
    "Conv2d with stride, linen": Pair(
        lambda: in_torch(nn.Conv2d(4, 5, 3, stride=2, padding=1), IMAGE),
        lambda: in_linen(linen.Conv(5, (3, 3), strides=2), channels_last(IMAGE), channels_first),
        "padding",
        "padding=1 adds a row on both sides; 'SAME' with stride 2 and an even size adds one at the end alone",
    ),
    "Conv2d with stride, linen, same padding": Pair(
        lambda: in_torch(nn.Conv2d(4, 5, 3, stride=2, padding=1), IMAGE),
        lambda: in_linen(linen.Conv(5, (3, 3), strides=2, padding=1), channels_last(IMAGE), channels_first),
    ),
    "Conv2d, equinox": Pair(
        lambda: in_torch(nn.Conv2d(4, 5, 3, stride=2, padding=1), IMAGE),
        lambda: in_equinox(eqx.nn.Conv2d(4, 5, 3, stride=2, padding=1, key=KEY), IMAGE),
    ),
    "ConvTranspose2d, linen": Pair(
        lambda: in_torch(nn.ConvTranspose2d(4, 5, 4, stride=2, padding=1, bias=False), IMAGE),
        lambda: in_linen(
            linen.ConvTranspose(5, (4, 4), strides=(2, 2), use_bias=False),
            channels_last(IMAGE),
            channels_first,
        ),
        "flipped_kernel",
        "torch flips the kernel, flax does not",
        weights=lambda left: {named("params", "kernel"): left["weight"].transpose(2, 3, 0, 1)},
    ),
    "ConvTranspose2d, linen, flipped": Pair(
        lambda: in_torch(nn.ConvTranspose2d(4, 5, 4, stride=2, padding=1, bias=False), IMAGE),
        lambda: in_linen(
            linen.ConvTranspose(5, (4, 4), strides=(2, 2), use_bias=False),
            channels_last(IMAGE),
            channels_first,
        ),
        weights=lambda left: flipped(left, named("params", "kernel"), (2, 3, 0, 1)),
    ),
    "ConvTranspose2d, linen, transpose_kernel": Pair(
        lambda: in_torch(nn.ConvTranspose2d(4, 5, 4, stride=2, padding=1, bias=False), IMAGE),
        lambda: in_linen(
            linen.ConvTranspose(5, (4, 4), strides=(2, 2), use_bias=False, transpose_kernel=True),
            channels_last(IMAGE),
            channels_first,
        ),
    ),
    "ConvTranspose2d, equinox": Pair(
        lambda: in_torch(nn.ConvTranspose2d(4, 5, 4, stride=2, padding=1, bias=False), IMAGE),
        lambda: in_equinox(
            eqx.nn.ConvTranspose2d(4, 5, 4, stride=2, padding=1, use_bias=False, key=KEY), IMAGE
        ),
        "flipped_kernel",
        "torch flips the kernel, equinox does not",
        weights=lambda left: {"weight": left["weight"].transpose(1, 0, 2, 3)},
    ),
    "ConvTranspose2d, equinox, flipped": Pair(
        lambda: in_torch(nn.ConvTranspose2d(4, 5, 4, stride=2, padding=1, bias=False), IMAGE),
        lambda: in_equinox(
            eqx.nn.ConvTranspose2d(4, 5, 4, stride=2, padding=1, use_bias=False, key=KEY), IMAGE
        ),
        weights=lambda left: flipped(left, "weight", (1, 0, 2, 3)),
    ),
}


def last(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function of channels-last images as one of channels-first ones."""
    return lambda x: channels_first(function(channels_last(x)))


POOLS = {
    "AvgPool2d with padding, linen": Pair(
        *functions(
            nn.AvgPool2d(3, 2, padding=1),
            last(lambda x: linen.avg_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))),
            IMAGE,
        )
    ),
    "AvgPool2d, linen, SAME": Pair(
        *functions(
            nn.AvgPool2d(3, 2, padding=1), last(lambda x: linen.avg_pool(x, (3, 3), (2, 2), "SAME")), IMAGE
        ),
        "padding",
        "padding=1 adds a row on both sides; 'SAME' with stride 2 and an even size adds one at the end alone",
    ),
    "AvgPool2d without counting the padding, linen": Pair(
        *functions(
            nn.AvgPool2d(3, 2, padding=1, count_include_pad=False),
            last(lambda x: linen.avg_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))),
            IMAGE,
        ),
        "pooling_count",
        "the zeros of the padding are counted or not",
    ),
    "AvgPool2d without counting the padding, linen, same": Pair(
        *functions(
            nn.AvgPool2d(3, 2, padding=1, count_include_pad=False),
            last(
                lambda x: linen.avg_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)), count_include_pad=False),
            ),
            IMAGE,
        )
    ),
    "AvgPool2d, equinox": Pair(
        *functions(
            nn.AvgPool2d(3, 2, padding=1), lambda x: jax.vmap(eqx.nn.AvgPool2d(3, 2, padding=1))(x), IMAGE
        )
    ),
    "AvgPool2d, equinox, default stride": Pair(
        *functions(nn.AvgPool2d(2, 2), lambda x: jax.vmap(eqx.nn.AvgPool2d(2, 2))(x), IMAGE)
    ),
    "MaxPool2d with padding, linen": Pair(
        *functions(
            nn.MaxPool2d(3, 2, padding=1),
            last(lambda x: linen.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))),
            IMAGE,
        )
    ),
    "MaxPool2d, linen, SAME": Pair(
        *functions(
            nn.MaxPool2d(3, 2, padding=1), last(lambda x: linen.max_pool(x, (3, 3), (2, 2), "SAME")), IMAGE
        ),
        "padding",
        "padding=1 adds a row on both sides; 'SAME' with stride 2 and an even size adds one at the end alone",
    ),
}


RESIZING = {
    "interpolate, bilinear up": Pair(
        *functions(
            lambda x: F.interpolate(x, size=(9, 9), mode="bilinear"),
            lambda x: jax.image.resize(x, (2, 4, 9, 9), "bilinear"),
            IMAGE,
        )
    ),
    "interpolate, bilinear down": Pair(
        *functions(
            lambda x: F.interpolate(x, size=(4, 4), mode="bilinear"),
            lambda x: jax.image.resize(x, (2, 4, 4, 4), "bilinear"),
            IMAGE,
        ),
        "resize_mode",
        "jax filters before it shrinks (antialias=True), torch does not",
    ),
    "interpolate, bilinear down, no antialias": Pair(
        *functions(
            lambda x: F.interpolate(x, size=(4, 4), mode="bilinear"),
            lambda x: jax.image.resize(x, (2, 4, 4, 4), "bilinear", antialias=False),
            IMAGE,
        )
    ),
    "interpolate, bilinear down, antialias": Pair(
        *functions(
            lambda x: F.interpolate(x, size=(4, 4), mode="bilinear", antialias=True),
            lambda x: jax.image.resize(x, (2, 4, 4, 4), "bilinear"),
            IMAGE,
        )
    ),
    "interpolate, align_corners": Pair(
        *functions(
            lambda x: F.interpolate(x, size=(9, 9), mode="bilinear", align_corners=True),
            lambda x: jax.image.resize(x, (2, 4, 9, 9), "bilinear"),
            IMAGE,
        ),
        "resize_mode",
        "jax takes the centres of the pixels (align_corners=False)",
    ),
    "interpolate, bicubic": Pair(
        *functions(
            lambda x: F.interpolate(x, size=(9, 9), mode="bicubic"),
            lambda x: jax.image.resize(x, (2, 4, 9, 9), "bicubic"),
            IMAGE,
        ),
        "resize_mode",
        "the cubic has a = -0.75 in torch and -0.5 in jax",
    ),
    "interpolate, bicubic, same": Pair(
        *functions(
            lambda x: F.interpolate(x, size=(9, 9), mode="bicubic"),
            lambda x: jax.image.resize(x, (2, 4, 9, 9), "bicubic-pytorch", antialias=False),
            IMAGE,
        )
    ),
    "interpolate, bicubic, antialias": Pair(
        *functions(
            lambda x: F.interpolate(x, size=(9, 9), mode="bicubic", antialias=True),
            lambda x: jax.image.resize(x, (2, 4, 9, 9), "bicubic"),
            IMAGE,
        )
    ),
    "interpolate, nearest": Pair(
        *functions(
            lambda x: F.interpolate(x, size=(9, 9), mode="nearest"),
            lambda x: jax.image.resize(x, (2, 4, 9, 9), "nearest"),
            IMAGE,
        ),
        "resize_mode",
        "torch takes floor(i s), jax floor((i + 1/2) s)",
    ),
    "interpolate, nearest-exact": Pair(
        *functions(
            lambda x: F.interpolate(x, size=(9, 9), mode="nearest-exact"),
            lambda x: jax.image.resize(x, (2, 4, 9, 9), "nearest"),
            IMAGE,
        )
    ),
}

# --- functions and losses ----------------------------------------------------------------------


def probabilities(x: Any) -> Any:
    return jax.nn.log_softmax(x[:3]), jax.nn.softmax(x[3:])


def torch_kl(x: Any, reduction: str) -> Any:
    return F.kl_div(x[:3].log_softmax(-1), x[3:].softmax(-1), reduction=reduction)


LABELS, CLASS_WEIGHTS = np.array([0, 3, 1, 3, 5, 7]), np.linspace(0.5, 2.0, 8, dtype=np.float32)


def torch_weighted(x: Any, smoothing: float) -> Any:
    y, w = torch.tensor(LABELS), torch.tensor(CLASS_WEIGHTS)
    return F.cross_entropy(x, y, weight=w, label_smoothing=smoothing)[None]


def jax_weighted(x: Any, how: str) -> Any:
    y, w = jnp.asarray(LABELS), jnp.asarray(CLASS_WEIGHTS)
    losses = optax.softmax_cross_entropy_with_integer_labels(x, y)
    targets = optax.smooth_labels(jax.nn.one_hot(y, 8), 0.1)
    if how == "mean":
        return (w[y] * losses).mean()[None]
    if how == "sum":
        return ((w[y] * losses).sum() / w[y].sum())[None]
    if how == "smoothed":
        return ((w[y] * optax.softmax_cross_entropy(x, targets)).sum() / w[y].sum())[None]
    return (optax.softmax_cross_entropy(x, w * targets).sum() / w[y].sum())[None]


FUNCTIONS = {
    "gelu": Pair(
        *functions(F.gelu, jax.nn.gelu, FLAT),
        "gelu_variant",
        "jax.nn.gelu is the approximation by tanh, F.gelu is exact",
    ),
    "gelu, exact": Pair(*functions(F.gelu, lambda x: jax.nn.gelu(x, approximate=False), FLAT)),
    "gelu, tanh": Pair(*functions(lambda x: F.gelu(x, approximate="tanh"), jax.nn.gelu, FLAT)),
    "std": Pair(
        *functions(lambda x: x.std(dim=-1), lambda x: jnp.std(x, axis=-1), FLAT),
        "variance_correction",
        "torch divides by n - 1, jax by n",
    ),
    "std, same": Pair(*functions(lambda x: x.std(dim=-1), lambda x: jnp.std(x, axis=-1, ddof=1), FLAT)),
    "median": Pair(
        *functions(lambda x: x.median(dim=-1).values, lambda x: jnp.median(x, axis=-1), FLAT),
        None,
        "of an even number of values torch takes the lower middle one, jax the mean of the two",
    ),
    "median, same": Pair(
        *functions(lambda x: x.quantile(0.5, dim=-1), lambda x: jnp.median(x, axis=-1), FLAT)
    ),
    "mse_loss": Pair(
        *functions(
            lambda x: F.mse_loss(x[:3], x[3:], reduction="none"), lambda x: optax.l2_loss(x[:3], x[3:]), FLAT
        ),
        "scale",
        "optax.l2_loss is half the square",
    ),
    "mse_loss, same": Pair(
        *functions(
            lambda x: F.mse_loss(x[:3], x[3:], reduction="none"),
            lambda x: optax.squared_error(x[:3], x[3:]),
            FLAT,
        ),
    ),
    "smooth_l1_loss": Pair(
        *functions(
            lambda x: F.smooth_l1_loss(x[:3], x[3:], beta=0.5, reduction="none"),
            lambda x: optax.huber_loss(x[:3], x[3:], delta=0.5),
            FLAT,
        ),
        "scale",
        "smooth_l1_loss divides by beta, huber_loss does not",
    ),
    "smooth_l1_loss, same": Pair(
        *functions(
            lambda x: F.huber_loss(x[:3], x[3:], delta=0.5, reduction="none"),
            lambda x: optax.huber_loss(x[:3], x[3:], delta=0.5),
            FLAT,
        ),
    ),
    "kl_div": Pair(
        *functions(
            lambda x: torch_kl(x, "mean"), lambda x: optax.kl_divergence(*probabilities(x)).mean()[None], FLAT
        ),
        "scale",
        "reduction='mean' divides by the number of elements, not by that of the rows",
    ),
    "kl_div, same": Pair(
        *functions(
            lambda x: torch_kl(x, "batchmean"),
            lambda x: optax.kl_divergence(*probabilities(x)).mean()[None],
            FLAT,
        ),
    ),
    "cross_entropy, weights": Pair(
        *functions(lambda x: torch_weighted(x, 0.0), lambda x: jax_weighted(x, "mean"), FLAT),
        "reduction",
        "torch divides by the sum of the weights of the labels, a mean by the number of the rows",
    ),
    "cross_entropy, weights, same": Pair(
        *functions(lambda x: torch_weighted(x, 0.0), lambda x: jax_weighted(x, "sum"), FLAT),
    ),
    "cross_entropy, weights, smoothed": Pair(
        *functions(lambda x: torch_weighted(x, 0.1), lambda x: jax_weighted(x, "smoothed"), FLAT),
        None,
        "torch weights each class in the smoothing, too, and not by the label of the row",
    ),
    "cross_entropy, weights, smoothed, same": Pair(
        *functions(lambda x: torch_weighted(x, 0.1), lambda x: jax_weighted(x, "same"), FLAT),
    ),
    "cross_entropy, smoothed": Pair(
        *functions(
            lambda x: F.cross_entropy(x, torch.tensor(LABELS), label_smoothing=0.1)[None],
            lambda x: optax.softmax_cross_entropy(
                x, optax.smooth_labels(jax.nn.one_hot(jnp.asarray(LABELS), 8), 0.1)
            ).mean()[None],
            FLAT,
        ),
    ),
}

# --- embeddings, attention ---------------------------------------------------------------------


class Attention(nn.Module):
    """Self-attention with a mask."""

    def __init__(self, mask: Any = None, *, bias: bool = True) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, bias=bias)
        self.mask = None if mask is None else torch.tensor(mask)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, attn_mask=self.mask, need_weights=False)[0]


class LinenAttention(linen.Module):
    """Self-attention with a mask."""

    mask: Any = None

    @linen.compact
    def __call__(self, x: Any) -> Any:
        return linen.MultiHeadDotProductAttention(num_heads=2)(x, x, mask=self.mask)


class Encoder(linen.Module):
    """A layer of an encoder, with the norms after the sums."""

    epsilon: float = 1e-6

    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = linen.LayerNorm(epsilon=self.epsilon)(x + linen.MultiHeadDotProductAttention(num_heads=2)(x, x))
        h = linen.Dense(8)(linen.relu(linen.Dense(16)(x)))
        return linen.LayerNorm(epsilon=self.epsilon)(x + h)


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, dropout=0.0, batch_first=True)


def equinox_attention(**options: Any) -> Any:
    module = eqx.nn.MultiheadAttention(2, 8, key=KEY, **options)
    return in_jax(module, lambda m, x: jax.vmap(lambda row: m(row, row, row))(x), SEQUENCE)


def attention_in_equinox(left: Mapping[str, Any]) -> dict[str, Any]:
    parts = np.split(left["attention.in_proj_weight"], 3)
    found = {f"{name}_proj.weight": x for name, x in zip(("query", "key", "value"), parts, strict=True)}
    return {**found, "output_proj.weight": left["attention.out_proj.weight"]}


BIASES = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}
CAUSAL = np.tril(np.ones((4, 4), bool))
EVERY_OTHER = np.indices((4, 4)).sum(0) % 2 == 0

ATTENTION = {
    "Embedding, linen": Pair(
        lambda: in_torch(nn.Embedding(6, 8), TOKENS), lambda: in_linen(linen.Embed(6, 8), TOKENS)
    ),
    "Embedding with padding_idx, linen": Pair(
        lambda: in_torch(nn.Embedding(6, 8, padding_idx=0), TOKENS),
        lambda: in_linen(linen.Embed(6, 8), TOKENS),
        "stopped_gradient",
        "the row of padding_idx has no gradient",
    ),
    "Embedding, equinox": Pair(
        lambda: in_torch(nn.Embedding(6, 8), TOKENS),
        lambda: in_jax(eqx.nn.Embedding(6, 8, key=KEY), lambda m, x: jax.vmap(jax.vmap(m))(x), TOKENS),
    ),
    "MultiheadAttention, linen": Pair(
        lambda: in_torch(Attention(), SEQUENCE),
        lambda: in_linen(LinenAttention(), SEQUENCE),
    ),
    "MultiheadAttention, nnx": Pair(
        lambda: in_torch(Attention(), SEQUENCE),
        lambda: in_nnx(nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0)), SEQUENCE),
    ),
    "MultiheadAttention, equinox": Pair(
        lambda: in_torch(Attention(bias=False), SEQUENCE), lambda: equinox_attention()
    ),
    "MultiheadAttention with biases, equinox": Pair(
        lambda: in_torch(Attention(), SEQUENCE), lambda: equinox_attention(**BIASES)
    ),
    "MultiheadAttention, equinox, weights given": Pair(
        lambda: in_torch(Attention(bias=False), SEQUENCE),
        lambda: equinox_attention(),
        weights=attention_in_equinox,
    ),
    "attention mask, linen": Pair(
        lambda: in_torch(Attention(~EVERY_OTHER), SEQUENCE),
        lambda: in_linen(LinenAttention(~EVERY_OTHER), SEQUENCE),
        "mask_missing",
        "True means hidden in nn.MultiheadAttention, seen in flax",
    ),
    "attention mask, linen, a row that sees nothing": Pair(
        lambda: in_torch(Attention(~CAUSAL), SEQUENCE),
        lambda: in_linen(LinenAttention(~CAUSAL), SEQUENCE),
        "mask_missing",
        "True means hidden in nn.MultiheadAttention, seen in flax",
    ),
    "attention mask, linen, inverted": Pair(
        lambda: in_torch(Attention(~CAUSAL), SEQUENCE),
        lambda: in_linen(LinenAttention(CAUSAL), SEQUENCE),
    ),
    "TransformerEncoderLayer, linen": Pair(
        lambda: in_torch(encoder(), SEQUENCE),
        lambda: in_linen(Encoder(), SEQUENCE),
        "epsilon_value",
        EPSILON,
    ),
    "TransformerEncoderLayer, linen, same epsilon": Pair(
        lambda: in_torch(encoder(), SEQUENCE),
        lambda: in_linen(Encoder(epsilon=1e-5), SEQUENCE),
    ),
}

# --- recurrent layers --------------------------------------------------------------------------


def lstm_in_linen(left: Mapping[str, Any]) -> dict[str, Any]:
    """Return linen's gates: the two biases of torch are one."""
    found = {}
    bias = gates("ifgo", 8, left["bias_ih_l0"] + left["bias_hh_l0"])
    for side, weight in (("i", left["weight_ih_l0"]), ("h", left["weight_hh_l0"])):
        for gate, rows in gates("ifgo", 8, weight).items():
            found[named("params", "cell", side + gate, "kernel")] = rows.T
    found.update({named("params", "cell", "h" + gate, "bias"): rows for gate, rows in bias.items()})
    return found


def lstm_in_equinox(left: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "weight_ih": left["weight_ih_l0"],
        "weight_hh": left["weight_hh_l0"],
        "bias": left["bias_ih_l0"] + left["bias_hh_l0"],
    }


def gru_in_linen(left: Mapping[str, Any]) -> dict[str, Any]:
    """Return linen's gates: the biases of reset and update are one, those of the candidate two."""
    found = {}
    for side, weight in (("i", left["weight_ih_l0"]), ("h", left["weight_hh_l0"])):
        for gate, rows in gates("rzn", 8, weight).items():
            found[named("params", "cell", side + gate, "kernel")] = rows.T
    inner, outer = gates("rzn", 8, left["bias_ih_l0"]), gates("rzn", 8, left["bias_hh_l0"])
    found[named("params", "cell", "ir", "bias")] = inner["r"] + outer["r"]
    found[named("params", "cell", "iz", "bias")] = inner["z"] + outer["z"]
    found[named("params", "cell", "in", "bias")] = inner["n"]
    found[named("params", "cell", "hn", "bias")] = outer["n"]
    return found


def gru_in_equinox(left: Mapping[str, Any]) -> dict[str, Any]:
    outer = gates("rzn", 8, left["bias_hh_l0"])
    both = np.concatenate([outer["r"], outer["z"], 0 * outer["n"]])
    return {
        "weight_ih": left["weight_ih_l0"],
        "weight_hh": left["weight_hh_l0"],
        "bias": left["bias_ih_l0"] + both,
        "bias_n": outer["n"],
    }


def gru_in_nnx(left: Mapping[str, Any]) -> dict[str, Any]:
    """Return nnx's arrays: it has one bias for each gate, and none inside the product with the reset gate."""
    return {
        named("cell", "dense_i", "kernel"): left["weight_ih_l0"].T,
        named("cell", "dense_h", "kernel"): left["weight_hh_l0"].T,
        named("cell", "dense_i", "bias"): left["bias_ih_l0"] + left["bias_hh_l0"],
    }


def torch_rnn(module: nn.Module, x: Any = NARROW) -> Any:
    return in_torch(module, x, lambda y: y[0])


def gru_without_inner_bias() -> Any:
    """Return a program in which the bias inside the product with the reset gate is zero."""
    module = nn.GRU(5, 8, batch_first=True)
    program = torch_rnn(module)
    with torch.no_grad():
        module.bias_hh_l0[16:] = 0
    return program


def linen_rnn(cell: linen.RNNCellBase, x: Any = NARROW) -> Any:
    return in_linen(linen.RNN(cell), x)


def nnx_rnn(cell: Any) -> Any:
    return in_nnx(nnx.RNN(cell, rngs=nnx.Rngs(0)), NARROW)


def equinox_scan(cell: Any, start: Any, output: Callable[[Any], Any]) -> Any:
    def run(cell: Any, x: Any) -> Any:
        def step(h: Any, row: Any) -> tuple[Any, Any]:
            h = cell(row, h)
            return h, output(h)

        return jax.vmap(lambda rows: jax.lax.scan(step, start, rows)[1])(x)

    return in_jax(cell, run, NARROW)


ZERO = jnp.zeros(8)
BIAS_IN_GATE = "torch has a bias b_hn inside the product with the reset gate, nnx.GRUCell has not"

RECURRENT = {
    "LSTM, linen": Pair(
        lambda: torch_rnn(nn.LSTM(5, 8, batch_first=True)),
        lambda: linen_rnn(linen.OptimizedLSTMCell(8)),
        weights=lstm_in_linen,
    ),
    "LSTM, linen, matched": Pair(
        lambda: torch_rnn(nn.LSTM(5, 8, batch_first=True)), lambda: linen_rnn(linen.OptimizedLSTMCell(8))
    ),
    "LSTM, linen, matched, as wide as its input": Pair(
        lambda: torch_rnn(nn.LSTM(8, 8, batch_first=True), SEQUENCE),
        lambda: linen_rnn(linen.OptimizedLSTMCell(8), SEQUENCE),
    ),
    "LSTM, equinox": Pair(
        lambda: torch_rnn(nn.LSTM(5, 8, batch_first=True)),
        lambda: equinox_scan(eqx.nn.LSTMCell(5, 8, key=KEY), (ZERO, ZERO), lambda h: h[0]),
        weights=lstm_in_equinox,
    ),
    "LSTM, equinox, matched": Pair(
        lambda: torch_rnn(nn.LSTM(5, 8, batch_first=True)),
        lambda: equinox_scan(eqx.nn.LSTMCell(5, 8, key=KEY), (ZERO, ZERO), lambda h: h[0]),
    ),
    "GRU, linen": Pair(
        lambda: torch_rnn(nn.GRU(5, 8, batch_first=True)),
        lambda: linen_rnn(linen.GRUCell(8)),
        weights=gru_in_linen,
    ),
    "GRU, linen, matched": Pair(
        lambda: torch_rnn(nn.GRU(5, 8, batch_first=True)), lambda: linen_rnn(linen.GRUCell(8))
    ),
    "GRU, linen, matched, as wide as its input": Pair(
        lambda: torch_rnn(nn.GRU(8, 8, batch_first=True), SEQUENCE),
        lambda: linen_rnn(linen.GRUCell(8), SEQUENCE),
    ),
    "GRU, equinox": Pair(
        lambda: torch_rnn(nn.GRU(5, 8, batch_first=True)),
        lambda: equinox_scan(eqx.nn.GRUCell(5, 8, key=KEY), ZERO, lambda h: h),
        weights=gru_in_equinox,
    ),
    "GRU, equinox, matched": Pair(
        lambda: torch_rnn(nn.GRU(5, 8, batch_first=True)),
        lambda: equinox_scan(eqx.nn.GRUCell(5, 8, key=KEY), ZERO, lambda h: h),
        refused="bias_n",
    ),
    "GRU, nnx": Pair(
        lambda: torch_rnn(nn.GRU(5, 8, batch_first=True)),
        lambda: nnx_rnn(nnx.GRUCell(5, 8, rngs=nnx.Rngs(0))),
        "!extra_operation",
        BIAS_IN_GATE,
        weights=gru_in_nnx,
    ),
    "GRU, nnx, no inner bias": Pair(
        gru_without_inner_bias,
        lambda: nnx_rnn(nnx.GRUCell(5, 8, rngs=nnx.Rngs(0))),
        weights=gru_in_nnx,
    ),
}

PAIRS: dict[str, Pair] = {
    **NORMS, **BATCH_NORMS, **CONVOLUTIONS, **POOLS, **RESIZING, **FUNCTIONS, **ATTENTION, **RECURRENT,
}  # fmt: skip
