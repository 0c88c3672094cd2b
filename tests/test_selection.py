"""The selections omit no pair of values, never change, and mark the rest as slow."""

from __future__ import annotations

import itertools

import pytest

from tests.selection import covering, one_in_three, only, pairwise, slow_but_for, slow_unless, thinned

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
