"""The rows of an audit, from the moments in a checkpoint."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import array_api_compat.numpy as xp
import ml_dtypes
import numpy as np

from stablenum.commands.verify.contents import Entry
from stablenum.commands.verify.counts import is_measured, widened
from stablenum.commands.verify.layout import Slot
from stablenum.diagnosis.audit import (
    Measured,
    Role,
    Row,
    UpdateFormula,
    eps_is_lost,
    join_blocks,
    measure_block,
    torch_formula,
    torch_kind,
)

__all__ = ["rows_of"]

_AT_A_TIME = 2**15


def rows_of(
    slots: tuple[Slot, ...], state: Mapping[str, Entry], reading: Callable[[Entry], None]
) -> Iterator[Row]:
    """Yield the row of each parameter for which an optimizer keeps moments.

    Args:
        slots: what the optimizers keep.
        state: the parameters and buffers, by name.
        reading: is called with each entry before it is read.
    """
    by_end = defaultdict[tuple[str, tuple[int, ...]], list[Entry]](list)
    for name, entry in state.items():
        by_end[name.rpartition(".")[2], entry.shape].append(entry)
    for slot in slots:
        entries = [(role, entry) for role, entry in slot.entries.values() if _is_whole(entry)]
        shapes = {entry.shape for _, entry in entries}
        if len(shapes) == 1:  # else they are sums over rows and columns, which have no rule
            end = slot.parameter.rpartition(".")[2]
            parameter = _parameter(slot, by_end[end, next(iter(shapes))])
            for entry in (*(entry for _, entry in entries), *([parameter] if parameter else [])):
                reading(entry)
            yield _row(slot, entries, parameter)


def _is_whole(entry: Entry) -> bool:
    """Return whether an entry is measured, and has each of its elements by itself."""
    return is_measured(entry.dtype) and entry.size == math.prod(entry.shape)


def _parameter(slot: Slot, entries: Sequence[Entry]) -> Entry | None:
    """Return the parameter of a slot among the entries of its shape: the only one whose name ends with the
    slot's."""
    ends = (slot.parameter, f".{slot.parameter}")
    found = [e for e in entries if (e.name == ends[0] or e.name.endswith(ends[1])) and _is_whole(e)]
    return found[0] if len(found) == 1 else None


def _row(slot: Slot, entries: list[tuple[Role, Entry]], parameter: Entry | None) -> Row:
    formula = _formula(slot)
    second = next((entry.dtype for role, entry in entries if role.squared), None)
    lost = eps_is_lost(formula.eps, second, wide=bool(slot.settings.get("fused")) and formula.eps != 0)
    shown = parameter or entries[0][1]
    return Row(
        name=slot.parameter,
        shape=shown.shape,
        dtype=shown.dtype,
        state_dtypes={name: entry.dtype for name, (_, entry) in slot.entries.items()},
        law=formula,
        measured=_measured(entries, parameter, formula, 0.0 if lost else formula.eps),
        second_dtype=second,
        eps_lost=lost,
    )


def _formula(slot: Slot) -> UpdateFormula:
    step = _number(slot.step)
    if slot.kind:
        # A state of optax has no settings, and one class serves Adam, NAdam, RAdam, Adamax and Yogi.
        return UpdateFormula(kind=f"{slot.kind} or the like", step=step)
    kind = torch_kind({**slot.entries, **slot.others}, slot.settings)
    return torch_formula(kind, slot.settings, {**slot.others, "step": step}, _number)


def _number(value: Any) -> float | None:
    if isinstance(value, Entry):
        single = value.size == 1 and not value.dtype.startswith("complex")
        return float(widened(value.read()).reshape(-1)[0]) if single else None
    return float(value) if isinstance(value, int | float) else None


def _measured(
    entries: list[tuple[Role, Entry]], parameter: Entry | None, formula: UpdateFormula, eps: float | None
) -> Measured:
    arrays = [(role, entry.read().reshape(-1)) for role, entry in entries]
    # Where the parameter is not known, 0 stands for it: a sum with the update is then exact.
    weights = None if parameter is None else parameter.read().reshape(-1)
    narrow = _rounding((parameter or entries[0][1]).dtype)
    blocks = []
    size = arrays[0][1].size
    with np.errstate(all="ignore"):
        for start in range(0, size, _AT_A_TIME):
            cut = slice(start, min(start + _AT_A_TIME, size))
            own = np.zeros(cut.stop - cut.start) if weights is None else _wide(weights[cut])
            parts = measure_block(
                own,
                [(role, _wide(values[cut])) for role, values in arrays],
                None,
                None,
                formula,
                eps=eps,
                narrow=narrow,
                xp=xp,
            )
            blocks.append({name: float(part) for name, part in parts.items()})
    return join_blocks(blocks)


def _wide(values: Any) -> Any:
    return values.astype(np.complex128) if values.dtype.kind == "c" else widened(values).astype(np.float64)


def _rounding(dtype: str) -> Callable[[Any], Any]:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    return lambda x: x.astype(kind).astype(x.dtype)
