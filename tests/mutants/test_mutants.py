"""The mutation run itself, on a library of one module."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from pathlib import Path

import pytest

from tests.mutants.__main__ import HERE, ROOT, _digest_of_files, _earlier
from tests.mutants.mutations import mutants_of
from tests.mutants.recording import TestMap, _made_of, record
from tests.mutants.report import passes, report
from tests.mutants.running import (
    ERROR,
    KILLED,
    SURVIVED,
    TIMED_OUT,
    UNSEEN,
    Result,
    Tree,
    copy_tree,
    try_all,
    verdict,
)
from tests.mutants.sampling import (
    Judged,
    LeftOut,
    Survivor,
    all_mutants,
    packages_of,
    read_judged,
    sample,
    wing_of,
)

LIBRARY = '''
"""A library."""
from __future__ import annotations

__all__ = ["clamp", "count"]

LIMIT: int = 10


def clamp(x: float, top: float = 5.0) -> float:
    """At most ``top``."""
    if x > top:
        return top
    return x


def count(items: list[int]) -> int:
    n = 0
    while n < len(items) and n < LIMIT:
        n += 1
    return n


def unused(x: int) -> int:
    assert x == 1
    if x is None:
        raise ValueError("x must be 1 or 2" + "3")
    return x
'''
TESTS = """
import subprocess, sys
import library.module as m

def test_clamp():
    assert [m.clamp(x) for x in (1.0, 5.0, 7.0)] == [1.0, 5.0, 5.0]

def test_count():
    assert m.count([1, 2, 3]) == 3

def test_limit_in_another_process():
    code = "import library.module as m; print(m.count([0] * 12))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "10\\n"

def test_that_fails_anyway():
    assert m.count([]) == 1
"""


@pytest.fixture(scope="module", autouse=True)
def _bare():
    """The subprocesses load only the run's own plugin, which makes them start faster."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        patch.delenv("PYTEST_ADDOPTS", raising=False)
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """The library and its tests."""
    root = tmp_path_factory.mktemp("made")
    for name, text in {
        "library/__init__.py": "",
        "library/module.py": LIBRARY,
        "test_library.py": TESTS,
        "pyproject.toml": "[tool.pytest.ini_options]\nminversion = '8'\n",
        # The plugin is a module of this tree, as in a copy of the whole repository.
        "tests/__init__.py": "",
    }.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(textwrap.dedent(text).lstrip(), encoding="utf-8")
    (root / "tests" / "mutants").symlink_to(HERE)
    return root


@pytest.fixture(scope="module")
def tests(made: Path, tmp_path_factory) -> TestMap:
    """The lines that the library's tests run."""
    folder = tmp_path_factory.mktemp("recorded") / "recording"
    return record(made, ["library"], folder, ["test_library.py"], processes=1)


@pytest.fixture
def tree(made: Path, tmp_path) -> Tree:
    return Tree(made, ["library"], tmp_path / "of-tree")


def found(made: Path, after: str, function: str | None = None):
    """The one mutant with this text."""
    mutants = mutants_of(made / "library/module.py", made)
    (mutant,) = (m for m in mutants if m.after == after and function in (None, m.function))
    return mutant


def tried(tree: Tree, tests: TestMap, *mutants, seconds: float = 60.0):
    results = {}
    try_all([tree], mutants, tests, seconds=seconds, on_result=lambda m, r: results.update({m.key: r}))
    return results


# --- mutants ---


def test_which_code_is_mutated_and_which_is_not(made):
    mutants = mutants_of(made / "library/module.py", made)
    assert {(m.kind, m.after) for m in mutants if m.function == "clamp"} == {
        ("constant", "def clamp(x: float, top: float = 6.0) -> float:"),
        ("dropped branch", "if False:"),
        ("dropped branch", "if True:"),
        ("comparison", "if x >= top:"),
        ("returned value", "return None"),
    }
    assert {(m.kind, m.after) for m in mutants if m.function == "count"} == {
        ("constant", "n = 1"),
        ("dropped branch", "while False:"),
        ("comparison", "while n <= len(items) and n < LIMIT:"),
        ("comparison", "while n < len(items) and n <= LIMIT:"),
        ("boolean operator", "while n < len(items) or n < LIMIT:"),
        ("dropped statement", "pass"),
        ("arithmetic", "n -= 1"),
        ("constant", "n += 2"),
        ("returned value", "return None"),
    }
    # Neither the assertion nor the text of the error is mutated.
    assert {m.after for m in mutants if m.function == "unused"} == {
        "if False:",
        "if True:",
        "if x is not None:",
        "pass",
        "return None",
    }
    assert [(m.after, m.name) for m in mutants if not m.function] == [("LIMIT: int = 11", "LIMIT")]


def test_two_equal_changes_in_one_function_are_distinguished(made):
    mutants = [m for m in mutants_of(made / "library/module.py", made) if m.function == "clamp"]
    assert [m.nth for m in mutants if m.after == "return None"] == [1, 1]
    assert len({m.key for m in mutants}) == len(mutants)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("x = (a\n     and b)", {"or b)"}),
        ("x = (a # and\n     and b)", {"or b)"}),
        ("x = a if (b or\n     c) else d", {"x = a if ((True )) else d", "x = a if (b and"}),
        ("x = not (a)", {"x = (a)"}),
        ("x = -a", {"x = +a"}),
        ("x = é + b  # +", {"x = é - b # +"}),
        ("x = a[:-1]", {"x = a[:-2]"}),
        ("x = 1e300", {"x = 2e+300"}),
        ("x = a is not b", {"x = a is b"}),
        ("x = [a for a in b if a]", {"x = [a for a in b if True]"}),
        ("x = a & b", {"x = a | b"}),
        ("x = 'a' + b", set()),
        ("x = f'{a + 1}'", set()),
        ("x = zip(a, b, strict=True)", set()),
        ("raise E(f(\n    1,\n    2))", {"pass"}),
        ("warnings.warn(f(1), stacklevel=2)", {"pass", "warnings.warn(f(1), stacklevel=3)"}),
    ],
)
def test_the_text_of_a_change(tmp_path, before, after):
    path = tmp_path / "a.py"
    path.write_text(before + "\n", encoding="utf-8")
    mutants = mutants_of(path, tmp_path)
    assert after <= {m.after for m in mutants}
    assert bool(after) == bool(mutants)
    for mutant in mutants:
        changed = mutant.apply(path.read_bytes())
        compile(changed, "a.py", "exec")
        assert changed.count(b"\n") == path.read_bytes().count(b"\n")


@pytest.fixture(scope="module")
def of_this_library():
    return all_mutants(ROOT, packages_of(ROOT))


def test_mutants_of_this_library_are_valid_programs(of_this_library):
    """Only a sample is compiled, because compiling all takes minutes."""
    for mutant in sample(of_this_library, 60, seed=0, root=ROOT):
        source = (ROOT / mutant.file).read_bytes()
        compile(mutant.apply(source), mutant.file, "exec")


def test_a_sample_has_mutants_of_every_wing(of_this_library):
    wings = {wing_of(mutant.file) for mutant in of_this_library}
    assert {"stablenum/guard", "stablenum/diagnosis/diff", "stablenum_torch/_recovery"} <= wings
    assert {wing_of(mutant.file) for mutant in sample(of_this_library, 60, seed=0, root=ROOT)} == wings


def test_a_sample_is_equally_dense_in_each_wing_and_unaffected_by_changes_elsewhere(tmp_path):
    for name, n in (("one", 60), ("two", 30)):
        (tmp_path / name).mkdir()
        lines = "".join(f"x{i} = a < b\n" for i in range(n))
        (tmp_path / name / "a.py").write_text(lines, encoding="utf-8")
    chosen = sample(all_mutants(tmp_path, ["one", "two"]), 30, seed=3, root=tmp_path)
    assert [sum(m.file.startswith(p) for m in chosen) for p in ("one", "two")] == [20, 10]
    other = sample(all_mutants(tmp_path, ["one", "two"]), 30, seed=4, root=tmp_path)
    assert {m.key for m in other} != {m.key for m in chosen}
    # One more line at the top, in a file of another name.
    path = tmp_path / "one" / "a.py"
    (tmp_path / "one" / "b.py").write_text("import z\n" + path.read_text(encoding="utf-8"), encoding="utf-8")
    path.unlink()
    again = sample(all_mutants(tmp_path, ["one", "two"]), 30, seed=3, root=tmp_path)
    assert {(m.before, m.after) for m in again} == {(m.before, m.after) for m in chosen}


# --- running ---


def test_lines_are_recorded_under_the_test_that_ran_them(made, tests):
    limit, text = "test_library.py::test_limit_in_another_process", (made / "library/module.py").read_text()
    lines = tests.lines["library/module.py"]
    at = {line.strip(): i for i, line in enumerate(text.splitlines(), 1)}
    assert lines[at["if x > top:"]] == ["test_library.py::test_clamp"]
    # Also in a separate process. A test that failed is not recorded.
    assert lines[at["n += 1"]] == ["test_library.py::test_count", limit]
    assert "test_library.py::test_that_fails_anyway" not in tests.seconds
    assert at['raise ValueError("x must be 1 or 2" + "3")'] not in lines


def test_a_planted_mutant_is_killed_by_its_test_and_survives_without_it(made, tests, tree):
    killed, lives = found(made, "n += 2"), found(made, "if x >= top:")
    # A constant is tested by the tests that run a line with its name.
    constant = found(made, "LIMIT: int = 11")
    no_module = dataclasses.replace(constant, new="1 / 0", after="LIMIT: int = 1 / 0")
    before = (made / "library/module.py").read_bytes()
    results = tried(tree, tests, killed, lives, constant, no_module)
    assert (made / "library/module.py").read_bytes() == before
    what = {key[3]: (result.status, result.by) for key, result in results.items()}
    assert what == {
        "n += 2": (KILLED, "test_library.py::test_count"),
        "if x >= top:": (SURVIVED, ""),  # if x is top, both branches give the same result
        "LIMIT: int = 11": (KILLED, "test_library.py::test_limit_in_another_process"),
        "LIMIT: int = 1 / 0": (KILLED, "test_library.py"),
    }
    assert results[lives.key].ran == results[lives.key].concerned == 3
    without = {t: s for t, s in tests.seconds.items() if t == "test_library.py::test_clamp"}
    lines = {
        file: {n: [t for t in of if t in without] for n, of in ls.items()} for file, ls in tests.lines.items()
    }
    fewer = tried(tree, TestMap(without, lines, tests.sizes), killed)[killed.key]
    assert (fewer.status, fewer.ran) == (SURVIVED, 1)
    assert tried(tree, TestMap({}, {}, {}), killed)[killed.key].status == UNSEEN


def test_cases_of_one_test_alternate_with_others_unless_these_cost_more():
    seconds = {
        "a.py::one[1]": 0.0,
        "a.py::one[2]": 0.0,
        "a.py::one[3]": 0.0,
        "a.py::two": 0.003,
        "a.py::all": 1.0,
    }
    tests = TestMap(seconds, {"m.py": {1: list(seconds)}}, dict.fromkeys(seconds, 1))
    names = ["a.py::one[1]", "a.py::one[2]", "a.py::two", "a.py::one[3]", "a.py::all"]
    assert tests._ordered(seconds, "m.py") == names


def test_a_constant_concerns_the_tests_whose_file_names_it(tmp_path):
    for file, text in {
        "library/module.py": "LIMIT = 10\nTABLE = [LIMIT]\n",
        "test_direct.py": "from library.module import LIMIT\n",
        "test_table.py": "import library.module as m\nm.TABLE\n",
        "test_other.py": "import library.module as m\nLIMITED = m\n",
    }.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text, encoding="utf-8")
    names = [f"test_{name}.py::test" for name in ("direct", "other", "table")]
    made_of = TestMap(dict.fromkeys(names, 0.1), {"library/module.py": {}}, dict.fromkeys(names, 1))
    (mutant,) = mutants_of(tmp_path / "library/module.py", tmp_path)
    assert made_of.concerned(mutant, tmp_path) == ["test_direct.py::test", "test_table.py::test"]


@pytest.mark.parametrize(
    ("told", "status"),
    [
        ({"failed": {"t": "AssertionError"}}, KILLED),
        ({"failed": {"t": "Failed: Timeout (>30.0s) from pytest-timeout."}}, TIMED_OUT),
        ({"late": True}, TIMED_OUT),
        ({"broken": "test_library.py"}, KILLED),
        ({"silent": True, "code": -11}, KILLED),
        ({"silent": True, "code": 4, "last": "ImportError while loading conftest"}, KILLED),
        ({"silent": True, "code": 3}, ERROR),
        ({"ran": 0}, ERROR),
        ({}, SURVIVED),
    ],
)
def test_the_verdict(told, status):
    plain = {"ran": 1, "failed": {}, "broken": "", "late": False, "code": 0, "last": ""}
    assert verdict({**plain, **told})[0] == status


def test_a_test_that_fails_without_the_mutant_kills_nothing(made, tests, tree):
    always = "test_library.py::test_that_fails_anyway"
    seconds = {**tests.seconds, always: 0.0}
    lines = {file: {n: [always, *of] for n, of in lines.items()} for file, lines in tests.lines.items()}
    mutant = found(made, "if x >= top:")
    results = tried(tree, TestMap(seconds, lines, {**tests.sizes, always: 1}), mutant)
    assert results[mutant.key].status == SURVIVED


def test_known_mutants_are_not_tried_again_but_their_tests_are(made, tests, tree):
    killed = found(made, "n += 2")
    always = "test_library.py::test_that_fails_anyway"
    right = Result(killed.key, KILLED, "test_library.py::test_count")
    wrong = dataclasses.replace(right, by=always)
    tried_now = []
    with_it = dataclasses.replace(tests, seconds={**tests.seconds, always: 0.0})
    for known in (right, wrong):
        try_all(
            [tree],
            [killed],
            with_it,
            seconds=60.0,
            on_result=lambda m, r: tried_now.append(r.by),
            known={killed.key: known},
        )
    assert tried_now == ["test_library.py::test_count"]


def test_the_time_spent_on_a_mutant_is_bounded(made, tests, tree):
    mutant = found(made, "if x >= top:")
    assert tried(tree, tests, mutant, seconds=0.0)[mutant.key].ran == 1


def test_results_and_records_survive_an_interruption(tests, tmp_path):
    tests.save(tmp_path / "map.json")
    assert TestMap.load(tmp_path / "map.json").lines == tests.lines
    result = Result(("a.py", "f", "x", "y", 1), KILLED, "t", "e", 3, 4, 5.0)
    assert Result.from_json(result.to_json()) == result
    assert json.loads(result.to_json())["status"] == "killed"


def test_a_mutant_stays_killed_while_its_file_and_the_tests_file_are_unchanged(tmp_path):
    def result(after, status, by, of_files, of_tree="old"):
        key = ("stablenum/errors.py", "f", "x", after, 1)
        return Result(key, status, by, of_tree=of_tree, of_files=of_files)

    test = "tests/conftest.py::test"
    now = _digest_of_files(result("", KILLED, test, ""))
    assert now != _digest_of_files(result("", KILLED, "tests/backends.py::test", ""))
    rows = [
        result("killed", KILLED, test, now),
        result("killed by a test of a file that changed", KILLED, test, "other"),
        result("alive", SURVIVED, "", now),
        result("alive in this tree", SURVIVED, "", "other", of_tree="new"),
        result("alive again", KILLED, test, now),
        result("alive again", SURVIVED, "", "other"),
    ]
    path = tmp_path / "results.jsonl"
    path.write_text("".join(f"{row.to_json()}\n" for row in rows) + '{"key": [', encoding="utf-8")
    assert {key[3] for key in _earlier(path, "new")} == {"killed", "alive in this tree"}


def test_a_copy_holds_the_files_that_git_would_add(tmp_path):
    copy_tree(ROOT, tmp_path / "copy")
    assert (tmp_path / "copy" / "pyproject.toml").exists()
    assert not (tmp_path / "copy" / ".git").exists()


# --- reasons ---


def survivor(mutant, **changes) -> Survivor:
    file, function, before, after, nth = mutant.key
    settings = {"file": file, "function": function, "before": before, "after": after, "nth": nth}
    return Survivor(**{**settings, "why": "equivalent", "reason": "both are top", **changes})


def test_a_survivor_with_a_reason_is_accepted_and_one_without_is_not(made):
    lives, dies = found(made, "if x >= top:"), found(made, "n -= 1")
    results = {lives.key: Result(lives.key, SURVIVED), dies.key: Result(dies.key, KILLED, "t")}
    bare, known = Judged(), Judged(survivors=(survivor(lives),))
    assert not passes([lives, dies], results, bare, [], least=0.95)
    assert "Survivors without a reason:" in report([lives, dies], results, bare, [], least=0.95)
    assert passes([lives, dies], results, known, [], least=0.95)
    text = report([lives, dies], results, known, [], least=0.95)
    assert "both are top" in text
    assert "library/module.py:11 in clamp" in text
    assert "100.0 %" in text


def test_a_reason_for_a_mutant_that_no_longer_exists_is_reported(made):
    mutants = mutants_of(made / "library/module.py", made)
    lives = found(made, "if x >= top:")
    gone = survivor(lives, before="if y > top:")
    nothing = LeftOut("library", "no_such_*", "there is none")
    judged = Judged((nothing, LeftOut("library", "unused", "nobody calls it")), (survivor(lives), gone))
    stale = judged.stale(mutants)
    assert len(stale) == 2
    assert "if y > top: -> if x >= top:" in stale[0]
    assert "no_such_*" in stale[1]
    results = {lives.key: Result(lives.key, SURVIVED)}
    assert not passes([lives], results, judged, stale, least=0.95)
    assert "stale" in report([lives], results, judged, stale, least=0.95)


def test_a_reason_for_a_mutant_that_is_killed_is_reported(made):
    dies = found(made, "n -= 1")
    judged, results = Judged(survivors=(survivor(dies),)), {dies.key: Result(dies.key, KILLED, "t")}
    assert not passes([dies], results, judged, [], least=0.95)
    assert "needless" in report([dies], results, judged, [], least=0.95)


def test_an_entry_needs_its_reason(tmp_path):
    empty, bad = tmp_path / "empty.toml", tmp_path / "bad.toml"
    empty.write_text("", encoding="utf-8")
    bad.write_text('[[entry]]\npackage = "a"\nfunction = "f"\nreason = " "\n', encoding="utf-8")
    with pytest.raises(ValueError, match="without a reason"):
        read_judged(bad, empty)
    bad.write_text('[[entry]]\nwhy = "hard"\nreason = "it is"\n', encoding="utf-8")
    with pytest.raises(ValueError, match="why must be one of equivalent, not on a CPU"):
        read_judged(empty, bad)


def test_the_lists_of_this_library_match_its_code(of_this_library):
    judged = read_judged(HERE / "left_out.toml", HERE / "survivors.toml")
    assert judged.stale(of_this_library) == []


def test_a_constant_is_followed_into_those_that_are_made_of_it() -> None:
    modules = ["A = 1\nB: int = A + 1\n", "C = [B]\nD = 2\ndef f():\n    E = A\n"]
    assert _made_of(["A"], modules) == {"A", "B", "C"}
