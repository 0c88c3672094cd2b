"""Nested plain values as JSON, with the arrays beside it: for formats that hold nothing but named arrays."""

from __future__ import annotations

import base64
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["array_names", "put_together", "taken_apart"]

_KIND = "$"


def taken_apart(state: Any, is_array: Callable[[Any], bool]) -> tuple[Any, dict[str, Any]]:
    """Return JSON values that describe a state, and its arrays by name.

    Args:
        state: dicts, lists, tuples and sets of arrays, numbers, strings, bytes and None.
        is_array: whether a value is an array.

    Raises:
        TypeError: there is another value in it; the message names it.

    Example:
        >>> plain, arrays = taken_apart({"step": 3, "best": math.inf, "w": [1j]}, lambda value: value == 1j)
        >>> plain["best"], arrays
        ({'$': 'float', 'value': 'inf'}, {'w.0': 1j})
        >>> put_together(plain, arrays)
        {'step': 3, 'best': inf, 'w': [1j]}
    """
    arrays: dict[str, Any] = {}
    return _encoded(state, "", is_array, arrays), arrays


def put_together(plain: Any, arrays: Mapping[str, Any]) -> Any:
    """Return the state that :func:`taken_apart` took apart. An ``OrderedDict`` is a plain one afterwards,
    unless it has metadata, as a module's state dict has.

    Raises:
        KeyError: an array is missing, or ``plain`` is nothing that :func:`taken_apart` returned.
    """
    if isinstance(plain, list):
        return [put_together(value, arrays) for value in plain]
    if not isinstance(plain, dict):
        return plain
    if _KIND not in plain:
        return {key: put_together(value, arrays) for key, value in plain.items()}
    return _DECODERS[plain[_KIND]](plain, arrays)


def array_names(plain: Any) -> list[str]:
    """Return the names of the arrays that :func:`put_together` will need.

    Example:
        >>> plain, _ = taken_apart({"w": 1j, "n": 3, "more": [1j]}, lambda value: value == 1j)
        >>> array_names(plain)
        ['w', 'more.0']
    """
    if isinstance(plain, list):
        return [name for value in plain for name in array_names(value)]
    if not isinstance(plain, dict):
        return []
    if plain.get(_KIND) == "array":
        return [plain["name"]]
    return [name for value in plain.values() for name in array_names(value)]


def _encoded(value: Any, name: str, is_array: Callable[[Any], bool], arrays: dict[str, Any]) -> Any:
    def inside(part: Any, key: object) -> Any:
        return _encoded(part, f"{name}.{key}" if name else str(key), is_array, arrays)

    if is_array(value):
        return {_KIND: "array", "name": _noted(value, name, arrays)}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_KIND: "float", "value": str(float(value))}
    if isinstance(value, complex):
        return {_KIND: "complex", "parts": [inside(value.real, "real"), inside(value.imag, "imag")]}
    if isinstance(value, bytes):
        return {_KIND: "bytes", "base64": base64.b64encode(value).decode("ascii")}
    if isinstance(value, Mapping):
        return _encoded_dict(value, inside)
    if isinstance(value, list):
        return [inside(part, i) for i, part in enumerate(value)]
    for kind, of_kind in (("tuple", tuple), ("set", (set, frozenset))):
        if isinstance(value, of_kind) and not hasattr(value, "_fields"):
            return {_KIND: kind, "items": [inside(part, i) for i, part in enumerate(value)]}
    raise TypeError(
        f"the state must hold arrays and plain values (numbers, strings, bytes, None, dicts, lists, tuples, "
        f"sets); {name} is {type(value).__module__}.{type(value).__name__}. Leave it out, or convert it."
    )


def _encoded_dict(value: Mapping[Any, Any], inside: Callable[[Any, object], Any]) -> dict[str, Any]:
    metadata = getattr(value, "_metadata", None)  # torch keeps the versions of modules there
    if metadata is None and all(isinstance(key, str) and key != _KIND for key in value):
        return {key: inside(part, key) for key, part in value.items()}
    items = [[inside(key, "key"), inside(part, key)] for key, part in value.items()]
    encoded: dict[str, Any] = {_KIND: "dict", "items": items}
    return encoded if metadata is None else encoded | {"metadata": inside(metadata, "_metadata")}


def _noted(array: Any, name: str, arrays: dict[str, Any]) -> str:
    unique, number = name, 1
    while unique in arrays:  # a key may have a dot in it
        number += 1
        unique = f"{name}#{number}"
    arrays[unique] = array
    return unique


def _decoded_dict(plain: dict[str, Any], arrays: Mapping[str, Any]) -> dict[Any, Any]:
    decoded = {put_together(key, arrays): put_together(value, arrays) for key, value in plain["items"]}
    if "metadata" not in plain:
        return decoded
    ordered: Any = OrderedDict(decoded)
    ordered._metadata = put_together(plain["metadata"], arrays)
    found: dict[Any, Any] = ordered
    return found


_DECODERS: dict[str, Callable[[dict[str, Any], Mapping[str, Any]], Any]] = {
    "array": lambda plain, arrays: arrays[plain["name"]],
    "bytes": lambda plain, _: base64.b64decode(plain["base64"]),
    "complex": lambda plain, arrays: complex(*put_together(plain["parts"], arrays)),
    "dict": _decoded_dict,
    "float": lambda plain, _: float(plain["value"]),
    "set": lambda plain, arrays: set(put_together(plain["items"], arrays)),
    "tuple": lambda plain, arrays: tuple(put_together(plain["items"], arrays)),
}
