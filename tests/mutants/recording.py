"""Which tests run which lines, recorded once by coverage.py while all tests run."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.mutations import Mutant
from tests.mutants.plugin import PLAN, TEST

__all__ = ["TestMap", "environment", "record"]

# A process that a test starts records its own coverage under the name of that test.
_SITE = "import coverage\ncoverage.process_startup()\n"
_CONFIG = """
[run]
data_file = {folder}/coverage
source =
    {sources}
parallel = true
disable_warnings = no-data-collected, module-not-imported, module-not-measured, no-sysmon
{context}
"""


# What a watcher's functions have behind the name of their file, so that no warning counts their frames.
_OF_WATCHERS = " (importlib._bootstrap)"


@dataclass
class TestMap:
    """The tests that passed and what they ran.

    Attributes:
        seconds: of each test.
        lines: file -> line -> tests.
        sizes: the number of lines of the library that each test ran.
    """

    __test__ = False  # not a test class, although its name begins with Test

    seconds: dict[str, float]
    lines: dict[str, dict[int, list[str]]]
    sizes: dict[str, int]

    def concerned(self, mutant: Mutant, root: Path) -> list[str]:
        """The tests that run the mutated code, likely and cheap ones first; then others that run its file."""
        of_file = self.lines.get(mutant.file, {})
        direct = {t for line in range(mutant.first, mutant.last + 1) for t in of_file.get(line, ())}
        if mutant.name:
            direct |= self._by_name(mutant.name, root)
        wider = {t for tests in of_file.values() for t in tests} - direct
        return [*self._ordered(direct, mutant.file), *self._ordered(wider, mutant.file)]

    def _by_name(self, name: str, root: Path) -> set[str]:
        """The tests that run a line with this word: where a module's constant is used, or one made of it.

        A test whose own file has the word may use the constant itself.
        """
        texts = {file: (root / file).read_text(encoding="utf-8") for file in self.lines}
        word = re.compile(rf"\b(?:{'|'.join(_made_of(name.split('|'), texts.values()))})\b")
        files = {test.split("::")[0] for test in self.seconds}
        with_word = {file for file in files if word.search((root / file).read_text(encoding="utf-8"))}
        found = {test for test in self.seconds if test.split("::")[0] in with_word}
        for file, of_lines in self.lines.items():
            for i, text in enumerate(texts[file].splitlines(), 1):
                if i in of_lines and word.search(text):
                    found.update(of_lines[i])
        return found

    def _ordered(self, tests: Iterable[str], file: str) -> list[str]:
        """The cheapest first, mixed: the second case of a test function counts as twice as costly, and so on.

        A test counts as cheaper the larger the share of its lines that is in this file.
        """
        share: dict[str, int] = defaultdict(int)
        for of_line in self.lines.get(file, {}).values():
            for test in of_line:
                share[test] += 1
        cost = {t: (0.003 + self.seconds[t]) * self.sizes[t] / max(share[t], 1) for t in tests}
        cases: dict[str, list[str]] = defaultdict(list)
        for test in sorted(cost, key=lambda t: (cost[t], t)):
            cases[test.split("[")[0]].append(test)
        nth = {test: i for of_one in cases.values() for i, test in enumerate(of_one, 1)}
        return sorted(cost, key=lambda t: (nth[t] * cost[t], t))

    def save(self, path: Path) -> None:
        """As JSON."""
        names = sorted(self.seconds)
        at = {test: i for i, test in enumerate(names)}
        plain = {
            "tests": [[test, round(self.seconds[test], 4)] for test in names],
            "lines": {
                file: {line: [at[t] for t in tests] for line, tests in of_lines.items()}
                for file, of_lines in self.lines.items()
            },
        }
        path.write_text(json.dumps(plain), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> TestMap:
        """What :meth:`save` wrote."""
        plain = json.loads(path.read_text(encoding="utf-8"))
        names = [test for test, _ in plain["tests"]]
        lines = {
            file: {int(line): [names[i] for i in tests] for line, tests in of_lines.items()}
            for file, of_lines in plain["lines"].items()
        }
        return cls(dict(plain["tests"]), lines, _sizes(lines))


def _made_of(names: Iterable[str], texts: Iterable[str]) -> set[str]:
    """These names of constants, and those of the constants that modules compute from them when imported."""
    made_of = [
        (_names_in(target), _names_in(node.value))
        for text in texts
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    ]
    found = set(names)
    while more := {name for made, of in made_of if of & found for name in made} - found:
        found |= more
    return found


def _names_in(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def _sizes(lines: dict[str, dict[int, list[str]]]) -> dict[str, int]:
    sizes: dict[str, int] = defaultdict(int)
    for of_lines in lines.values():
        for tests in of_lines.values():
            for test in tests:
                sizes[test] += 1
    return sizes


def environment(root: Path, plan: Path, *, site: Path | None = None) -> dict[str, str]:
    """The environment of ``make test``, with the packages of ``root`` only."""
    path = os.pathsep.join(str(folder) for folder in (site, root) if folder)
    return {
        **os.environ,
        "PYTHONPATH": path,
        "JAX_PLATFORMS": "cpu",
        "OMP_NUM_THREADS": "1",
        PLAN: str(plan),
    }


def record(
    root: Path, packages: Sequence[str], folder: Path, tests: Sequence[str], *, processes: int
) -> TestMap:
    """Run the tests of the tree ``root`` and record which lines each of them runs.

    Args:
        root: a copy of the tree.
        packages: the folders of the library.
        folder: where the recording is stored; emptied first.
        tests: the arguments for pytest; all tests if empty.
        processes: the number of parallel processes.
    """
    shutil.rmtree(folder, ignore_errors=True)
    site = folder / "site"
    site.mkdir(parents=True)
    (site / "sitecustomize.py").write_text(_SITE, encoding="utf-8")
    sources = "\n    ".join(str(root / package) for package in packages)
    config, config_of_children = folder / "coveragerc", folder / "coveragerc-children"
    config.write_text(_CONFIG.format(folder=folder, sources=sources, context=""), encoding="utf-8")
    context = f"context = ${{{TEST}-}}"
    config_of_children.write_text(
        _CONFIG.format(folder=folder, sources=sources, context=context), encoding="utf-8"
    )
    plan = {
        "mode": "record",
        "packages": list(packages),
        "root": str(root),
        "out": str(folder),
        "config": str(config),
        "config_of_children": str(config_of_children),
    }
    (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    many = ["-n", str(processes), "--dist", "loadfile"] if processes > 1 else []
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.mutants.plugin", "-p", "no:cacheprovider"]
    started = environment(root, folder / "plan.json", site=site)
    subprocess.run([*command, *many, "--tb=line", *tests], cwd=root, env=started, check=False)
    return _read(root, folder)


def _read(root: Path, folder: Path) -> TestMap:
    import coverage

    rows = [
        json.loads(line)
        for part in sorted(folder.glob("tests-*.jsonl"))
        for line in part.read_text(encoding="utf-8").splitlines()
    ]
    seconds = {row["test"]: row["seconds"] for row in rows if row["passed"]}
    if not seconds:
        raise RuntimeError(f"no test passed while {root} was recorded")
    parts = [str(part) for part in folder.glob("coverage.*")]
    whole = coverage.Coverage(config_file=str(folder / "coveragerc"))
    whole.combine(parts, keep=True)
    data = whole.get_data()
    lines: dict[str, dict[int, list[str]]] = {}
    for file in data.measured_files():
        name = Path(file.removesuffix(_OF_WATCHERS)).relative_to(root).as_posix()
        of_file = lines.setdefault(name, {})
        for line, tests in data.contexts_by_lineno(file).items():
            if known := {*of_file.get(line, ()), *tests} & seconds.keys():
                of_file[line] = sorted(known)
    return TestMap(seconds, lines, _sizes(lines))
