"""Checkpoints of Orbax whose nodes have both names and positions for keys: Orbax writes and cannot read them.

A list of flax nnx is such a node when it is saved as it is: beside its elements it has ``_pytree__state``.
The arrays are whole, and ``_METADATA``, which lists them, can be read once the positions are called names.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stablenum.commands.verify.limits import Limits, read_json

__all__ = ["has_mixed_keys", "readable"]

_METADATA = "_METADATA"
_NAME = 2  # Orbax's number for the key of a dict; 1 is a position


def has_mixed_keys(folder: Path, limits: Limits) -> bool:
    """Return whether a folder of one item has nodes that Orbax cannot read."""
    return _mended_metadata(folder, limits) is not None


@contextlib.contextmanager
def readable(folder: Path, limits: Limits) -> Iterator[Path]:
    """Yield a folder with the same contents that Orbax can read; mostly the folder itself.

    Args:
        folder: the absolute path of a folder of one item. It is not changed.
        limits: how long its description may be.
    """
    metadata = _mended_metadata(folder, limits)
    if metadata is None:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="stablenum-") as temporary:
        view = Path(temporary)
        for part in folder.iterdir():
            if part.name != _METADATA:
                (view / part.name).symlink_to(part)
        (view / _METADATA).write_text(metadata, encoding="utf-8")
        yield view


def _mended_metadata(folder: Path, limits: Limits) -> str | None:
    """Return metadata without mixed keys; None if there are none, or what is there is not for us to read."""
    try:
        metadata = read_json(folder / _METADATA, limits)
        paths = [entry["key_metadata"] for entry in metadata["tree_metadata"].values()]
        return json.dumps(metadata) if _call_all_names(paths) else None
    except (OSError, AttributeError, KeyError, TypeError, ValueError):
        return None


def _call_all_names(paths: list[list[dict[str, Any]]]) -> bool:
    """Make names of the positions in nodes that have both; return whether there were any."""
    kinds = defaultdict(set)
    keys = [(tuple(key["key"] for key in path[:i]), path[i]) for path in paths for i in range(len(path))]
    for node, key in keys:
        kinds[node].add(key["key_type"])
    mixed = [key for node, key in keys if len(kinds[node]) > 1]
    for key in mixed:
        key["key_type"] = _NAME
    return bool(mixed)
