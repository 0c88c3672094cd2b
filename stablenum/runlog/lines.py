"""The lines of a log: JSON objects, in the order of the run.

The first line is a header, and so is the first line of each later start of the run. Every other line is a
step, the size of an update, or a rewind; readers pass over lines of other kinds. Each is strict JSON: a
number that is not finite is one of the strings ``"nan"``, ``"inf"`` and ``"-inf"``, as in a guard's state
dict, and ``float`` reads it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from stablenum.guard.readout import StepRecord, loss_was_given
from stablenum.guard.reasons import Reason

__all__ = [
    "FORMAT",
    "Rewind",
    "Step",
    "Update",
    "header_line",
    "is_by_group",
    "is_header",
    "parsed",
    "rewind_line",
    "step_line",
    "update_line",
]

FORMAT = 1
_MARK = "stablenum_log"
_DEEPEST = 16  # levels of settings: a rule in a list in a dict is the third
_LARGEST = 1e308  # a whole number may have any number of digits
_MOST = 1000  # characters of what a user may have said; a batch may be named by all that is in it
_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
_decode = json.JSONDecoder().decode


class Step(NamedTuple):
    """One step of a run, as a line of its log has it.

    Attributes:
        step: the step's number, from 0.
        loss: the unscaled loss; None if it was not given.
        grad_norm: the joint norm of the unscaled gradients before clipping.
        loss_scale: the loss scale; 1.0 without scaling.
        clip_coefficient: the smallest factor that clipping applied; 1.0 for no clipping.
        reason: why the step was applied or skipped.
        worst: the name of the parameter with the first non-finite norm, otherwise with the largest; its
            index if names are not known; None if there is no parameter.
        worst_rank: the rank or device that ``worst`` belongs to; None where one process decides alone.
        precision_level: how many formats wider than its policy the step computed.
    """

    step: int
    loss: float | None
    grad_norm: float
    loss_scale: float
    clip_coefficient: float
    reason: Reason
    worst: str | None
    worst_rank: int | None
    precision_level: int


class Update(NamedTuple):
    """How far a step moved the parameters, relative to their size: measured on a sample of the elements.

    Attributes:
        step: the step's number.
        size: the norm of the update divided by the norm of the parameters.
        largest: the largest of these quotients over the parameters.
        parameter: the name of the parameter that has it.
    """

    step: int
    size: float
    largest: float
    parameter: str | None


class Rewind(NamedTuple):
    """A return of the run to an earlier step, and why. Its line follows those of the steps that it undid.

    Attributes:
        symptom: the kind of what was seen, such as ``"runaway_loss"``.
        first: the first step that was undone, which the run takes again.
        last: the last one; below ``first`` if none was undone.
        seen: a clause that says what was seen.
        done: a sentence, without its full stop, that says what was done about it.
    """

    symptom: str
    first: int
    last: int
    seen: str
    done: str


def header_line(
    *,
    framework: str,
    settings: Mapping[str, Any] | None,
    versions: Mapping[str, str],
    optimizer: Mapping[str, Any] | None = None,
    changed: bool = False,
) -> str:
    """Return the line that begins a log, each later start of the run, and its steps under other settings.

    Args:
        framework: ``"torch"`` or ``"jax"``.
        settings: the guard's, as :meth:`GuardConfig.to_dict` returns them; None if they are not known.
        versions: the version of each package.
        optimizer: its class and settings, if they are known.
        changed: whether the run goes on, with other settings.
    """
    started = datetime.now(UTC).isoformat(timespec="seconds")
    plain = {
        _MARK: FORMAT,
        "started": started,
        "framework": framework,
        "settings": settings,
        "optimizer": optimizer,
        "versions": dict(versions),
    }
    return _line(plain | {"changed": True} if changed else plain)


def step_line(record: StepRecord) -> str:
    """Return the line of a step. What has its usual value is left out: a factor of 1, a level of 0."""
    worst = record["worst"]
    plain: dict[str, Any] = {"step": record["step"]}
    if loss_was_given(record):
        plain["loss"] = _number(record["loss"])
    plain["grad_norm"] = _number(record["grad_norm"])
    for name in ("loss_scale", "clip_coefficient"):
        if record[name] != 1.0:
            plain[name] = _number(record[name])
    plain["reason"] = record["reason"].name
    if worst.index >= 0:
        plain["worst"] = str(worst.index) if worst.name is None else worst.name
    if record["worst_rank"] is not None:
        plain["worst_rank"] = record["worst_rank"]
    if record["precision_level"]:
        plain["precision_level"] = record["precision_level"]
    return _line(plain)


def update_line(update: Update) -> str:
    """Return the line of an update."""
    plain = {"step": update.step, "update": _number(update.size), "largest": _number(update.largest)}
    return _line(plain if update.parameter is None else plain | {"parameter": update.parameter})


def rewind_line(rewind: Rewind) -> str:
    """Return the line of a rewind."""
    plain = {"rewind": rewind.symptom, "first": rewind.first, "last": rewind.last}
    return _line(plain | {"seen": _in_short(rewind.seen), "done": _in_short(rewind.done)})


def parsed(line: str | bytes) -> dict[str, Any] | Step | Update | Rewind | None:
    """Return what a line holds: a header as a dict, a step, an update or a rewind.

    None is returned for an object of another kind, which a later version may have written.

    Raises:
        ValueError: the line is none of these, such as the last one of a process that was killed.
    """
    try:
        plain = _decode(line if isinstance(line, str) else str(line, "utf-8"))
        if is_header(plain):
            return _header(plain)
        kinds = (("update", _update), ("rewind", _rewind), ("reason", _step))
        read = next((read for key, read in kinds if key in plain), _other)
        return read(plain)
    except (KeyError, TypeError, OverflowError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError("not a line of a log") from error


def is_header(plain: object) -> bool:
    """Return whether the parsed JSON of a line is a header."""
    return isinstance(plain, dict) and isinstance(plain.get(_MARK), int)


def _header(plain: dict[str, Any]) -> dict[str, Any]:
    """Check what readers rely on in a header; one of a later format is for a later version to check."""
    if plain[_MARK] != FORMAT:
        return plain
    parts = [plain.get(name) or {} for name in ("settings", "optimizer", "versions")]
    if not all(isinstance(part, dict) and _is_flat(part, _DEEPEST) for part in parts):
        raise ValueError("not a header")
    settings, optimizer, _ = parts
    rules = settings.get("clip", [])
    if not isinstance(rules, list) or not all(map(_is_rule, rules)):
        raise ValueError("not a header")
    by_group = [value["by_group"] for value in optimizer.values() if is_by_group(value)]
    if len(set(map(len, by_group))) > 1 or any(is_by_group(value) for group in by_group for value in group):
        raise ValueError("not a header")
    return plain


def _is_rule(rule: object) -> bool:
    """Return whether a value is the settings of a clip rule, as far as they are drawn."""
    if not isinstance(rule, dict) or not isinstance(rule.get("rule"), str):
        return False
    bound = rule.get("max_norm", 1.0)
    return isinstance(bound, float | int) and abs(bound) <= _LARGEST


def is_by_group(value: object) -> bool:
    """Return whether a setting of an optimizer differs between its groups of parameters."""
    return isinstance(value, dict) and isinstance(value.get("by_group"), list)


def _is_flat(value: object, levels: int) -> bool:
    """Return whether a value is nested no deeper than so many levels, and has no number that is too long."""
    if isinstance(value, dict | list):
        inside = value.values() if isinstance(value, dict) else value
        return levels > 0 and all(_is_flat(part, levels - 1) for part in inside)
    return not isinstance(value, int) or abs(value) <= _LARGEST


def _step(plain: Mapping[str, Any]) -> Step:
    return Step(
        step=_count(plain["step"]),
        loss=_float(plain["loss"]) if "loss" in plain else None,
        grad_norm=_float(plain["grad_norm"]),
        loss_scale=_float(plain.get("loss_scale", 1.0)),
        clip_coefficient=_float(plain.get("clip_coefficient", 1.0)),
        reason=Reason[plain["reason"]],
        worst=None if plain.get("worst") is None else _text(plain["worst"]),
        worst_rank=None if plain.get("worst_rank") is None else _count(plain["worst_rank"]),
        precision_level=_count(plain.get("precision_level", 0)),
    )


def _update(plain: Mapping[str, Any]) -> Update:
    name = plain.get("parameter")
    size, largest = _float(plain["update"]), _float(plain["largest"])
    return Update(_count(plain["step"]), size, largest, None if name is None else _text(name))


def _rewind(plain: Mapping[str, Any]) -> Rewind:
    symptom, seen, done = (_text(plain[key]) for key in ("rewind", "seen", "done"))
    first, last = _count(plain["first"]), plain["last"]
    if not isinstance(last, int) or not first - 1 <= last < 2**31:
        raise ValueError("not a rewind")
    return Rewind(symptom, first, last, seen, done)


def _other(plain: object) -> None:
    if not isinstance(plain, dict):
        raise ValueError("not an object")


def _float(value: object) -> float:
    """Return a number; a text may be the name of one that is not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("not a number")
    return float(value)


def _text(value: object) -> str:
    """Return a text, or the text of a number; surrogates without a partner cannot be written."""
    if not isinstance(value, str | int):
        raise ValueError("not a text")
    return str(value).encode("utf-8", "backslashreplace").decode("utf-8")


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
        raise ValueError("not a count")
    return value


def _number(value: float) -> float | str:
    """Return a float32 value with as few digits as hold it exactly, or its name if it is not finite."""
    return float(f"{value:.9g}") if math.isfinite(value) else str(value)


def _in_short(text: str) -> str:
    """Return a text in one line, and not too long."""
    text = " ".join(text.split())
    return text if len(text) <= _MOST else f"{text[: _MOST - 3]}..."


def _line(plain: Mapping[str, Any]) -> str:
    return _encode(dict(plain))
