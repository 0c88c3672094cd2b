"""Check whether integer targets are valid classes, and whether there is any that is not ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

__all__ = ["BadLabelsError", "check_labels", "is_index_error", "without_valid_target"]

_READ_INDICES = (
    "embedding", "embedding_bag", "gather", "index", "index_put", "index_select", "nll_loss", "one_hot",
    "scatter", "take", "ctc_loss", "multi_margin_loss", "multilabel_margin_loss",
)  # fmt: skip


class BadLabelsError(IndexError):
    """An index is out of range. Raised before the device reads the index, which would make it abort."""


def check_labels(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Check the indices that an operation is about to read.

    Raises:
        BadLabelsError: an index is out of range.
    """
    try:
        index, size, ignored, what = _indices(name, args, kwargs)
    except (IndexError, AttributeError, TypeError):
        return  # unexpected arguments: the operation itself will raise
    if index is None or not index.numel() or index.is_meta or index.is_floating_point():
        return
    valid = index if ignored is None else index[index != ignored]
    if not valid.numel():
        return
    low, high = int(valid.min()), int(valid.max())
    if low < 0 or high >= size:
        wrong = low if low < 0 else high
        raise BadLabelsError(f"{what} {wrong} is out of range; valid values are 0 to {size - 1}")


def _indices(
    name: str, a: tuple[Any, ...], kw: Mapping[str, Any]
) -> tuple[Tensor | None, int, int | None, str]:
    if name in ("nll_loss_forward", "nll_loss2d_forward"):
        classes = a[0].shape[0] if a[0].dim() == 1 else a[0].shape[1]
        return a[1], classes, a[4] if len(a) > 4 else kw.get("ignore_index", -100), "target class"
    if name == "embedding":
        return a[1], a[0].shape[0], None, "index"
    if name in ("gather", "index_select", "scatter", "scatter_add", "scatter_", "scatter_add_"):
        return (a[2], a[0].shape[a[1]], None, "index") if a[0].dim() else (None, 0, None, "")
    return None, 0, None, ""


def is_index_error(name: str, error: Exception) -> bool:
    """Return whether an operation that reads class or table indices failed because of an index."""
    if isinstance(error, BadLabelsError):
        return True
    if not name.strip("_").startswith(_READ_INDICES):
        return False
    said = str(error).lower()
    known = ("out of bounds", "out of range", "class values must", "index values")
    return isinstance(error, IndexError) or any(text in said for text in known)


def without_valid_target(name: str, args: tuple[Any, ...]) -> str:
    """Return a sentence if there are no targets, or all of them are ignored; "" otherwise."""
    if name not in ("nll_loss_forward", "nll_loss2d_forward") or len(args) < 5:
        return ""
    target, ignored = args[1], args[4]
    if not target.numel():
        return "there are no targets, so their mean is 0/0"
    if bool((target == ignored).all()):
        return f"every target is ignored ({ignored}), so the mean over the others is 0/0"
    valid = target[target != ignored]
    if args[2] is not None and not bool(args[2][valid].any()):
        return "the classes of all targets have weight 0, so the weighted mean is 0/0"
    return ""
