"""The numbers by which diff and the checkup decide: a comment says what each bounds and why."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = [
    f"{package}/{part}"
    for package in ("stablenum/diagnosis", "stablenum_torch/_diagnosis", "stablenum_jax/_diagnosis")
    for part in ("diff", "checkup")
]


def numbers_of(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """The numbers that a module names, and tuples and other collections of numbers, with their statements."""
    for statement in tree.body:
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            if _has_number(statement.value):
                yield ast.unparse(targets[0]), statement


def _has_number(value: ast.expr) -> bool:
    """Whether an expression is made of numbers, and not by a function that is given some."""
    if isinstance(value, ast.Constant):
        return type(value.value) in (int, float)
    if (isinstance(value, ast.Call) and ast.unparse(value.func) != "range") or isinstance(value, ast.Lambda):
        return False
    return any(_has_number(part) for part in ast.iter_child_nodes(value) if isinstance(part, ast.expr))


def without_comment(source: str) -> list[str]:
    """The names of a module's numbers that have no comment on their lines or right above them."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token.start[1] for token in tokens if token.type == tokenize.COMMENT}
    return [
        name
        for name, statement in numbers_of(ast.parse(source))
        if comments.get(statement.lineno - 1) != 0
        and comments.keys().isdisjoint(range(statement.lineno, (statement.end_lineno or 0) + 1))
    ]


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_number_has_a_comment(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files, "the folder has moved"
    found = [(file.relative_to(ROOT), without_comment(file.read_text(encoding="utf-8"))) for file in files]
    assert [f"{file}: {', '.join(names)}" for file, names in found if names] == []


COMMENTED = (
    "# Bounds the time of a search; chosen, not measured.\n_MOST = 4\n",
    "_MOST = 4  # pairs, each of which is an evaluation\n",
    "# The first of them.\n# It has two lines.\n_RATES: tuple[float, ...] = (0.9, 0.999)\n",
    "_RATES = (\n    0.9,  # of momentum\n    0.999,\n)\n",
    '_TEXT = "4 of 5"\n_DONE = True\n_EMPTY = Fingerprint(0)\n_RULES = {"half": lambda x: 0.5 * x}\n',
    "def f() -> int:\n    most = 4\n    return most\n",
)
BARE = (
    "_MOST = 4\n",
    "# Of another line.\n\n_MOST = 4\n",
    "# The trials.\n_TRIALS = 6\n_MOST = 4\n",
    "_OTHER = f()  # of the line above\n_MOST = 4\n",
    "_MOST: float = -1e-6\n",
    "_MOST = 2**22\n",
    "_MOST = range(257)\n",
    "_MOST = (4, 3, 2)\n",
    '_MOST = {"tanh": (-1.0, 1.0)}\n',
)


@pytest.mark.parametrize("source", COMMENTED)
def test_a_comment_beside_or_above_is_found(source: str) -> None:
    assert without_comment(source) == []


@pytest.mark.parametrize("source", BARE)
def test_a_number_without_one_is_found(source: str) -> None:
    assert without_comment(source) == ["_MOST"]
