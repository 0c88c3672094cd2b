"""The guard's state in an entry of a parameter group, which ``torch.distributed.checkpoint`` keeps.

``get_optimizer_state_dict`` and ``FSDP.optim_state_dict`` drop everything beside ``state`` and
``param_groups``. Of a group they keep all entries. With ``flatten_optimizer_state_dict=True``, only entries
that the optimizer's own groups have are read again, so that there is an empty one in them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from stablenum.errors import bad_field

__all__ = ["KEY", "carrying", "make_room", "taken"]

KEY = (
    "stablenum"  # the guard's key in a state dict, next to torch's "state" and "param_groups"; and in a group
)


def make_room(optimizer: Optimizer) -> None:
    """Have an empty entry in the first group of an optimizer."""
    optimizer.param_groups[0][KEY] = None


def carrying(state: dict[str, Any], guard: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state dict with the guard's in the entry that there is for it.

    As text, it is a single value to whatever walks through nested dicts and lists.
    """
    text = json.dumps(guard)
    groups = [{**group, KEY: text} if KEY in group else group for group in state["param_groups"]]
    return state | {"param_groups": groups}


def taken(state: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return an optimizer's state dict without what its groups have of a guard, and that; None if nothing.

    Raises:
        ValueError: it is not what :func:`carrying` wrote.
    """
    found, groups = None, []
    for group in state["param_groups"]:
        if isinstance(group, Mapping) and KEY in group:
            found = group[KEY] if found is None else found
            group = {name: value for name, value in group.items() if name != KEY}
        groups.append(group)
    return state | {"param_groups": groups}, None if found is None else _read(found)


def _read(text: Any) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError):
        allowed = "the guard's state as text, as opt.state_dict() writes it"
        raise bad_field(f"state_dict['param_groups'][0]['{KEY}']", allowed, text) from None
