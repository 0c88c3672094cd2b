"""The selections omit no pair of values, never change, and leave nothing out of every run."""

from __future__ import annotations

import itertools
import tomllib
from pathlib import Path

import pytest

from tests import parts
from tests.changed import changed_lines, reached
from tests.choosing import left_out, names_left_out
from tests.mutants.recording import TestMap
from tests.selection import covering, one_in_three, only, pairwise, slow_but_for, slow_unless, thinned

ROOT = Path(__file__).parents[1]
FACTORS = [
    ("ab", "xyz"),
    ("abcdef", "xy", "12345"),
    ("abcdefgh", "pqrst", "xy"),
    ("abcd", "pqr", "xyz", "12", "?!"),
]


@pytest.mark.parametrize("factors", FACTORS, ids=str)
def test_any_two_values_occur_together_in_a_row(factors):
    chosen = pairwise(*factors)
    for i, j in itertools.combinations(range(len(factors)), 2):
        assert {(row[i], row[j]) for row in chosen} == set(itertools.product(factors[i], factors[j]))


@pytest.mark.parametrize("factors", FACTORS[1:], ids=str)
def test_pairs_take_far_fewer_rows_than_the_product(factors):
    sizes = sorted(map(len, factors))
    least = sizes[-1] * sizes[-2]
    product = list(itertools.product(*factors))
    chosen = pairwise(*factors)
    assert least <= len(chosen) <= 1.5 * least < len(product)
    assert len(set(chosen)) == len(chosen)
    assert chosen == sorted(chosen, key=product.index)


def test_one_factor_or_two_give_their_full_product():
    assert pairwise() == [()]
    assert pairwise("abc") == [("a",), ("b",), ("c",)]
    assert pairwise("ab", "xyz") == list(itertools.product("ab", "xyz"))


def test_a_selection_never_changes():
    assert pairwise("abc", "xy", "12") == [
        ("a", "x", "1"),
        ("a", "y", "2"),
        ("b", "x", "2"),
        ("b", "y", "1"),
        ("c", "x", "1"),
        ("c", "y", "2"),
    ]
    names = [f"case {i}" for i in range(3000)]
    assert [i for i in range(9) if one_in_three(names[i])] == [4, 5, 8]
    assert 900 < sum(map(one_in_three, names)) < 1100


def test_cases_that_are_left_out_are_marked_slow():
    def slow(param):
        return [mark.name for mark in param.marks] == ["slow"]

    rows = [(1, "a"), (1, "b"), (2, "a")]
    by_rule, by_list = slow_unless(lambda n, _: n == 1, rows), slow_but_for([(2, "a")], rows)
    assert [param.values for param in by_rule] == [param.values for param in by_list] == rows
    assert [slow(param) for param in by_rule] == [False, False, True]
    assert [slow(param) for param in by_list] == [True, True, False]
    names = [f"case {i}" for i in range(9)]
    one_column = only(["case 2"], names), thinned(names)
    assert all([param.values for param in column] == [(name,) for name in names] for column in one_column)
    assert [[i for i in range(9) if not slow(column[i])] for column in one_column] == [[2], [4, 5, 8]]


def test_every_value_occurs_in_a_chosen_case():
    cases = {f"{a}{b}": {("a", a), ("b", b)} for a in range(8) for b in range(3)}
    chosen = covering(cases)
    assert {value for case in chosen for value in cases[case]} == {
        v for values in cases.values() for v in values
    }
    assert 8 <= len(chosen) <= 10
    assert covering(dict(reversed(cases.items()))) == chosen


def test_every_folder_of_tests_belongs_to_a_part():
    """So no slow test is in none of them."""
    paths = {path for part in parts.PARTS.values() for path in part if path.startswith("tests/")}
    folders = {file.parent.relative_to(ROOT).as_posix() for file in ROOT.glob("tests/*/**/test_*.py")}
    assert len(folders) > 10
    for folder in folders:
        assert any(
            f"{folder}/".startswith(f"{path}/") or path.startswith(f"{folder}/test_") for path in paths
        )


def test_what_the_fast_run_collects_is_there():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert all(any(ROOT.glob(path)) for path in settings["tool"]["pytest"]["ini_options"]["testpaths"])


def test_a_row_of_the_table_of_parts_is_read_as_it_was_written():
    rows = {"core": ["2026-11-28", "0123abcd", "12", "900", "0", "3"]}
    text = parts.written(rows)
    assert {name: row for name, row in parts.rows_of(text).items() if row[0] != "never"} == rows
    assert [*parts.rows_of(text)] == [*parts.PARTS]


DIFF = """\
diff --git a/stablenum/a.py b/stablenum/a.py
--- a/stablenum/a.py
+++ b/stablenum/a.py
@@ -3,2 +3 @@ def f():
@@ -10,0 +10,4 @@ def g():
diff --git a/stablenum/b.py b/stablenum/b.py
--- a/stablenum/b.py
+++ b/stablenum/b.py
@@ -1 +1 @@
"""


def test_the_tests_that_a_change_reaches_are_those_of_its_lines_or_of_its_file():
    changes = changed_lines(DIFF)
    assert changes == {"stablenum/a.py": {3, 4, 10, 11}, "stablenum/b.py": {1}}
    lines = {
        "stablenum/a.py": {4: ["t::of f"], 11: ["t::of g"], 20: ["t::of h"]},
        "stablenum/b.py": {7: ["t::of a function"]},
    }
    tests = TestMap({}, lines, {})
    assert reached(changes, tests) == {"t::of f", "t::of g", "t::of a function"}
    assert reached({"stablenum/a.py": {20}, "docs/conf.py": {1}}, tests) == {"t::of h"}


def test_what_is_left_out_is_run_by_tests_that_stay():
    """Cheap tests stay, then what runs other lines, then one case of a function while there is time.

    ``t::c`` runs a line of its own, which is not worth nine seconds.
    """
    seconds = {"t::cheap": 0.1, "t::a[1]": 1.0, "t::a[2]": 0.5, "t::b[1]": 3.0, "t::b[2]": 4.0, "t::c": 9.0}
    lines = {
        "a.py": {
            1: [*seconds],
            2: ["t::a[2]"],
            3: ["t::a[2]", "t::b[2]"],
            4: ["t::cheap", "t::b[1]"],
            5: ["t::c"],
        },
    }
    tests = TestMap(seconds, lines, {})
    assert left_out(tests, 2.0) == ["t::a[1]", "t::b[1]", "t::b[2]", "t::c"]
    assert left_out(tests, 5.0) == ["t::a[1]", "t::b[2]", "t::c"]
    assert left_out(tests, 99.0, ["t::not recorded"]) == ["t::a[1]", "t::b[2]", "t::not recorded"]


def test_what_is_left_out_is_run_by_a_part():
    """Examples in docstrings too. The part "root" has the files at the top of the tests alone."""
    paths = [path for name, part in parts.PARTS.items() if name != "root" for path in part]
    files = {name.split("::")[0] for name in names_left_out()}
    assert len(files) > 10
    others = {file for file in files if not file.startswith(tuple(f"{path}/" for path in paths))}
    assert others == {file for file in files if Path(file).parent == Path("tests")}
