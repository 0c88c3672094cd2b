"""A guard's state as plain JSON values, the same for every framework, and back.

A state saved by one adapter loads in another and goes on with the same decisions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from stablenum.errors import bad_field
from stablenum.formats import FLOAT32_MAX
from stablenum.guard import GuardState
from stablenum.loss_scale import LARGEST_SCALE, SMALLEST_SCALE, may_load
from stablenum.status import Reason

__all__ = ["VERSION", "state_from_dict", "state_to_dict"]

Namespace: TypeAlias = Any

VERSION = 1
_REASONS = frozenset(int(reason) for reason in Reason)
_COUNTS = {f"state.{name}" for name in ("step", "skipped_total", "skipped_in_a_row", "halted")}


def state_to_dict(state: GuardState, names: Sequence[str] | None = None) -> dict[str, Any]:
    """``{"version": 1, "names": [...] or None, "state": {...}}`` of lists, numbers and strings.

    Non-finite numbers are the strings ``"nan"``, ``"inf"`` and ``"-inf"``, so the result is strict
    JSON; float32 values survive the round trip bit for bit. Makes the host wait.

    Example:
        >>> import json, numpy as np
        >>> from stablenum import GuardConfig, init_guard
        >>> text = json.dumps(state_to_dict(init_guard(GuardConfig(), 1, xp=np)), allow_nan=False)
    """
    return {"version": VERSION, "names": None if names is None else list(names), "state": _to_plain(state)}


def _to_plain(tree: Any) -> Any:
    if hasattr(tree, "_fields"):
        return {name: _to_plain(value) for name, value in zip(tree._fields, tree, strict=True)}
    if isinstance(tree, tuple):
        return [_to_plain(value) for value in tree]
    return _encode(tree.tolist())


def _encode(value: Any) -> Any:
    if isinstance(value, list):
        return [_encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def state_from_dict(
    plain: Mapping[str, Any],
    like: GuardState,
    *,
    xp: Namespace,
    names: Sequence[str] | None = None,
    device: Any = None,
) -> GuardState:
    """The state that :func:`state_to_dict` wrote, as arrays of ``xp``.

    Args:
        plain: the saved dict.
        like: a state of the guard that will use it: gives structure, shapes and dtypes, and the
            loss scale unless both guards scale dynamically (a fixed scale is a setting).
        xp: the array namespace of the result.
        names: the names of the parameters here. Where both sides know their names, recorded
            parameter indices are translated (the frameworks may order parameters differently).
        device: where the result lives.

    Raises:
        ValueError: the dict is not such a state, or is one of another shape; the message names
            the field. Nothing is changed.

    Example:
        >>> import numpy as np
        >>> from stablenum import GuardConfig, init_guard
        >>> state = init_guard(GuardConfig(), 1, xp=np)
        >>> int(state_from_dict(state_to_dict(state), state, xp=np).step)
        0
    """
    if not isinstance(plain, Mapping) or plain.get("version") != VERSION or "state" not in plain:
        raise bad_field("guard state", f"a dict written by guard_state_dict(), version {VERSION}", plain)
    saved = plain["state"]
    index = _translation(plain.get("names"), names)
    state: GuardState = _from_plain("state", saved, like, xp=xp, device=device, index=index)
    if may_load(state.loss_scale, like.loss_scale):
        return state
    return state._replace(
        loss_scale=type(like.loss_scale)(
            *(xp.asarray(leaf.tolist(), dtype=leaf.dtype, device=device) for leaf in like.loss_scale)
        )
    )


def _translation(saved: Sequence[str] | None, here: Sequence[str] | None) -> dict[int, int] | None:
    """Saved parameter index -> index here, or None where the names do not tell."""
    words = isinstance(saved, (list, tuple)) and all(isinstance(name, str) for name in saved)
    if saved is not None and not words:
        raise bad_field("names", "a list of strings or None", saved)
    if saved is None or here is None or list(saved) == list(here):
        return None
    place = {name: i for i, name in enumerate(here)}
    return {i: place.get(name, -1) for i, name in enumerate(saved)}


def _from_plain(
    field: str, plain: Any, like: Any, *, xp: Namespace, device: Any, index: dict[int, int] | None
) -> Any:
    if hasattr(like, "_fields"):
        if not isinstance(plain, Mapping) or set(plain) != set(like._fields):
            raise bad_field(field, f"a dict with the keys {', '.join(like._fields)}", plain)
        return type(like)(
            *(
                _from_plain(f"{field}.{name}", plain[name], part, xp=xp, device=device, index=index)
                for name, part in zip(like._fields, like, strict=True)
            )
        )
    if isinstance(like, tuple):
        if not isinstance(plain, list) or len(plain) != len(like):
            hint = "Load it into a guard with the clip rules that it was saved with."
            raise bad_field(field, f"a list of {len(like)} rule states, as the config has", plain, hint=hint)
        return tuple(
            _from_plain(f"{field}[{i}]", item, part, xp=xp, device=device, index=index)
            for i, (item, part) in enumerate(zip(plain, like, strict=True))
        )
    shape = tuple(like.shape)
    is_float = "float" in str(like.dtype)
    values = _decode(field, plain, shape, float if is_float else int)
    if index is not None and field == "state.recorder.ints":
        values = [[step, reason, index.get(worst, -1)] for step, reason, worst in values]
    if field in _COUNTS and values < 0:
        raise bad_field(field, "a whole number of 0 or more", plain)
    if field == "state.recorder.ints":
        _check_reasons(field, values)
    if field == "state.loss_scale.scale" and not SMALLEST_SCALE <= values <= LARGEST_SCALE:
        raise bad_field(field, "a positive number from 2**-100 to 2**100", plain)
    return xp.asarray(values, dtype=like.dtype, device=device)


def _check_reasons(field: str, rows: list[list[int]]) -> None:
    """Written rows hold known reason codes, so that reading them later cannot fail."""
    for i, (step, reason, _) in enumerate(rows):
        if step >= 0 and reason not in _REASONS:
            raise bad_field(f"{field}[{i}][1]", "a reason code", reason)


def _decode(field: str, plain: Any, shape: tuple[int, ...], kind: type[float] | type[int]) -> Any:
    """Nested lists of the given shape, every number checked."""
    if shape:
        if not isinstance(plain, list) or len(plain) != shape[0]:
            raise bad_field(field, f"a list of {shape[0]} items", plain)
        return [_decode(f"{field}[{i}]", item, shape[1:], kind) for i, item in enumerate(plain)]
    if kind is float and plain in ("nan", "inf", "-inf"):
        return float(plain)
    if isinstance(plain, bool) or not isinstance(plain, (int,) if kind is int else (int, float)):
        raise bad_field(field, "a whole number" if kind is int else "a number", plain)
    if kind is int and not -(2**31) <= plain < 2**31:
        raise bad_field(field, "a whole number within int32", plain)
    if kind is float and not abs(plain) <= FLOAT32_MAX:
        raise bad_field(field, "a number within float32 (or 'nan', 'inf', '-inf')", plain)
    return kind(plain)
