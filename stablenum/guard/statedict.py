"""Conversion of a guard's state to plain JSON values, the same for every framework, and back.

A state saved by one adapter can be loaded by another, which then makes the same decisions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from stablenum._support.user_warnings import warn
from stablenum.arrays import leaves, map_leaves
from stablenum.errors import bad_field
from stablenum.formats import FLOAT32_MAX
from stablenum.guard.decide import GuardState
from stablenum.guard.ranks import rank_of
from stablenum.guard.reasons import Reason
from stablenum.guard.recorder import Recorder
from stablenum.rules.clipping import PER_TENSOR_STATES
from stablenum.rules.clipping.adagc import AdaGCState
from stablenum.rules.clipping.autoclip import AutoClipState
from stablenum.rules.clipping.zclip import ZClipState
from stablenum.rules.escalation import EscalationState
from stablenum.rules.loss_scale import LARGEST_SCALE, SMALLEST_SCALE, LossScaleState, carried_over
from stablenum.rules.loss_scale.log_max import LogMaxStatistics
from stablenum.rules.loss_scale.underflow import UnderflowStatistics
from stablenum.rules.spikes import SpikeState
from stablenum.rules.windows import EMPTY

__all__ = [
    "PACKED",
    "StatisticsNotLoadedWarning",
    "disabling_fields",
    "is_guard_field",
    "state_from_dict",
    "state_to_dict",
]

Namespace: TypeAlias = Any

_VERSION = 1
_REASONS = frozenset(int(reason) for reason in Reason)
# Statistics that not every rule has.
_OPTIONAL = ("state.spike", "state.escalation", "state.loss_scale.statistics")
# What a state in JAX has in place of the fields of a ``GuardState``.
PACKED = ("ints", "floats", "scale", "rules", "bad_at_init")
_STATES: Mapping[str, tuple[Any, ...]] = {
    "clip": (AdaGCState, AutoClipState, ZClipState),
    "escalation": (EscalationState,),
    "loss_scale": (LossScaleState, LogMaxStatistics, UnderflowStatistics),
    "recorder": (Recorder,),
    "spike": (SpikeState,),
}
# The names within each field of a state; the others are numbers.
_WITHIN: Mapping[str, frozenset[str]] = {
    field: frozenset(name for state in states for name in state._fields)
    for field, states in {**_STATES, "rules": tuple(itertools.chain(*_STATES.values()))}.items()
}
_COUNTS = {
    f"state.{name}" for name in ("step", "skipped_total", "skipped_in_a_row", "nonfinite_in_a_row", "halted")
}
_RULES = ("state.clip[", "state.spike.", "state.escalation.", "state.loss_scale.")
_WINDOWS = ("norms", "first", "loss", "grad_norm")  # an entry that is not yet filled is EMPTY or inf
_LEAST = {"hysteresis_left": -1}  # -1: the rule has no hysteresis
_SIGNED = ("state.spike.loss", "state.loss_scale.statistics.mean", "state.loss_scale.statistics.slow_mean")


class StatisticsNotLoadedWarning(UserWarning):
    """A saved state has no statistics for one of the rules of the guard that loads it."""


def is_guard_field(keys: Sequence[str]) -> bool:
    """Return whether a path within a guard's state is that of an entry which such a state has.

    Example:
        >>> is_guard_field(("recorder", "floats")), is_guard_field(("model", "floats"))
        (True, False)
    """
    field, *inside = keys
    known = _WITHIN.get(field, frozenset()) | {"value"}  # which flax.nnx puts behind each name
    if field not in (*GuardState._fields, *PACKED):
        return False
    return all(key in known or key.isdecimal() for key in inside)


def state_to_dict(state: GuardState, names: Sequence[str] | None = None) -> dict[str, Any]:
    """Return ``{"version": 1, "names": [...] or None, "state": {...}}``, made of lists, numbers and strings.

    Non-finite numbers become the strings ``"nan"``, ``"inf"`` and ``"-inf"``, so the result is strict
    JSON; float32 values survive the round trip bit for bit. The call makes the host wait for the device.

    Example:
        >>> import json, numpy as np
        >>> from stablenum import GuardConfig, init_guard
        >>> text = json.dumps(state_to_dict(init_guard(GuardConfig(), 1, xp=np)), allow_nan=False)
    """
    return {"version": _VERSION, "names": None if names is None else list(names), "state": _to_plain(state)}


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
    """Return the state that :func:`state_to_dict` wrote, as arrays of ``xp``.

    Args:
        plain: the saved dict.
        like: a state of the guard that will use the result. It gives structure, shapes and dtypes, and
            also the loss scale unless both guards scale dynamically. A rule whose statistics were not saved,
            because the rule was added or changed since, keeps those of ``like``, and a
            ``StatisticsNotLoadedWarning`` is issued.
        xp: the array namespace of the result.
        names: the names of the parameters of the guard that loads the state. If the saved state has names
            too, parameter indices and the statistics of each parameter are matched by name (the order may
            differ between frameworks).
        device: the device of the result.

    Raises:
        ValueError: ``plain`` is not such a state, or its arrays have other shapes; the message names the
            field. Nothing is changed.

    Example:
        >>> import numpy as np
        >>> from stablenum import GuardConfig, init_guard
        >>> state = init_guard(GuardConfig(), 1, xp=np)
        >>> int(state_from_dict(state_to_dict(state), state, xp=np).step)
        0
    """
    _check_written(plain)
    reader = _Reader(plain.get("names"), names, xp=xp, device=device)
    state: GuardState = reader.read("state", plain["state"], like)
    for message in reader.missing:
        warn(message, StatisticsNotLoadedWarning)
    saved = state.loss_scale
    return state._replace(loss_scale=carried_over(like.loss_scale, saved, saved, xp=xp))


def _check_written(plain: Any) -> None:
    if not isinstance(plain, Mapping) or plain.get("version") != _VERSION or "state" not in plain:
        raise bad_field("guard state", f"a dict written by guard_state_dict(), of version {_VERSION}", plain)


def disabling_fields(plain: Any) -> Iterator[tuple[str, float]]:
    """Yield the fields of a saved state that must be finite and are not, with their values.

    These are the statistics of rules and the loss scale; records and windows may hold inf and NaN.

    Raises:
        ValueError: ``plain`` is not what :func:`state_to_dict` returns, or its loss scale is out of range.

    Example:
        >>> scale = {"scale": "inf", "good_steps": 0}
        >>> list(disabling_fields({"version": 1, "names": None, "state": {"loss_scale": scale}}))
        [('state.loss_scale.scale', inf)]
    """
    _check_written(plain)
    for field, name, value in _plain_leaves("state", "", plain["state"]):
        number = float(value) if value in ("nan", "inf", "-inf") else value
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise bad_field(field, "a number", value)
        if field.startswith(_RULES) and (_disables(name, number) or number == -math.inf):
            yield field, number
        else:
            _check_scale(field, number)


def _check_scale(field: str, value: Any) -> None:
    """Check a value, if the field is that of the loss scale."""
    if field == "state.loss_scale.scale" and not SMALLEST_SCALE <= value <= LARGEST_SCALE:
        raise bad_field(field, "a number from 2**-100 to 2**100", value)


def _plain_leaves(field: str, name: str, plain: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield each value of a saved state with its field and the name of the entry that it is part of."""
    if isinstance(plain, Mapping):
        for key, value in plain.items():
            yield from _plain_leaves(f"{field}.{key}", str(key), value)
    elif isinstance(plain, list):
        for i, value in enumerate(plain):
            yield from _plain_leaves(f"{field}[{i}]", name, value)
    else:
        yield field, name, plain


def _disables(name: str, value: float) -> bool:
    """Return whether a number of this name would disable its rule permanently."""
    return value != value or (value == math.inf and name not in _WINDOWS)


class _Reader:
    """Reads one saved state, and translates its parameter indices into those of the loading guard."""

    def __init__(self, saved: Any, here: Sequence[str] | None, *, xp: Namespace, device: Any) -> None:
        words = isinstance(saved, (list, tuple)) and all(isinstance(name, str) for name in saved)
        if saved is not None and not words:
            raise bad_field("names", "a list of strings or None", saved)
        self.xp, self.device, self.here = xp, device, list(here or ())
        self.missing: list[str] = []  # a message for each rule or parameter without saved statistics
        self.known = saved is not None and here is not None and list(saved) != list(here)
        place = {name: i for i, name in enumerate(here or ())} if self.known else {}
        self.n_saved = len(saved) if self.known else None
        # ``place`` maps saved parameter indices to those of the loading guard (-1 for parameters that it does
        # not have); ``source`` is the reverse. Both are empty if one side has no names, or if the names are
        # the same.
        self.place = {i: place.get(name, -1) for i, name in enumerate(saved)} if self.known else {}
        self.source = {here: saved for saved, here in self.place.items() if here >= 0}

    def _place_here(self, saved: int) -> int:
        """Return the place of a recorded parameter in the loading guard. One of another rank keeps its place,
        because only this rank's names are known."""
        return saved if rank_of(saved) is not None else self.place.get(saved, -1)

    def own(self, tree: Any) -> Any:
        """Return a copy of the loading guard's own state."""
        return map_leaves(lambda leaf: self._array(leaf.tolist(), leaf), tree)

    def _array(self, values: Any, like: Any) -> Any:
        """Return nested lists as an array like ``like``, whose columns a list without rows does not show."""
        made = self.xp.asarray(values, dtype=like.dtype, device=self.device)
        return self.xp.reshape(made, tuple(like.shape))

    def read(self, field: str, plain: Any, like: Any) -> Any:
        """Return the part of the state called ``field``, with the structure, shapes and dtypes of
        ``like``."""
        if field == "state.clip":
            return self._rule_states([f"{field}[{i}]" for i in range(len(like))], plain, like)
        if field in _OPTIONAL:
            return self._rule_states([field], [plain], (like,))[0]
        return self._tree(field, plain, like)

    def _tree(self, field: str, plain: Any, like: Any) -> Any:
        if not hasattr(like, "_fields"):
            return self._leaf(field, plain, like)
        if not isinstance(plain, Mapping) or set(plain) != set(like._fields):
            raise bad_field(field, f"a dict with the keys {', '.join(like._fields)}", plain)
        parts = zip(like._fields, like, strict=True)
        return type(like)(*(self.read(f"{field}.{name}", plain[name], part) for name, part in parts))

    def _rule_states(self, fields: list[str], plain: Any, likes: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the states of the loading guard's rules, each from the first saved state that fits it.

        A rule without a fitting saved state, for example a rule added since, keeps its own state.
        """
        if not isinstance(plain, list):
            raise bad_field("state.clip", "a list of rule states", plain)
        unused, found = list(plain), []
        for field, like in zip(fields, likes, strict=True):
            if not leaves(like):
                found.append(like)
                continue
            rows = isinstance(like, PER_TENSOR_STATES)
            fitting = [part for part in unused if _fits(part, like, rows=self.n_saved if rows else None)]
            if not fitting:
                self.missing.append(
                    f"{field}: no statistics were saved that fit {type(like).__name__.removesuffix('State')} "
                    "as it is configured here, so the rule keeps its own. Rules, windows and parameters "
                    "that changed since the state was saved start from scratch."
                )
                found.append(self.own(like))
                continue
            unused.remove(fitting[0])
            values = self._rows(field, fitting[0], like) if rows and self.known else fitting[0]
            found.append(self._tree(field, values, like))
        return tuple(found)

    def _rows(self, field: str, plain: Any, like: Any) -> dict[str, Any]:
        """Return the rows matched by parameter name; a parameter that was not saved keeps its own row."""
        own = {name: _encode(part.tolist()) for name, part in zip(like._fields, like, strict=True)}
        new = [name for i, name in enumerate(self.here) if i not in self.source]
        if new:
            shown = ", ".join(new[:5]) + (", ..." if len(new) > 5 else "")
            self.missing.append(
                f"{field}: no statistics were saved under the names of {len(new)} of this guard's "
                f"{len(self.here)} parameters ({shown}); these parameters start from scratch. To carry "
                "theirs over, write this guard's names into the dict's 'names', in the saved order."
            )
        return {
            name: [plain[name][self.source[i]] if i in self.source else row for i, row in enumerate(rows)]
            for name, rows in own.items()
        }

    def _leaf(self, field: str, plain: Any, like: Any) -> Any:
        is_float = "float" in str(like.dtype)
        values = _decode(field, plain, tuple(like.shape), float if is_float else int)
        if field == "state.recorder.ints":
            _check_reasons(field, values)
            if self.known:
                values = [[row[0], row[1], self._place_here(row[2]), row[3]] for row in values]
        if field in _COUNTS and values < 0:
            raise bad_field(field, "a whole number of 0 or more", plain)
        if field == "state.halted" and values > 1:
            raise bad_field(field, "0 or 1", plain)
        _check_scale(field, values)
        if field.startswith(_RULES):
            _check_statistics(field, values)
        return self._array(values, like)


def _fits(plain: Any, like: Any, *, rows: int | None) -> bool:
    """Return whether a saved rule state has the keys and shapes of ``like``. The number of rows must be
    ``rows`` if that is not None."""
    if hasattr(like, "_fields"):
        return (
            isinstance(plain, Mapping)
            and set(plain) == set(like._fields)
            and all(
                _fits(plain[name], part, rows=rows) for name, part in zip(like._fields, like, strict=True)
            )
        )
    if not like.shape:
        return not isinstance(plain, (list, Mapping))
    if not isinstance(plain, list) or len(plain) != (like.shape[0] if rows is None else rows):
        return False
    width = like.shape[1] if len(like.shape) > 1 else None
    return width is None or all(isinstance(row, list) and len(row) == width for row in plain)


def _check_reasons(field: str, rows: list[list[int]]) -> None:
    """Check that every written row has a known reason code, so that reading the row later cannot fail."""
    for i, (step, reason, *_) in enumerate(rows):
        if step >= 0 and reason not in _REASONS:
            raise bad_field(f"{field}[{i}][1]", "a reason code", reason)


def _check_statistics(field: str, values: Any) -> None:
    """Check that no number disables a rule permanently, as a NaN in a moving mean would."""
    name = field.rpartition(".")[2]
    least = -FLOAT32_MAX if field in _SIGNED else _LEAST.get(name, 0)
    for place, value in _numbers(field, values):
        if _disables(name, value):
            raise bad_field(place, "a finite number", value)
        if value < least and not (name in _WINDOWS and value == EMPTY):
            raise bad_field(place, f"a number of {least:g} or more", value)


def _numbers(field: str, values: Any) -> Iterator[tuple[str, float]]:
    if not isinstance(values, list):
        yield field, values
        return
    for i, value in enumerate(values):
        yield from _numbers(f"{field}[{i}]", value)


def _decode(field: str, plain: Any, shape: tuple[int, ...], kind: type[float] | type[int]) -> Any:
    """Return ``plain`` as nested lists of the given shape, with every number checked."""
    if shape:
        if not isinstance(plain, list) or len(plain) != shape[0]:
            raise bad_field(field, f"a list of {shape[0]} items", plain)
        return [_decode(f"{field}[{i}]", item, shape[1:], kind) for i, item in enumerate(plain)]
    if kind is float and plain in ("nan", "inf", "-inf"):
        return float(plain)
    if isinstance(plain, bool) or not isinstance(plain, (int,) if kind is int else (int, float)):
        raise bad_field(field, "a whole number" if kind is int else "a number", plain)
    if kind is int and not -(2**31) <= plain < 2**31:
        raise bad_field(field, "a whole number within int32's range", plain)
    if kind is float and not abs(plain) <= FLOAT32_MAX:
        raise bad_field(field, "a number within float32's range, 'nan', 'inf' or '-inf'", plain)
    return kind(plain)
