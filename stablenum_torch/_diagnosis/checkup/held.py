"""What modules hold, under which names, and where the script made them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

from torch import Tensor, nn

from stablenum.diagnosis.checkup.course import UNTRAINED
from stablenum.diagnosis.replay.values import Place
from stablenum_torch._diagnosis.replay.source_lines import is_user_file, place_of
from stablenum_torch._diagnosis.watch.script_recorder import existing_modules

__all__ = ["constructed", "place_of_construction", "plain_tensors", "unique"]


def plain_tensors() -> dict[int, tuple[str, str]]:
    """Return the role and the name of each floating-point matrix that a module keeps as a plain attribute, or
    in a list or dict, by its id."""
    found: dict[int, tuple[str, str]] = {}
    for root in existing_modules():
        for path, module in root.named_modules():
            for name, tensor in _attributes(module):
                whole = f"{path}.{name}" if path else name
                if len(whole) > len(found.get(id(tensor), ("", ""))[1]):
                    found[id(tensor)] = UNTRAINED, whole
    return found


def _attributes(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, held in list(vars(module).items()):
        if name.startswith("_") and name in nn.Module.__annotations__:
            continue
        parts: list[tuple[str, Any]] = [(name, held)]
        if type(held) in (list, tuple):
            parts = [(f"{name}.{i}", one) for i, one in enumerate(held)]
        elif type(held) is dict:
            parts = [(f"{name}.{key}", one) for key, one in held.items()]
        yield from ((n, t) for n, t in parts if type(t) is Tensor and t.is_floating_point() and t.ndim > 1)


def unique(
    names: Mapping[int, tuple[str, str]], before: Mapping[int, tuple[str, str]]
) -> dict[int, tuple[str, str]]:
    """Return roles and names in which no two tensors share a name, as those of two models may.

    Args:
        names: id of a tensor -> its role and name.
        before: what this function has returned before; a name stays the same.
    """
    taken = Counter(name for _, name in before.values())
    found: dict[int, tuple[str, str]] = {}
    for i, (role, name) in names.items():
        known = before.get(i)
        # The id of a tensor that is gone may be another one's.
        if known is not None and known[0] == role and known[1].partition(" (")[0] == name:
            found[i] = known
            continue
        taken[name] += 1
        found[i] = role, name if taken[name] == 1 else f"{name} ({taken[name]})"
    return found


def place_of_construction(module: nn.Module) -> Place | None:
    """Return the user's line that makes a module, whose ``__init__`` is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if is_user_file(code.co_filename) and frame.f_locals.get("self") is not module:
            return place_of(code, frame.f_lineno)
        frame = frame.f_back
    return None


def constructed(places: Mapping[int, Place]) -> dict[int, Place]:
    """Return where the outermost module that has a parameter was made, by the parameter's id.

    Args:
        places: id of a module -> where it was made.
    """
    found: dict[int, Place] = {}
    for module in sorted(existing_modules(), key=lambda m: sum(1 for _ in m.modules())):
        place = places.get(id(module))
        if place is not None:
            found |= {id(p): place for p in module.parameters()}
    return found
