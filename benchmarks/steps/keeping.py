"""Keep the results of an interrupted run, so that the next run continues it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.steps.errors import BenchmarkError

__all__ = ["Kept", "sources_digest"]

ROOT = Path(__file__).parents[2]
_MEASURED = ("benchmarks", "stablenum", "stablenum_jax", "stablenum_torch")


def sources_digest() -> str:
    """A digest of all Python files that are measured or do the measuring."""
    digest = hashlib.sha256()
    for package in _MEASURED:
        for file in sorted((ROOT / package).rglob("*.py")):
            digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return digest.hexdigest()


class Kept:
    """The measured parts by name, in a file that exists only until the run is complete.

    Args:
        file: the path. A file that was written under other circumstances, or that cannot be read, is ignored
            and replaced.
        circumstances: returns all that the figures depend on: versions, machine, threads, sources.
        say: called with a message about each part.
    """

    def __init__(
        self, file: Path, circumstances: Callable[[], Mapping[str, Any]], *, say: Callable[[str], None]
    ) -> None:
        self._file, self._say = file, say
        self._now = lambda: json.loads(json.dumps(circumstances()))
        self._circumstances = self._now()
        self._parts = self._found()

    def _found(self) -> dict[str, Any]:
        try:
            found = json.loads(self._file.read_text(encoding="utf-8"))
            if found["circumstances"] == self._circumstances:
                return dict(found["parts"])
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError):
            pass
        self._say(f"{self._file} is of other circumstances: everything is measured again")
        return {}

    def part(self, name: str, measure: Callable[[], Any]) -> Any:
        """The result of a part, measured now if it is not in the file.

        Raises:
            BenchmarkError: the circumstances changed during the measurement.
        """
        if name in self._parts:
            self._say(f"{name}: kept from the interrupted run")
            return self._parts[name]
        self._say(f"measuring: {name} ...")
        found = measure()
        if self._now() != self._circumstances:
            raise BenchmarkError(
                f"{name}: versions or sources changed while it was measured; start again without editing."
            )
        whole = {"circumstances": self._circumstances, "parts": self._parts | {name: found}}
        self._file.parent.mkdir(parents=True, exist_ok=True)
        new = self._file.with_suffix(".new")  # an interruption leaves the old file or the new one
        new.write_text(json.dumps(whole, allow_nan=False), encoding="utf-8")
        new.replace(self._file)
        self._parts[name] = found
        return found

    def forget(self) -> None:
        """Delete the file once the run is complete."""
        self._file.unlink(missing_ok=True)
