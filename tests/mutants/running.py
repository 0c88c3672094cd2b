"""Trying mutants: each in a copy of the tree, against the tests concerned, until one of them fails."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType

from tests.mutants.mutations import Mutant
from tests.mutants.recording import TestMap, environment

__all__ = [
    "ERROR",
    "KILLED",
    "SURVIVED",
    "TIMED_OUT",
    "UNSEEN",
    "Result",
    "Tree",
    "copy_tree",
    "try_all",
    "verdict",
]

KILLED, SURVIVED, TIMED_OUT, UNSEEN, ERROR = "killed", "survived", "timed out", "run by no test", "error"
# Tests of a few files kill most mutants; importing all files takes longer than running those.
_FIRST_FILES = 5


@dataclass(frozen=True)
class Result:
    """The result of trying a mutant.

    Attributes:
        key: the mutant's key.
        status: one of the words above.
        by: the test that failed, and how.
        ran, concerned: how many tests ran, and how many run its file.
        seconds: processor time.
        of_tree, of_files: digests of the tree it was tried in, and of the mutated file and the test's file.
    """

    key: tuple[str, str, str, str, int]
    status: str
    by: str = ""
    error: str = ""
    ran: int = 0
    concerned: int = 0
    seconds: float = 0.0
    of_tree: str = ""
    of_files: str = ""

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Result:
        """What :meth:`to_json` wrote."""
        plain = json.loads(line)
        return cls(**{**plain, "key": tuple(plain["key"])})


def copy_tree(source: Path, target: Path) -> None:
    """Copy the files that git tracks or would add; all files outside a repository or in an ignored folder."""
    shutil.rmtree(target, ignore_errors=True)
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=source,
        capture_output=True,
        check=False,
    )
    if listed.returncode or not listed.stdout:
        shutil.copytree(source, target, ignore=lambda folder, _: {target.name, ".git", ".venv"})
        return
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (source / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, target / name)


class Tree:
    """A copy of the tree in which one mutant at a time is tried."""

    def __init__(self, root: Path, packages: Sequence[str], folder: Path) -> None:
        self.root, self.packages, self.folder = root, packages, folder
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def end(self) -> None:
        """End the running tests and the processes that they started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def try_one(self, mutant: Mutant, tests: TestMap, *, barred: Iterable[str], seconds: float) -> Result:
        """Apply the mutant, run tests until one fails or the processor time is spent, restore the file."""
        barred = set(barred)
        names = [t for t in tests.concerned(mutant, self.root) if t not in barred]
        if not names:
            return Result(mutant.key, UNSEEN)
        path = self.root / mutant.file
        source = path.read_bytes()
        self._write(path, mutant.apply(source))
        try:
            return self._judge(mutant, names, tests, seconds)
        finally:
            self._write(path, source)

    def _judge(self, mutant: Mutant, names: list[str], tests: TestMap, seconds: float) -> Result:
        spent, ran = 0.0, 0
        for part in _in_two(names):
            outcome = self.run([(t, tests.seconds[t]) for t in part], seconds=seconds - spent, stop=True)
            spent, ran = spent + outcome["seconds"], ran + outcome["ran"]
            status, by, error = verdict(outcome)
            if status != SURVIVED or spent >= seconds:
                break
        return Result(mutant.key, status, by, error, ran, len(names), round(spent, 1))

    @staticmethod
    def _write(path: Path, text: bytes) -> None:
        """Python would reuse a compiled file if the new source has the same size and second of change."""
        path.write_bytes(text)
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            compiled.unlink()

    def run(self, tests: Sequence[tuple[str, float]], *, seconds: float, stop: bool) -> dict:
        """Run tests in this order; return what the plugin reported, or that it reported nothing."""
        out = self.folder / "told.json"
        out.unlink(missing_ok=True)
        plan = {"mode": "run", "packages": self.packages, "root": str(self.root), "out": str(out)}
        plan_file = self.folder / "plan.json"
        plan_file.write_text(json.dumps({**plan, "tests": tests, "seconds": seconds}), encoding="utf-8")
        files = list(dict.fromkeys(test.split("::")[0] for test, _ in tests))
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--tb=short",
            "--no-header",
            "-p",
            "no:cacheprovider",
        ]
        command += ["-p", "tests.mutants.plugin", *(["-x"] if stop else []), *files]
        with (self.folder / "output.txt").open("w", encoding="utf-8") as output:
            self._process = process = subprocess.Popen(
                command,
                cwd=self.root,
                env=environment(self.root, plan_file),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                # The machine may be shared, so allow much more than the processor time.
                process.wait(300 + 6 * min(seconds, 1e5))
                late = False
            except subprocess.TimeoutExpired:
                late = True
            finally:
                self.end()
        nothing = {"ran": 0, "failed": {}, "broken": "", "spent": False, "seconds": 0.0}
        outcome = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {**nothing, "silent": True}
        last = (self.folder / "output.txt").read_text(encoding="utf-8", errors="replace").strip()
        return {**outcome, "late": late, "code": process.returncode, "last": last[-3000:]}


def _in_two(names: list[str]) -> list[list[str]]:
    """The tests of the first few files, and the rest."""
    files = dict.fromkeys(test.split("::")[0] for test in names)
    first = set(list(files)[:_FIRST_FILES])
    parts = (
        [t for t in names if t.split("::")[0] in first],
        [t for t in names if t.split("::")[0] not in first],
    )
    return [part for part in parts if part]


def verdict(outcome: dict) -> tuple[str, str, str]:
    """Status, test and error from what :meth:`Tree.run` returned."""
    if outcome["late"]:
        return TIMED_OUT, "", "the process did not end"
    for test, error in outcome["failed"].items():
        return (TIMED_OUT if "from pytest-timeout" in error else KILLED), test, error
    if outcome["broken"]:
        return KILLED, outcome["broken"], "its import"
    if outcome.get("silent"):
        # It crashed, or the library can no longer be imported.
        crashed = outcome["code"] < 0 or "Error while loading conftest" in outcome["last"]
        return (KILLED if crashed else ERROR), "the start", outcome["last"][-300:]
    return (SURVIVED, "", "") if outcome["ran"] else (ERROR, "", outcome["last"][-300:])


def try_all(
    trees: Sequence[Tree],
    mutants: Sequence[Mutant],
    tests: TestMap,
    *,
    seconds: float,
    on_result: Callable[[Mutant, Result], None],
    known: Mapping[tuple, Result] = MappingProxyType({}),
) -> None:
    """Try the mutants that are not ``known`` yet, one at a time in each tree.

    A test that also fails without the mutant proves nothing: at the end every test that killed a mutant is
    run in the unchanged tree, and if it fails the mutant is tried again without it.
    """
    barred: set[str] = set()
    results = dict(known)
    left = [m for m in mutants if m.key not in results]
    while True:
        results |= _spread(trees, left, tests, barred, seconds, on_result)
        killers = {results[m.key].by for m in mutants} & tests.seconds.keys()
        wrong = _failing(trees[0], sorted(killers), tests) - barred
        if not wrong:
            return
        barred |= wrong
        left = [m for m in mutants if results[m.key].by in wrong]


def _failing(tree: Tree, names: Sequence[str], tests: TestMap) -> set[str]:
    """The tests that fail without a mutant."""
    if not names:
        return set()
    found = tree.run([(t, tests.seconds[t]) for t in names], seconds=float("inf"), stop=False)
    if found["ran"] < len(names):
        raise RuntimeError(f"the tests that killed could not be run without a mutant: {found['last'][-300:]}")
    return set(found["failed"])


def _spread(
    trees: Sequence[Tree],
    mutants: Sequence[Mutant],
    tests: TestMap,
    barred: set[str],
    seconds: float,
    on_result: Callable[[Mutant, Result], None],
) -> dict[tuple, Result]:
    waiting: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
    for mutant in mutants:
        waiting.put(mutant)
    found: dict[tuple, Result] = {}
    lock, failure = threading.Lock(), []

    def work(tree: Tree) -> None:
        while not failure:
            try:
                mutant = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                result = tree.try_one(mutant, tests, barred=barred, seconds=seconds)
            except BaseException as error:
                failure.append(error)
                raise
            with lock:
                if failure:  # the tests were killed before they finished
                    return
                found[mutant.key] = result
                on_result(mutant, result)

    threads = [threading.Thread(target=work, args=(tree,), daemon=True) for tree in trees]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt as interruption:
        failure.append(interruption)
        for tree in trees:
            tree.end()
    if failure:
        raise failure[0]
    return found
