"""Find out from the names in a checkpoint what each entry is: state, moments, settings, a guard, a record."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from stablenum.checkpoints.finiteness import Kind
from stablenum.checkpoints.names import (
    in_optimizer,
    is_record,
    is_setting,
    is_training,
    kind_of_number,
    may_be_mask,
)
from stablenum.commands.verify.contents import Contents, Entry, Path, Plain, bounded, path_of
from stablenum.diagnosis.audit import OPTAX_STATES, TORCH_ROLES, Role
from stablenum.guard.statedict import PACKED, is_guard_field

__all__ = ["Layout", "Part", "Slot"]

# Names that nothing but a moment of torch has; the others are taken for one only in an optimizer's state.
_UNMISTAKABLE = frozenset(("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg"))


class Part(StrEnum):
    """What an entry is for."""

    STATE = "parameter or buffer"
    OPTIMIZER = "optimizer"
    GUARD = "guard"
    RECORD = "record"


@dataclass(slots=True, kw_only=True)
class Slot:
    """What an optimizer keeps for one parameter.

    Attributes:
        parameter: the parameter's name, as far as it is known.
        kind: the kind of the optimizer; "" if the entries do not tell.
        entries: the moments, with their roles, by name.
        others: what else is kept, such as NAdam's ``mu_product``.
        settings: the settings of the parameter's group.
        step: the entry or the number that counts steps.
    """

    parameter: str
    kind: str = ""
    entries: dict[str, tuple[Role, Entry]] = field(default_factory=dict)
    others: dict[str, Entry] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    step: Entry | Plain | None = None


class Layout:
    """What the entries of a checkpoint are. Keys with dots in them count as several.

    Attributes:
        guards: the paths of guards' states. What lies beside their known fields is none of theirs.
    """

    def __init__(self, contents: Contents) -> None:
        self.contents = contents
        self._arrays = {_parts(entry.path): entry for entry in contents.arrays}
        self._values = {_parts(path): value for path, value in contents.values.items()}
        self._children = _children_of((*self._arrays, *self._values))
        self._is_training = is_training((*(e.path for e in contents.arrays), *contents.values))
        self.guards = tuple(self._guards())
        self._guarded = frozenset(self.guards)
        self._roots = {path for path, names in self._children.items() if {"state", "param_groups"} <= names}
        self._roles: dict[Path, Role] = {}
        self._beside: set[Path] = set()
        self.slots = (*self._torch_slots(), *self._optax_slots())

    def part(self, path: Path) -> Part:
        """Return what an entry is for."""
        keys = _parts(path)
        if any(keys[:n] in self._guarded and is_guard_field(keys[n:]) for n in range(len(keys))):
            return Part.GUARD
        if keys in self._roles or self._in_optimizer(keys):
            return Part.OPTIMIZER
        beside_model = len(path) == 1 and self._is_training
        return Part.RECORD if is_record(keys, beside_model=beside_model) else Part.STATE

    def role(self, path: Path) -> Role | None:
        """Return the role of a moment; None for any other entry."""
        return self._roles.get(_parts(path))

    def may_be_mask(self, path: Path) -> bool:
        """Return whether the name of an entry allows it to be a mask."""
        return self.part(path) is not Part.OPTIMIZER and may_be_mask(".".join(_leaf(_parts(path))))

    def kind(self, path: Path, *, size: int | None) -> Kind:
        """Return what :func:`~stablenum.checkpoints.finiteness.is_meant` has to know of an entry.

        Args:
            path: its path.
            size: the number of elements of an array; None for a plain number.
        """
        part, keys = self.part(path), _leaf(_parts(path))
        if part is Part.GUARD:
            return "guard"
        if size is None or (size == 1 and part is not Part.STATE):
            trained = self.role(path) is not None or keys in self._beside
            return "array" if trained else kind_of_number(keys, optimizer=part is Part.OPTIMIZER)
        return "buffer" if self.may_be_mask(path) else "array"

    def is_setting(self, path: Path) -> bool:
        """Return whether an entry is a setting of an optimizer, such as its learning rate."""
        return is_setting(_parts(path))

    # --- by names ----------------------------------------------------------------------------

    def _guards(self) -> Iterator[Path]:
        for path, names in self._children.items():
            recorded = "floats" in self._children.get((*path, "recorder"), ())
            if names.issuperset(PACKED) or (recorded and "loss_scale" in names):
                yield path

    def _in_optimizer(self, path: Path) -> bool:
        if any(path[:n] in self._roots for n in range(len(path))):
            return True
        return in_optimizer(path)

    # --- torch -------------------------------------------------------------------------------

    def _torch_slots(self) -> list[Slot]:
        found: dict[Path, Slot] = {}
        for path, entry in self._arrays.items():
            role = self._torch_role(path[:-1], path[-1])
            if role is not None:
                self._roles[path] = role
                slot = found.setdefault(path[:-1], Slot(parameter=_after_state(path[:-1])))
                slot.entries[path[-1]] = (role, entry)
        for path, entry in self._arrays.items():
            if path[:-1] in found and path not in self._roles:
                found[path[:-1]].others[path[-1]] = entry
                self._beside.add(path)
        groups = self._groups()
        for owner, slot in found.items():
            slot.step = slot.others.get("step") or self._values.get((*owner, "step"))
            slot.parameter, slot.settings = groups.get(owner, (slot.parameter, {}))
        return list(found.values())

    def _torch_role(self, owner: Path, name: str) -> Role | None:
        role = TORCH_ROLES.get(name)
        if name in _UNMISTAKABLE:
            return role
        if not self._in_optimizer((*owner, name)):
            return None
        if name == "sum" and "step" in self._children[owner]:
            return Role.SECOND  # Adagrad's
        return role

    def _groups(self) -> dict[Path, tuple[str, Mapping[str, Any]]]:
        """Return the name and the settings of each parameter, by the path of its state."""
        found: dict[Path, tuple[str, Mapping[str, Any]]] = {}
        for root in self._roots:
            groups: dict[str, dict[str, Any]] = defaultdict(dict)
            length = len(root) + 1
            for path, value in self._values.items():
                if path[:length] == (*root, "param_groups") and len(path) > length + 1:
                    _put(groups[path[length]], path[length + 1 :], value)
            for group in groups.values():
                names = list(group.pop("param_names", {}).values())
                for i, number in enumerate(group.pop("params", {}).values()):
                    owner = (*root, "state", *path_of(str(number)))
                    name = str(names[i]) if i < len(names) else _after_state(owner)
                    found[owner] = (name, _with_pairs(group))
        return found

    # --- optax -------------------------------------------------------------------------------

    def _optax_slots(self) -> list[Slot]:
        found: dict[tuple[Path, Path], Slot] = {}
        for path, entry in self._arrays.items():
            place = self._optax_node(path)
            if place is None or path in self._roles or self.part(path) is Part.GUARD:
                continue
            node, kind, role = place
            parameter = _leaf(path[len(node) + 1 :])
            self._roles[path] = role
            slot = found.setdefault((node, parameter), Slot(parameter=".".join(parameter) or "param"))
            slot.kind = kind
            slot.entries[path[len(node)]] = (role, entry)
            counts = (self._arrays.get((*node, "count", *behind)) for behind in ((), ("value",)))
            slot.step = next((c for c in counts if c is not None), self._values.get((*node, "count")))
        return list(found.values())

    def _optax_node(self, path: Path) -> tuple[Path, str, Role] | None:
        """Return where the state of a transformation is that an entry belongs to, its kind, and the role."""
        for n in range(len(path)):
            siblings = self._children[path[:n]]
            counted = "count" in siblings
            if not (counted and {"mu", "nu"} <= siblings) and not self._in_optimizer(path[: n + 1]):
                continue
            for kind, fields in _BY_SIZE:
                if path[n] in fields and set(fields) <= siblings:
                    return path[:n], kind, fields[path[n]]
        return None


# The states with the most fields first, because the fields of one may be among those of another.
_BY_SIZE = sorted(
    ((kind, fields) for kind, fields in OPTAX_STATES.values()), key=lambda pair: len(pair[1]), reverse=True
)


def _parts(path: Path) -> Path:
    """Return a path with the keys split at their dots."""
    return bounded(tuple(part for key in path for part in path_of(key)))


def _children_of(paths: tuple[Path, ...]) -> dict[Path, frozenset[str]]:
    """Return the keys under each path."""
    found: dict[Path, set[str]] = defaultdict(set)
    for path in paths:
        for n, key in enumerate(path):
            found[path[:n]].add(key)
    return {path: frozenset(names) for path, names in found.items()}


def _leaf(path: Path) -> Path:
    """Return a path without the key "value", in which flax.nnx wraps each array."""
    return path[:-1] if path[-1:] == ("value",) else path


def _after_state(owner: Path) -> str:
    """Return the name of a parameter from the path of its state."""
    start = max((i + 1 for i, key in enumerate(owner) if key == "state"), default=0)
    name = ".".join(owner[start:])
    return ".".join(owner) if not name or name.isdigit() else name


def _put(group: dict[str, Any], path: Path, value: Plain) -> None:
    for key in path[:-1]:
        group = group.setdefault(key, {})
    group[path[-1]] = value


def _with_pairs(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with a tuple in place of each ``{"0": ..., "1": ...}``."""
    return {key: tuple(v.values()) if isinstance(v, dict) else v for key, v in group.items()}
