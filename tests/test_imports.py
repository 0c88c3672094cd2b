"""Who may import whom: by contract (static) and by importing with the others blocked (live)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TORCH, JAX = ("torch",), ("jax", "jaxlib", "optax", "flax")
EVERY_LIBRARY = ("numpy", "array_api_compat", "scipy", *TORCH, *JAX)

# Runs before the statement under test: a blocked package acts as if it were not installed.
BLOCK = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"{{name}} is blocked", name=name)

sys.meta_path.insert(0, Block())
"""


def run(statement: str, blocked: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """``statement`` in a fresh interpreter without the ``blocked`` packages."""
    program = f"{BLOCK.format(blocked=blocked)}\nsys.path.insert(0, {str(ROOT)!r})\n{statement}\n"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("statement", "blocked"),
    [
        (
            (
                "import stablenum, stablenum.readout, stablenum.statedict, stablenum.formats\n"
                "stablenum.GuardConfig(clip=1.0, loss_scale='dynamic').to_json()"
            ),
            EVERY_LIBRARY,
        ),
        ("import stablenum.reference, stablenum.compare, stablenum.cli", (*TORCH, *JAX)),
        ("import stablenum_torch", (*JAX, "stablenum_jax")),
        ("import stablenum_jax", (*TORCH, "stablenum_torch")),
    ],
)
def test_a_package_imports_without_the_others(statement, blocked):
    result = run(statement, blocked)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("names", "forbidden"),
    [("stablenum", EVERY_LIBRARY), ("stablenum.compare, stablenum.cli", (*TORCH, *JAX))],
)
def test_importing_loads_no_framework(names, forbidden):
    loaded = run(f"import {names}\nprint(*sys.modules)", ())
    assert loaded.returncode == 0, loaded.stderr
    assert not set(forbidden) & set(loaded.stdout.split())


@pytest.mark.parametrize(
    ("statement", "blocked"),
    [
        ("import numpy", ("numpy",)),
        ("import stablenum_torch", TORCH),
        ("import stablenum_jax", ("jax",)),
        ("import stablenum_jax", ("stablenum",)),
    ],
)
def test_these_tests_can_fail(statement, blocked):
    result = run(statement, blocked)
    assert result.returncode != 0
    assert "is blocked" in result.stderr


def lint_imports(directory: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-c",
        "from importlinter.cli import lint_imports_command as c; c()",
        "--no-cache",
    ]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=120)


def test_the_import_contracts_hold():
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken" in result.stdout


# A module, what is added to it, and how the report names the import that is not allowed.
BREACHES = [
    ("stablenum/norms.py", "import numpy", "stablenum.norms -> numpy"),
    ("stablenum/config.py", "import stablenum.guard", "stablenum.config -> stablenum.guard"),
    ("stablenum/guard.py", "def f():\n    import stablenum_torch", "stablenum.guard -> stablenum_torch"),
    ("stablenum_torch/__init__.py", "import stablenum_jax", "stablenum_torch -> stablenum_jax"),
    ("stablenum_torch/__init__.py", "import optax", "stablenum_torch -> optax"),
    ("stablenum_jax/__init__.py", "def f():\n    import torch", "stablenum_jax -> torch"),
]


def test_the_import_contracts_can_break(tmp_path):
    """All breaches at once: the graph of imports is built once, and the report names each."""
    for package in ("stablenum", "stablenum_torch", "stablenum_jax"):
        for source in (ROOT / package).rglob("*.py"):
            copy = tmp_path / source.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(source.read_text())
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    for module, line, _ in BREACHES:
        with (tmp_path / module).open("a") as file:
            file.write(f"\n{line}\n")
    result = lint_imports(tmp_path)
    assert result.returncode != 0
    for _, _, offence in BREACHES:
        assert re.search(rf"^-? *{re.escape(offence)} \(l\.\d+\)", result.stdout, re.M), (
            offence,
            result.stdout,
        )
