"""Propose edits that keep an argument inside the range of a function that has no safe form."""

from __future__ import annotations

import math

from stablenum.diagnosis.edits.edit import Edit, segment
from stablenum.diagnosis.edits.expressions import called, expression_at, span_of
from stablenum.diagnosis.replay.argument_remedies import largest_exponent
from stablenum.diagnosis.replay.findings import Finding
from stablenum.formats import FORMATS

__all__ = ["bounded"]

# So far inside a domain: float32 has an ulp of 6e-8 below 1. The advice of a report names the same number.
_INSIDE = 1e-6
# The lower and the upper bound of the argument; None for none.
_BOUNDS: dict[str, tuple[float | None, float | None]] = {
    "acosh": (1 + _INSIDE, None),
    "asin": (_INSIDE - 1, 1 - _INSIDE),
    "digamma": (_INSIDE, None),
    "entr": (0.0, None),
    "erfinv": (_INSIDE - 1, 1 - _INSIDE),
    "exp1": (_INSIDE, None),
    "lgamma": (_INSIDE, None),
    "log10": (_INSIDE, None),
    "log1p": (_INSIDE - 1, None),
    "log2": (_INSIDE, None),
    "logit": (_INSIDE, 1 - _INSIDE),
    "ndtri": (_INSIDE, 1 - _INSIDE),
}
_EXPONENTIALS = ("cosh", "exp", "expm1", "sinh")
# How operations are written that have other names in the source.
_WRITTEN = {"acosh": ("acosh", "arccosh"), "asin": ("asin", "arcsin")}


def bounded(finding: Finding, framework: str, source: str) -> list[Edit]:
    """Return an edit that clamps what the finding's function is given; none if it is no such function, or if
    the argument is not in the expression.

    Args:
        finding: the first finding.
        framework: "torch" or "jax".
        source: the text of the finding's file.

    Example:
        >>> from stablenum.diagnosis.replay.values import Place
        >>> at = Place("a.py", 2, "", "y = torch.asin(x / r)", (2, 2, 4, 21))
        >>> f = Finding(operation="asin", phase="forward", kind="nan", place=at)
        >>> bounded(f, "torch", "import torch\\ny = torch.asin(x / r)\\n")[0].after
        'torch.clamp(x / r, min=-0.999999, max=0.999999)'
    """
    place, bounds = finding.place, _bounds(finding)
    found = expression_at(place, source)
    if place is None or found is None or bounds is None:
        return []
    written = called(found[1])
    names = _WRITTEN.get(finding.operation, (finding.operation,))
    if written is None or written.name not in names or not written.operands:
        return []
    span = span_of(written.operands[0])
    if span is None:
        return []
    before = segment(source, span)
    words = [
        f"{word}={value:.7g}" for word, value in zip(("min", "max"), bounds, strict=True) if value is not None
    ]
    function, module = _clamp(framework, source)
    after = f"{function}({', '.join([before, *words])})"
    return [Edit(file=place.file, span=span, before=before, after=after, module=module)]


def _bounds(finding: Finding) -> tuple[float | None, float | None] | None:
    if finding.operation in ("digamma", "lgamma") and any(s.min < 0 for s in finding.inputs[:1]):
        return None  # it is defined between negative integers, too
    if finding.operation not in _EXPONENTIALS:
        bounds = _BOUNDS.get(finding.operation)
        read = FORMATS.get(finding.inputs[0].dtype) if finding.inputs else None
        near_one = bounds is not None and any(b is not None and abs(b) > 0.5 for b in bounds)
        return None if near_one and read is not None and read.eps > _INSIDE else bounds  # it would be 1
    most = float(largest_exponent(finding))
    overflows = bool(finding.inputs) and math.isfinite(finding.inputs[0].amax)
    return ((-most if finding.operation in ("cosh", "sinh") else None), most) if overflows else None


def _clamp(framework: str, source: str) -> tuple[str, str]:
    """Return the function that bounds an array, and the module that it needs; "" if that is imported."""
    if framework == "torch":
        return "torch.clamp", "torch"
    return ("jnp.clip", "") if " as jnp" in source else ("jax.numpy.clip", "jax.numpy")
