"""The guard's state in an entry of a parameter group, which ``torch.distributed.checkpoint`` keeps.

``get_optimizer_state_dict`` and ``FSDP.optim_state_dict`` drop everything beside ``state`` and
``param_groups``. Of a group they keep all entries. With ``flatten_optimizer_state_dict=True``, only entries
that the optimizer's own groups have are read again, so that there is an empty one in them.

A plain optimizer that loads such a dict keeps the entry too, and writes it again after further steps. So the
entry tells how far the optimizer was: a guard's state that is older than the optimizer's is not taken.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from stablenum.errors import bad_field
from stablenum_torch._devices.ranks import several_ranks

__all__ = ["KEY", "carrying", "make_room", "taken"]

# The guard's key in a state dict, next to torch's "state" and "param_groups"; and in a group.
KEY = "stablenum"
_EMPTY = 0  # a number, because there is code that formats every setting of a group as one


def make_room(optimizer: Optimizer) -> None:
    """Have an empty entry in the first group of an optimizer."""
    optimizer.param_groups[0][KEY] = _EMPTY


def carrying(state: dict[str, Any], guard: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state dict with the guard's in the entry that there is for it.

    As text, it is a single value to whatever walks through nested dicts and lists.
    """
    text = json.dumps({"guard": guard, "progress": _progress(state)})
    groups = [{**group, KEY: text} if KEY in group else group for group in state["param_groups"]]
    return state | {"param_groups": groups}


def taken(state: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return an optimizer's state dict without what its groups have of a guard, and that.

    Returns:
        The dict; and the guard's state, None if there is none, or if the optimizer has gone on without it.

    Raises:
        ValueError: it is not what :func:`carrying` wrote.
    """
    found, groups = None, []
    for group in state["param_groups"]:
        if isinstance(group, Mapping) and KEY in group:
            found = group[KEY] if found in (None, _EMPTY) else found
            group = {name: value for name, value in group.items() if name != KEY}
        groups.append(group)
    state = state | {"param_groups": groups}
    if found in (None, _EMPTY):
        return state, None
    guard, then = _read(found)
    return state, None if then.is_before(_progress(state)) else guard


class _Progress(NamedTuple):
    """How far an optimizer is.

    Attributes:
        steps: the largest of its counts of steps; None if it keeps none.
        sample: a checksum of some elements of its state, if it counts no steps; None if it has no state
            either, or if there are several ranks: its parts may be divided otherwise when they are read.
    """

    steps: float | None
    sample: int | None

    def is_before(self, now: _Progress) -> bool:
        """Return whether an optimizer has gone on since; False if that is not known."""
        if self.steps is not None and now.steps is not None:
            return now.steps > self.steps
        return self.sample is not None and now.sample is not None and now.sample != self.sample


# What optimizers count steps by: torch's for each parameter, schedule-free ones and others for each group.
_COUNTS = ("step", "k")
_SAMPLED = 8  # elements of each tensor: few, because on a device they are copied first


def _progress(state: Mapping[str, Any]) -> _Progress:
    entries = [*state["state"].values(), *state["param_groups"]]
    counts = [
        entry[name] for entry in entries if isinstance(entry, Mapping) for name in _COUNTS if name in entry
    ]
    by_device: dict[torch.device, list[Tensor]] = {}
    for count in counts:
        if isinstance(count, Tensor) and count.numel() == 1:
            by_device.setdefault(count.device, []).append(count.detach().double().reshape(()))
    steps = [float(torch.stack(each).max()) for each in by_device.values()]
    steps += [float(count) for count in counts if isinstance(count, (int, float))]
    if steps:
        return _Progress(max(steps), None)
    pieces = [] if several_ranks() else sorted(_pieces(state["state"]))
    return _Progress(None, zlib.crc32(b"".join(pieces)) if pieces else None)


def _pieces(state: Mapping[Any, Any]) -> Iterator[bytes]:
    """Yield the first elements of each tensor of a state. Shards of a tensor are left out."""
    for entry in state.values():
        for x in entry.values() if isinstance(entry, Mapping) else ():
            if type(x) is Tensor and x.layout is torch.strided and x.numel():
                yield x.detach().reshape(-1)[:_SAMPLED].cpu().view(torch.uint8).numpy().tobytes()


def _read(text: Any) -> tuple[Any, _Progress]:
    try:
        read = json.loads(text)
        return read["guard"], _Progress(*read["progress"])
    except (TypeError, ValueError, KeyError):
        allowed = "the guard's state as text, as opt.state_dict() writes it"
        raise bad_field(f"state_dict['param_groups'][0]['{KEY}']", allowed, text) from None
