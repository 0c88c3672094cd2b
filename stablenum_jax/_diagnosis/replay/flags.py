"""Find whether an array contains NaN, inf or -inf, and compute the statistics that a report shows."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import jit

from stablenum.diagnosis import TensorStats
from stablenum.diagnosis.replay.outliers import Outliers, outliers_in
from stablenum_jax._diagnosis.replay.processes import asked, is_on_host, spans
from stablenum_jax._trees.leaves import is_floating

__all__ = ["CLEAN", "Flags", "device_flags", "flags_in", "flags_of", "outliers_of", "stats_of"]

Flags = tuple[bool, bool, bool]
CLEAN: Flags = (False, False, False)
# The bits of the exponent, all of which are set in NaN and in infinities.
_EXPONENTS = {"float16": 0x7C00, "bfloat16": 0x7F80}


def flags_of(x: Any) -> Flags:
    """Return whether a concrete array holds any NaN, any inf and any -inf. This takes one pass, and no copy
    if the array is in host memory."""
    if not is_floating(x):
        return CLEAN
    if spans(x):
        nan, posinf, neginf = asked(flags_in, x).tolist()
        return nan, posinf, neginf
    if isinstance(x, jax.Array) and not is_on_host(x):
        nan, posinf, neginf = np.asarray(device_flags(x)).tolist()
        return nan, posinf, neginf
    a = np.asarray(x)
    if a.dtype.kind == "c":
        re, im = flags_of(a.real), flags_of(a.imag)
        return re[0] or im[0], re[1] or im[1], re[2] or im[2]
    if a.dtype.kind == "f" and a.dtype.itemsize >= 4:
        if np.isfinite(a).all():
            return CLEAN
    elif (exponent := _EXPONENTS.get(a.dtype.name)) is not None:
        bad = a.view(np.uint16) & exponent == exponent
        if not bad.any():
            return CLEAN
        a = a[bad].astype(np.float32)
    else:  # 8 bits and fewer
        a = a.astype(np.float32)
    return bool(np.isnan(a).any()), bool(np.isposinf(a).any()), bool(np.isneginf(a).any())


def flags_in(x: Any) -> Any:
    """Return the flags of an array under jit, as one (3,) bool array."""
    if not is_floating(x):
        return jnp.zeros(3, bool)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return flags_in(jnp.real(x)) | flags_in(jnp.imag(x))
    x = jnp.asarray(x).astype(jnp.promote_types(x.dtype, jnp.float32))
    return jnp.stack([jnp.isnan(x).any(), jnp.isposinf(x).any(), jnp.isneginf(x).any()])


device_flags = jit(flags_in)


def stats_of(x: Any, name: str = "", at: Any = None) -> TensorStats | None:
    """Return counts and extremes; None for an array that has none (random keys).

    Args:
        x: any array.
        name: shown with the statistics.
        at: an array of the same shape; values are kept where it is not finite.
    """
    if jnp.issubdtype(getattr(x, "dtype", np.float32), jax.dtypes.extended):
        return None
    a = np.asarray(x)
    dtype, shape = a.dtype.name, tuple(a.shape)
    if a.dtype.kind == "c":
        a = np.stack([a.real, a.imag])
    if a.dtype.kind not in "fiub" and not is_floating(x):
        return None
    tiny = float(jnp.finfo(x.dtype).tiny) if is_floating(x) and a.dtype.kind != "c" else 0.0
    wide = a.astype(np.float64).ravel()
    finite = wide[np.isfinite(wide)]
    bad = wide[~np.isfinite(wide)]
    counts = {
        "nan": np.isnan(wide),
        "posinf": np.isposinf(wide),
        "neginf": np.isneginf(wide),
        "zero": wide == 0.0,
    }
    magnitude = np.abs(finite)
    extremes = (
        (float(finite.min()), float(finite.max()), float(magnitude.max())) if finite.size else (math.nan,) * 3
    )
    return TensorStats(
        dtype=dtype,
        shape=shape,
        size=int(np.prod(shape, dtype=np.int64)),
        min=extremes[0],
        max=extremes[1],
        amax=extremes[2],
        **{k: int(np.count_nonzero(v)) for k, v in counts.items()},
        subnormal=int(np.count_nonzero((magnitude > 0.0) & (magnitude < tiny))),
        values=tuple(float(v) for v in _some(wide, bad, shape, at)),
        name=name,
    )


def outliers_of(x: Any) -> Outliers | None:
    """Return the entries that are far from the rest; None for none, and for arrays of other processes."""
    if not is_floating(x) or spans(x):
        return None
    sizes = np.abs(np.asarray(x))
    sizes = sizes if sizes.dtype.itemsize >= 4 else sizes.astype(np.float32)
    return outliers_in(np.where(np.isfinite(sizes), sizes, 0), np.median)


def _some(wide: np.ndarray, bad: np.ndarray, shape: tuple[int, ...], at: Any) -> np.ndarray:
    if at is not None and (wide.size != math.prod(shape) or jnp.iscomplexobj(at)):
        return wide[:0]  # complex numbers, of which the parts are beside each other
    if at is not None:
        where = ~np.isfinite(np.asarray(at).astype(np.float64))
        return wide[where.ravel()][:4] if where.shape == shape else wide[:0]
    return (bad if bad.size else wide)[:4]
