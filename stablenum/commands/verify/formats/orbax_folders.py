"""Read a checkpoint of Orbax: the folder of one item, or of a step with several."""

from __future__ import annotations

import contextlib
import importlib
import math
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from stablenum._support.partners import imported
from stablenum.commands.quiet import without_log
from stablenum.commands.verify.contents import Contents, Entry, NotCheckedError, Plain
from stablenum.commands.verify.contents import Path as Keys
from stablenum.commands.verify.counts import width_of
from stablenum.commands.verify.formats.orbax_lists import has_mixed_keys, readable
from stablenum.commands.verify.limits import Limits, read_json
from stablenum.guard.statedict import disabling_fields

__all__ = ["GUARD", "TEMPORARY", "is_item", "is_step", "read"]

GUARD = "guard.json"
_GUARDED = "stablenum_jax.integrations.orbax.GuardedCheckpointHandler"
# What the name of a folder contains while Orbax writes it.
TEMPORARY = ".orbax-checkpoint-tmp"
_ITEM, _STEP = "_METADATA", "_CHECKPOINT_METADATA"
_OLDEST = "0.12.8"
_LISTS = (
    "Orbax cannot restore {}, where lists of flax nnx were saved as they are: save nnx.state of them instead"
)


def is_item(folder: Path) -> bool:
    """Return whether a folder holds one pytree of Orbax."""
    return (folder / _ITEM).is_file()


def is_step(folder: Path) -> bool:
    """Return whether a folder is that of one step, with one or more items in it."""
    return (folder / _STEP).is_file()


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir())


def read(folder: Path, limits: Limits) -> Contents:
    """Return what is in a checkpoint of Orbax.

    Raises:
        NotCheckedError: a part is missing or damaged, the save was interrupted, or Orbax is not installed.
    """
    if TEMPORARY in folder.name:
        raise NotCheckedError(
            "corrupt", "the save was interrupted: Orbax renames the folder when it is complete"
        )
    items = [folder] if is_item(folder) else [path for path in _folders(folder) if is_item(path)]
    if not items:
        raise NotCheckedError("corrupt", f"no folder in it has the file {_ITEM}")
    orbax, jax = _libraries()
    arrays: list[Entry] = []
    values: dict[Keys, Plain] = {}
    notes: list[str] = []
    faults: dict[str, float] = {}
    for item in items:
        prefix = () if item is folder or item.name == "default" else (item.name,)
        for path, leaf in _leaves(orbax, jax, item, limits):
            _sort((*prefix, *path), leaf, arrays, values)
        guarded = (item / GUARD).is_file() or _is_guarded(item, limits)
        if has_mixed_keys(item, limits):
            notes.append(_LISTS.format(item.name))
        if guarded:
            name = f"{item.name}/{GUARD}"
            faults |= {
                f"{name}: {field}": value for field, value in _guard_faults(item / GUARD, name, limits)
            }
            notes.append(f"{name} holds the guard's state, apart from the rest")
    return Contents(
        format="orbax",
        arrays=tuple(arrays),
        values=values,
        notes=tuple(notes),
        faults=faults,
        stored=_stored(folder),
    )


def _stored(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _is_guarded(item: Path, limits: Limits) -> bool:
    """Return whether Orbax's record says that GuardedSave wrote an item, alone or as a part of a step."""
    item = item.resolve()
    return _GUARDED in (_handlers(item, limits), _handlers(item.parent, limits, item.name))


def _handlers(folder: Path, limits: Limits, item: str | None = None) -> Any:
    """Return which handlers wrote a folder, as Orbax has recorded; None if nothing says it."""
    try:
        found = read_json(folder / _STEP, limits)["item_handlers"]
    except (FileNotFoundError, KeyError, TypeError, ValueError):
        return None
    if item is None:
        return found
    return found.get(item) if isinstance(found, Mapping) else None


def _guard_faults(file: Path, name: str, limits: Limits) -> list[tuple[str, float]]:
    try:
        return list(disabling_fields(read_json(file, limits)))
    except FileNotFoundError as error:
        raise NotCheckedError("corrupt", f"{name} is missing, which GuardedSave wrote") from error
    except (TypeError, ValueError, RecursionError) as error:
        text = " ".join(str(error).split())[:200]
        raise NotCheckedError("corrupt", f"{name} is not a guard's state: {text}") from error


def _libraries() -> tuple[Any, Any]:
    try:
        orbax = imported("a checkpoint of Orbax", {"orbax.checkpoint": "orbax-checkpoint"}, _OLDEST)
    except ImportError as error:
        raise NotCheckedError("unreadable", str(error)) from error
    return orbax, importlib.import_module("jax")


def _leaves(orbax: Any, jax: Any, item: Path, limits: Limits) -> Iterator[tuple[Keys, Any]]:
    """Yield the arrays and values of a pytree, on the host, with their paths."""
    with (
        _quiet(),
        _damage_named(),
        readable(item.resolve(), limits) as folder,
        orbax.Checkpointer(orbax.PyTreeCheckpointHandler()) as checkpointer,
    ):
        tree = checkpointer.metadata(folder)
        tree = getattr(tree, "item_metadata", tree)
        tree = getattr(tree, "tree", tree)
        _check_claims(jax.tree.leaves(tree), _stored(item), limits)
        as_arrays = jax.tree.map(lambda leaf: _restored_as(orbax, leaf), tree)
        restored = checkpointer.restore(folder, args=orbax.args.PyTreeRestore(restore_args=as_arrays))
    for path, leaf in jax.tree_util.tree_leaves_with_path(restored):
        yield tuple(jax.tree_util.keystr((key,), simple=True) for key in path), leaf


def _check_claims(described: list[Any], stored: int, limits: Limits) -> None:
    """Check what the arrays will take, for what no file holds is filled with zeros."""
    limits.check("parts", len(described), "its arrays and plain values are many")
    claimed = 0
    for leaf in described:
        if (shape := getattr(leaf, "shape", None)) is not None and (
            dtype := getattr(leaf, "dtype", None)
        ) is not None:
            claimed += math.prod(shape) * width_of(str(np.dtype(dtype)))
    limits.check_bytes(claimed, stored)


def _restored_as(orbax: Any, described: Any) -> Any:
    text = "String" in type(described).__name__
    return orbax.RestoreArgs(restore_type=str if text else np.ndarray)


def _sort(path: Keys, leaf: Any, arrays: list[Entry], values: dict[Keys, Plain]) -> None:
    if isinstance(leaf, bool | int | float | complex | str):
        values[path] = leaf
    elif hasattr(leaf, "dtype"):
        found = np.asarray(leaf)
        arrays.append(Entry(path=path, dtype=found.dtype.name, shape=found.shape, read=lambda: found))


@contextlib.contextmanager
def _damage_named() -> Iterator[None]:
    """Turn what Orbax and TensorStore raise for a damaged folder into :class:`NotCheckedError`."""
    try:
        yield
    except NotCheckedError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        if isinstance(error, KeyError) or not text:
            text = f"{type(error).__name__}: {text}"
        raise NotCheckedError("corrupt", text) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep Orbax from telling what it looks for and does not find."""
    with without_log("absl"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
