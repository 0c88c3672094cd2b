"""The test of the wheel names what it leaves out, because the repository's pages are not beside the wheel."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REPOSITORY = {".ci", ".github", "CHANGELOG.md", "Makefile", "README.md", "benchmarks", "docs", "examples"}


def left_out() -> tuple[str, ...]:
    spec = importlib.util.spec_from_file_location("wheel_test", ROOT / ".ci" / "wheel_test.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.LEFT_OUT


def names_read(part: ast.AST) -> list[object]:
    """What a node joins a path with, or imports."""
    if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Div):
        return [part.right.value] if isinstance(part.right, ast.Constant) else []
    if isinstance(part, ast.ImportFrom):
        return [part.module]
    return [name.name for name in part.names] if isinstance(part, ast.Import) else []


def reads_the_repository(node: ast.AST) -> bool:
    """Whether a statement joins a path with one of the names, or imports from one of the folders."""
    read = [name for part in ast.walk(node) for name in names_read(part) if isinstance(name, str)]
    return any(name in REPOSITORY or re.split(r"[./]", name)[0] in REPOSITORY for name in read)


def readers(source: str) -> list[str]:
    """The functions that read the repository when they run; "" for the module, when it is imported."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        node.name if isinstance(node, functions) else ""
        for node in ast.parse(source).body
        if reads_the_repository(node)
    ]


FILES = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if readers(path.read_text("utf-8"))]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_what_reads_pages_examples_or_benchmarks_is_left_out(path: Path) -> None:
    names, file = left_out(), path.relative_to(ROOT).as_posix()
    whole = {file, *(parent.as_posix() for parent in Path(file).parents)}
    if whole & set(names):
        return
    some = {name.partition("::")[2] for name in names if name.startswith(f"{file}::")}
    found = readers(path.read_text("utf-8"))
    assert some, f"{file} reads the repository ({found}), and .ci/wheel_test.py does not leave it out"
    assert all(not name.startswith("test_") or name in some for name in found)


def test_a_test_that_reads_a_page_is_found() -> None:
    assert readers('PAGE = ROOT / "docs" / "x.md"') == [""]
    assert readers('def test_a():\n    return (ROOT / "examples").exists()') == ["test_a"]
    assert readers("from benchmarks.steps import run") == [""]
    assert readers('def test_a():\n    return ROOT / "tests"') == []


def test_every_name_that_is_left_out_exists() -> None:
    for name in left_out():
        file, _, function = name.partition("::")
        assert (ROOT / file).exists(), name
        assert f"def {function}(" in (ROOT / file).read_text("utf-8") if function else True, name
