"""The attention kernels of cuDNN, which know no float64, as their formula."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["formula_of"]

_FORWARD, _BACKWARD = "dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper"
_BNTH = 1  # the layout with the heads before the positions
_PADDED, _CAUSAL, _KNOWN = ("PADDING", "PADDING_CAUSAL"), ("CAUSAL", "PADDING_CAUSAL"), ("NO_MASK",)


def formula_of(
    name: str, inputs: Sequence[Any], params: Mapping[str, Any]
) -> Callable[..., Sequence[Any]] | None:
    """Return the formula of a kernel as a function of its inputs; None for what is no kernel of attention, or
    one that drops entries, reads pages or packs several sequences into one.

    Args:
        name: the primitive.
        inputs: query, key, value, bias, the lengths of queries and of keys, their offsets and two tables of
            pages, all empty where they are not used; in the backward pass, then the logarithms of the sums,
            the output and its gradient.
        params: those of the equation.
    """
    if name not in (_FORWARD, _BACKWARD):
        return None
    unused = inputs[6:10]  # offsets and pages
    if (
        params["dropout_rate"]
        or any(x.size for x in unused)
        or _mask(params) not in (*_KNOWN, *_PADDED, *_CAUSAL)
    ):
        return None
    return (lambda *xs: _forward(xs, params)) if name == _FORWARD else (lambda *xs: _backward(xs, params))


def _forward(inputs: Sequence[Any], params: Mapping[str, Any]) -> Sequence[Any]:
    out, sums = _attention(inputs, params)
    return (out, sums) if params["is_training"] else (out,)


def _backward(inputs: Sequence[Any], params: Mapping[str, Any]) -> Sequence[Any]:
    has_bias_gradient = params["variadic_args"][1]
    chosen = inputs[: 4 if has_bias_gradient else 3]

    def out_of(*xs: Any) -> Any:
        return _attention((*xs, *inputs[len(xs) :]), params)[0]

    return jax.vjp(out_of, *chosen)[1](inputs[-1])


def _attention(inputs: Sequence[Any], params: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the output, and the logarithm of the sum of exponentials of each row."""
    query, key, value = (_heads_first(x, params) for x in inputs[:3])
    groups = query.shape[1] // key.shape[1]
    key, value = (jnp.repeat(x, groups, axis=1) for x in (key, value))
    logits = params["scale"] * jnp.einsum("bnth,bnsh->bnts", query, key)
    if params["variadic_args"][0]:
        logits = logits + inputs[3]
    seen, answered = _seen(logits.shape, inputs, params)
    logits = jnp.where(seen, logits, -jnp.inf)
    # Finite, so that a row of which nothing is seen has no inf - inf.
    top = jax.lax.stop_gradient(jnp.maximum(logits.max(-1, keepdims=True), -1e300))
    weights = jnp.exp(logits - top)
    total = weights.sum(-1, keepdims=True)
    weights = jnp.where(answered, weights / jnp.where(total > 0, total, 1.0), 0.0)
    out = jnp.einsum("bnts,bnsh->bnth", weights, value)
    return _heads_first(out, params), (top + jnp.log(jnp.where(total > 0, total, 1.0)))[..., 0]


def _heads_first(x: Any, params: Mapping[str, Any]) -> Any:
    """Exchange positions and heads, unless the layout has the heads first."""
    return x if params["layout"] == _BNTH else jnp.swapaxes(x, 1, 2)


def _seen(shape: Sequence[int], inputs: Sequence[Any], params: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return which keys each query sees, and which queries lie within their sequence."""
    rows, columns = jnp.arange(shape[2])[:, None], jnp.arange(shape[3])
    seen, answered = jnp.ones(shape[2:], bool)[None, None], jnp.ones((1, 1, shape[2], 1), bool)
    if _mask(params) in _CAUSAL:
        seen = seen & (columns <= rows)
    if params["sliding_window_length"]:
        seen = seen & (columns > rows - params["sliding_window_length"])
    if _mask(params) in _PADDED:
        of_queries, of_keys = (x.reshape(-1, 1, 1, 1) for x in inputs[4:6])
        seen, answered = seen & (columns < of_keys), rows < of_queries
    return seen, answered


def _mask(params: Mapping[str, Any]) -> str:
    return str(params["mask_type"].name)
