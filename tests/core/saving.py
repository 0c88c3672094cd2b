"""A format of checkpoints for tests, without arrays: lists of numbers as JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from stablenum.checkpoints.finiteness import NonFinite
from stablenum.checkpoints.settings import StoreSettings
from stablenum.checkpoints.store import Store
from stablenum.errors import CheckpointError

__all__ = ["ListCodec", "state_of", "store_in"]


class ListCodec:
    """Writes each list into a file of its own."""

    name = "lists"

    def versions(self) -> dict[str, str]:
        return {"lists": "1.0"}

    def write(self, folder: Path, state: dict[str, list[float]]) -> None:
        (folder / "parts").mkdir()
        for name, values in state.items():
            (folder / "parts" / f"{name}.json").write_text(json.dumps(values), encoding="utf-8")

    def read(self, folder: Path, like: Any) -> dict[str, list[float]]:
        try:
            return {p.stem: json.loads(p.read_text("utf-8")) for p in sorted(folder.glob("parts/*.json"))}
        except ValueError as error:
            raise CheckpointError(f"not JSON: {error}") from error

    def nonfinite(self, state: dict[str, list[float]]) -> list[NonFinite]:
        found = []
        for name, values in state.items():
            counts = (
                sum(map(math.isnan, values)),
                values.count(math.inf),
                values.count(-math.inf),
            )
            if any(counts):
                found.append(NonFinite(name, "array", *counts, size=len(values), dimensions=1))
        return found


def state_of(step: int, size: int = 3) -> dict[str, list[float]]:
    """A state that follows from its step."""
    return {"weights": [step + i / 2 for i in range(size)], "moments": [float(step)] * size}


def store_in(folder: Path, **settings: Any) -> Store:
    return Store(folder, ListCodec(), StoreSettings(**settings))
