"""What a step does, in words that both frameworks share."""

from __future__ import annotations

from stablenum.diagnosis.replay.operations import MOVING, SELECTING
from stablenum.diagnosis.replay.trace import Step

__all__ = ["both_at_indices", "called", "functions_of", "in_one", "kind", "primitive_of", "quiet"]

# Operations that take entries of a table, and those that put or add them to some.
_LOOKUPS = frozenset({"embedding", "gather", "index", "index_select", "take"})
_SCATTERS = frozenset({"index_put", "scatter", "scatter_add"})
_QUIET = (MOVING - SELECTING) | {"cast", "to"}
_SAME = {
    "masked_fill": "where", "select_n": "where", "integer_pow": "pow", "square": "pow", "to": "cast",
    "rsqrt": "sqrt",
}  # fmt: skip
_COMPOSITE = {"attention", "cross_entropy", "nll_loss", "scaled_dot_product_attention"}
_ARITHMETIC = {"add", "sub", "mul", "div", "neg"}


def kind(step: Step) -> str:
    """Return the name of what a step computes, the same in both frameworks."""
    name = step.operation if step.primitive.startswith("aten.") else step.primitive
    return {"pow": "square", "integer_pow": "square", "amax": "max", "logistic": "sigmoid"}.get(name, name)


def quiet(step: Step) -> bool:
    """Return whether a step only moves what it reads."""
    return kind(step) in _QUIET


def both_at_indices(one: Step, other: Step) -> bool:
    """Return whether two steps take entries of a table, or put them there, at indices that they read."""
    kinds = {kind(one), kind(other)}
    return kinds <= _LOOKUPS or kinds <= _SCATTERS


def called(step: Step) -> str:
    """Return the function that the user called, the same in both frameworks; that of a derivative is its
    own."""
    name = step.operation.removesuffix("_backward").removeprefix("native_")
    return _SAME.get(name, name)


def primitive_of(step: Step) -> str:
    """Return what a step computes itself, as the framework calls it, without PyTorch's overload."""
    return step.primitive.removeprefix("aten.").split(".")[0]


def functions_of(step: Step) -> set[str]:
    """Return what a step may be known by: the function that was called, and, if that consists of several
    others, what the step computes itself."""
    own = _SAME.get(kind(step), kind(step))
    return {called(step), own} - _ARITHMETIC if step.operation in _COMPOSITE else {called(step)}


def in_one(a: Step, b: Step) -> bool:
    """Return whether two steps belong to a call of one function that does not consist of others."""
    return a.operation == b.operation and a.operation not in _COMPOSITE
