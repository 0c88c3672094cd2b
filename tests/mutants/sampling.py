"""Which mutants are tried: a sample of equal density per line in each wing, less the excluded code."""

from __future__ import annotations

import ast
import fnmatch
import functools
import hashlib
import tomllib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.mutants.mutations import Mutant, mutants_of

__all__ = [
    "Judged", "LeftOut", "Survivor", "all_mutants", "packages_of", "read_judged", "sample", "wing_of",
]  # fmt: skip

_WHYS = ("equivalent", "not on a CPU")


@dataclass(frozen=True)
class LeftOut:
    """Code that is not mutated: every function of ``package`` whose qualified name matches ``function``.

    With ``text``, only statements whose changed lines contain that text.
    """

    package: str
    function: str
    reason: str
    text: str = ""

    def holds(self, mutant: Mutant) -> bool:
        """Whether the mutant lies in that code."""
        return (
            mutant.file.split("/")[0] == self.package
            and fnmatch.fnmatchcase(mutant.function, self.function)
            and self.text in mutant.before
        )


@dataclass(frozen=True)
class Survivor:
    """A mutant that the tests need not notice, and why. Identified by its text, not by its line number."""

    file: str
    function: str
    before: str
    after: str
    why: str
    reason: str
    nth: int = 1

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        """The same as :attr:`Mutant.key`."""
        return (self.file, self.function, self.before, self.after, self.nth)


@dataclass(frozen=True)
class Judged:
    """Decisions about mutants that were made by hand."""

    left_out: tuple[LeftOut, ...] = ()
    survivors: tuple[Survivor, ...] = ()

    def stale(self, mutants: Iterable[Mutant]) -> list[str]:
        """The entries that match no mutant of the current code."""
        mutants = list(mutants)
        keys = {mutant.key for mutant in mutants}
        gone = [
            f"survivors: {s.file}: {s.function}: {s.before} -> {s.after}"
            for s in self.survivors
            if s.key not in keys
        ]
        return gone + [
            f"left out: {entry.package}: {entry.function} {entry.text}".rstrip()
            for entry in self.left_out
            if not any(entry.holds(mutant) for mutant in mutants)
        ]


def read_judged(left_out: Path, survivors: Path) -> Judged:
    """Read the two TOML files. Every entry needs a reason."""
    return Judged(
        tuple(LeftOut(**entry) for entry in _entries(left_out)),
        tuple(_survivor(entry) for entry in _entries(survivors)),
    )


def _entries(path: Path) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = tomllib.loads(path.read_text(encoding="utf-8")).get("entry", [])
    for entry in entries:
        if not entry.get("reason", "").strip():
            raise ValueError(f"{path.name}: an entry without a reason: {entry}")
    return entries


def _survivor(entry: dict[str, Any]) -> Survivor:
    if entry.get("why") not in _WHYS:
        raise ValueError(f"survivors: why must be one of {', '.join(_WHYS)}; got {entry.get('why')!r}")
    return Survivor(**entry)


def packages_of(root: Path) -> list[str]:
    """The folders that go into the wheel."""
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    packages: list[str] = settings["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    return packages


def all_mutants(root: Path, packages: Iterable[str]) -> list[Mutant]:
    """Every mutant of every module."""
    return [m for p in packages for path in sorted((root / p).rglob("*.py")) for m in mutants_of(path, root)]


def sample(mutants: Iterable[Mutant], n: int, seed: int, root: Path) -> list[Mutant]:
    """About ``n`` mutants, equally many per line in each wing, at most one on a line.

    A hash of its text and the seed decides on each: a change of the code affects few other mutants.
    """
    lines: dict[str, dict[tuple[str, int], list[Mutant]]] = defaultdict(lambda: defaultdict(list))
    for mutant in mutants:
        lines[wing_of(mutant.file)][mutant.file, mutant.line].append(mutant)
    total = sum(map(len, lines.values()))
    chosen = []
    for _, of_lines in sorted(lines.items()):
        share = max(1, round(n * len(of_lines) / total))
        order = sorted((_rank(m, seed), m) for line in of_lines.values() for m in line)
        chosen += _first(order, share, root)
    return chosen


def wing_of(file: str) -> str:
    """The folder of a file, at most three deep: no wing, such as that of checkpoints, is left to chance."""
    return "/".join(file.split("/")[:-1][:3])


def _rank(mutant: Mutant, seed: int) -> str:
    return hashlib.sha256(f"{seed} {mutant.digest}".encode()).hexdigest()


def _first(order: list[tuple[str, Mutant]], n: int, root: Path) -> list[Mutant]:
    chosen: dict[tuple[str, int], Mutant] = {}
    for _, mutant in order:
        if len(chosen) == n:
            break
        if (mutant.file, mutant.line) not in chosen and _changes(mutant, (root / mutant.file).read_bytes()):
            chosen[mutant.file, mutant.line] = mutant
    return list(chosen.values())


def _changes(mutant: Mutant, source: bytes) -> bool:
    """Whether the change gives a different program, not just other parentheses."""
    return _program(mutant.apply(source)) != _program_as_it_is(source)


def _program(source: bytes) -> str:
    return ast.dump(ast.parse(source))


_program_as_it_is = functools.lru_cache(maxsize=None)(_program)
