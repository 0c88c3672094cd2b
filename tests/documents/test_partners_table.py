"""The table on trainers under one bad batch is whole, and says what its page says."""

from __future__ import annotations

from tests.partners.test_conformance import RUNS, measured


def test_the_table_has_every_partner_variant_and_fault() -> None:
    found = measured()
    assert [(n, v, f) for n, variants in found.items() for v, row in variants.items() for f in row] == RUNS


def test_with_a_guard_no_partner_is_left_with_anything_of_the_bad_batch() -> None:
    left = [
        (name, fault, column)
        for name, variants in measured().items()
        for fault, row in variants["guarded"].items()
        for column, mark in row.items()
        if mark is False
    ]
    assert left == []


def test_each_partner_alone_is_left_with_something() -> None:
    for name, variants in measured().items():
        assert any(mark is False for row in variants["alone"].values() for mark in row.values()), name
