"""``python -m tests.mutants``: see ``--help``."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.mutants.mutations import Mutant
from tests.mutants.recording import TestMap, record
from tests.mutants.report import passes, report
from tests.mutants.running import KILLED, TIMED_OUT, Result, Tree, copy_tree, try_all
from tests.mutants.sampling import all_mutants, packages_of, read_judged, sample

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
LEAST = 0.95


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--n", type=int, default=240, help="mutants in the sample (240)")
    parser.add_argument("--seed", type=int, default=1, help="of the sample (1)")
    parser.add_argument("--workers", type=int, default=2, help="mutants tried beside one another (2)")
    parser.add_argument("--seconds", type=float, default=120.0, help="of processor time for a mutant (120)")
    parser.add_argument("--work", type=Path, default=ROOT / ".mutants", help="folder for copies and results")
    parser.add_argument("--list", action="store_true", help="print the sample and end")
    parser.add_argument(
        "--again", action="store_true", help="forget earlier results, and record the tests again"
    )
    parser.add_argument(
        "--only", nargs="*", default=[""], help="only mutants whose file:line begins with one"
    )
    parser.add_argument("tests", nargs="*", help="files of tests to use (all that `make test` runs)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw, record, try, report. The results of an interrupted run are kept, and the next one continues."""
    options = _arguments(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    packages = packages_of(ROOT)
    judged = read_judged(HERE / "left_out.toml", HERE / "survivors.toml")
    everything = all_mutants(ROOT, packages)
    stale = judged.stale(everything)
    candidates = [m for m in everything if not any(entry.holds(m) for entry in judged.left_out)]
    chosen = sample(candidates, options.n, options.seed, ROOT)
    chosen = [m for m in chosen if f"{m.file}:{m.line}".startswith(tuple(options.only))]
    print(f"{len(chosen)} of {len(candidates)} mutants, --n {options.n} --seed {options.seed}", flush=True)
    if options.list:
        for mutant in sorted(chosen, key=lambda m: (m.file, m.line)):
            print(f"{mutant.file}:{mutant.line}: {mutant.before}\n    -> {mutant.after}")
        return 0
    results = _run(options, packages, chosen)
    print(report(chosen, results, judged, stale, least=LEAST))
    return 0 if passes(chosen, results, judged, stale, least=LEAST) else 1


def _run(
    options: argparse.Namespace, packages: Sequence[str], mutants: Sequence[Mutant]
) -> dict[tuple, Result]:
    work = options.work.resolve()
    trees = []
    for i in range(options.workers):
        copy_tree(ROOT, work / f"tree-{i}")
        trees.append(Tree(work / f"tree-{i}", packages, work / f"of-tree-{i}"))
    left_out = (ROOT / "tests" / "left_out.txt").read_text(encoding="utf-8")
    digest = _digest(ROOT, _python_files(trees[0].root), repr(sorted(options.tests)) + left_out)
    tests = _tests(options, packages, trees[0], work, digest)
    kept = work / "results.jsonl"
    if options.again:
        kept.unlink(missing_ok=True)
    known = _earlier(kept, digest)
    old = sum(m.key in known for m in mutants)
    print(f"{len(mutants) - old} to try, {old} known from before ({kept})", flush=True)
    begin = time.monotonic()

    def on_result(mutant: Mutant, result: Result) -> None:
        result = dataclasses.replace(result, of_tree=digest, of_files=_digest_of_files(result))
        known[mutant.key] = result
        with kept.open("a", encoding="utf-8") as file:
            file.write(f"\n{result.to_json()}\n")
        place = f"{mutant.file}:{mutant.line}"
        how = f" by {result.by}" if result.status in (KILLED, TIMED_OUT) else ""
        passed = time.monotonic() - begin
        print(f"[{passed:6.0f} s] {result.status:<14} {place}{how} ({result.seconds:.0f} s)", flush=True)

    try_all(trees, mutants, tests, seconds=options.seconds, on_result=on_result, known=known)
    return known


def _python_files(root: Path) -> list[str]:
    """All Python files except those of this folder."""
    names = (path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    return sorted(name for name in names if not name.startswith("tests/mutants/"))


def _digest(root: Path, names: Iterable[str], more: str = "") -> str:
    whole = hashlib.sha256(more.encode())
    for name in names:
        whole.update(name.encode())
        if (root / name).is_file():
            whole.update((root / name).read_bytes())
    return whole.hexdigest()[:12]


def _digest_of_files(result: Result) -> str:
    """The mutant's file and that of the test that killed it."""
    return _digest(ROOT, [result.key[0], result.by.split("::")[0]])


def _tests(
    options: argparse.Namespace, packages: Sequence[str], tree: Tree, work: Path, digest: str
) -> TestMap:
    path = work / f"tests-{digest}.json"
    if options.again or not path.exists():
        print("recording which tests run which lines", flush=True)
        folder = work / "recording"
        record(tree.root, packages, folder, options.tests, processes=options.workers).save(path)
    return TestMap.load(path)


def _earlier(path: Path, digest: str) -> dict[tuple, Result]:
    """The results in the file that are still valid.

    All those of the same tree are; in another one a mutant is still killed if neither its file nor the test's
    has changed.
    """
    known = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            result = Result.from_json(line)
        except json.JSONDecodeError:  # an interrupted run cut it off
            continue
        killed = result.status == KILLED and result.of_files == _digest_of_files(result)
        if killed or result.of_tree == digest:
            known[result.key] = result
        else:
            known.pop(result.key, None)
    return known


if __name__ == "__main__":
    sys.exit(main())
