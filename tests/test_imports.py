"""Which package may import which: by contract (static) and by importing with the others blocked (live)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forking import FRESH

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
    return subprocess.run([FRESH, "-c", program], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("statement", "blocked"),
    [
        (
            (
                "import stablenum, stablenum.guard.readout, stablenum.guard.statedict, stablenum.formats\n"
                "stablenum.GuardConfig(clip=1.0, loss_scale='dynamic').to_json()"
            ),
            EVERY_LIBRARY,
        ),
        ("import stablenum.reference.guarded, stablenum.commands.compare.session", (*TORCH, *JAX)),
        ("import stablenum_torch", (*JAX, "stablenum_jax")),
        ("import stablenum_jax", (*TORCH, "stablenum_torch")),
    ],
)
def test_a_package_imports_without_the_others(statement, blocked):
    result = run(statement, blocked)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("names", "forbidden"),
    [
        ("stablenum, stablenum.cli", (*EVERY_LIBRARY, "rich", "typer")),
        ("stablenum.commands.compare.session", (*TORCH, *JAX)),
    ],
)
def test_importing_loads_no_framework(names, forbidden):
    loaded = run(f"import {names}\nprint(*sys.modules)", ())
    assert loaded.returncode == 0, loaded.stderr
    assert not set(forbidden) & set(loaded.stdout.split())


# An import hook acts in every import of a user's process. Those of the framework are there before.
HOOKS = """
import {framework}
before = [*sys.meta_path, *sys.path_hooks]
{statement}
after = [*sys.meta_path, *sys.path_hooks]
print("unchanged" if after == before else after)
"""


def import_hooks(framework: str, statement: str) -> str:
    result = run(HOOKS.format(framework=framework, statement=statement), ())
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.parametrize(
    ("framework", "package"),
    [("sys", "stablenum"), ("torch", "stablenum_torch"), ("jax, optax", "stablenum_jax")],
)
def test_importing_leaves_the_import_hooks_unchanged(framework, package):
    assert import_hooks(framework, f"import {package}") == "unchanged"


def test_an_added_import_hook_is_found():
    assert "Block" in import_hooks("sys", "sys.meta_path.append(Block())")


def loaded_beside(framework: str, adapter: str) -> set[str]:
    """The modules that are loaded by importing ``adapter`` after ``framework``."""
    result = run(
        f"import {framework}\nknown = set(sys.modules)\nimport {adapter}\nprint(*set(sys.modules) - known)",
        (),
    )
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


@pytest.mark.parametrize(
    ("framework", "adapter"), [("torch", "stablenum_torch"), ("jax, optax", "stablenum_jax")]
)
def test_importing_an_adapter_loads_little_beside_its_framework(framework, adapter):
    loaded = loaded_beside(framework, adapter)
    ours = {name for name in loaded if name.split(".")[0] in ("stablenum", adapter)}
    small = {name for name in loaded if name.split(".")[0] in ("array_api_compat", *sys.stdlib_module_names)}
    assert sorted(loaded - ours - small) == []
    assert len(loaded) < 160
    assert not any("diagnosis" in name for name in ours), "diagnosis is imported when it is used"


def test_the_compiler_counts_as_much():
    assert any(name.startswith("sympy") for name in loaded_beside("torch", "torch._dynamo"))


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
        FRESH,
        "-c",
        "from importlinter.cli import lint_imports_command as c; c()",
        "--no-cache",
    ]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=120)


def test_the_import_contracts_hold():
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken" in result.stdout


FOR_TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import "

# A module, and the line that is added to it.
BREACHES = [
    ("stablenum/arrays.py", "import numpy"),
    ("stablenum/guard/config.py", "import stablenum.guard.decide"),
    ("stablenum/guard/decide.py", "def f():\n    import stablenum_torch"),
    ("stablenum_torch/__init__.py", "import stablenum_jax"),
    ("stablenum_torch/__init__.py", "import optax"),
    ("stablenum_jax/__init__.py", "def f():\n    import torch"),
    ("stablenum_torch/_devices/ranks.py", "import stablenum_torch._step.measure.norms"),
    ("stablenum_torch/_step/optimizer.py", "import stablenum_torch._precision.model"),
    ("stablenum_torch/_step/optimizer.py", "def f():\n    import stablenum_torch._diagnosis.explain"),
    ("stablenum_torch/_precision/casts.py", "import stablenum_torch._diagnosis.audit"),
    ("stablenum_torch/_step/on_host.py", "import stablenum_torch._step.on_device"),
    ("stablenum_torch/_diagnosis/replay/flags.py", "import stablenum_torch._diagnosis.replay.recorder"),
    ("stablenum_jax/_step/training.py", "def f():\n    import stablenum_jax._precision.policy"),
    ("stablenum_jax/_step/readout.py", "import stablenum_jax._diagnosis.audit"),
    ("stablenum_jax/_trees/names.py", "from stablenum_jax._step.measure.over_axes import AxisName"),
    ("stablenum_jax/_precision/module_formats.py", "import stablenum_jax._diagnosis.ranges"),
    ("stablenum_jax/_step/measure/norms.py", "import stablenum_jax._step.observe"),
    ("stablenum_jax/_diagnosis/replay/cells.py", "import stablenum_jax._diagnosis.replay.interpreter"),
    ("stablenum_jax/_diagnosis/watch/judge.py", "import stablenum_jax._diagnosis.watch.watcher"),
    ("stablenum/diagnosis/replay/judge.py", "import stablenum.diagnosis.report.sections"),
    ("stablenum/diagnosis/replay/trace.py", "import stablenum.diagnosis.replay.walk"),
    ("stablenum/diagnosis/audit/rows.py", "def f():\n    import stablenum.diagnosis.audit.report"),
    ("stablenum/diagnosis/report/sections.py", f"{FOR_TYPES}stablenum.diagnosis.report.report"),
    ("stablenum/diagnosis/ranges/plot.py", f"{FOR_TYPES}stablenum.diagnosis.ranges.report"),
    ("stablenum/commands/compare/command.py", "import stablenum.commands.explain.command"),
    ("stablenum/commands/compare/runner.py", "import stablenum.commands.compare.report"),
    (
        "stablenum/commands/compare/backends/interface.py",
        "import stablenum.commands.compare.builtin.streams",
    ),
    (
        "stablenum/commands/compare/backends/numpy_run.py",
        "import stablenum.commands.compare.backends.torch_run",
    ),
    (
        "stablenum/commands/compare/scenarios/shared.py",
        "import stablenum.commands.compare.scenarios.stream",
    ),
    ("stablenum/diagnosis/watch/plan.py", "import stablenum.diagnosis.watch.session"),
    ("stablenum/diagnosis/diff/sides/kinds.py", "import stablenum.diagnosis.diff.causes.scene"),
    ("stablenum_torch/_diagnosis/watch/rates.py", "import stablenum.commands.outputs"),
]


def offence(module: str, line: str) -> str:
    """How the report names the import that ``line`` adds to ``module``."""
    importer = module.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    imported = re.search(r"(?:import|from) (\S+)(?: import \w+)?$", line)
    assert imported
    return f"{importer} -> {imported[1]}"


def test_the_import_contracts_can_break(tmp_path):
    """All breaches at once: the import graph is built once, and the report names each breach."""
    for package in ("stablenum", "stablenum_torch", "stablenum_jax"):
        for source in (ROOT / package).rglob("*.py"):
            copy = tmp_path / source.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(source.read_text())
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    for module, line in BREACHES:
        with (tmp_path / module).open("a") as file:
            file.write(f"\n{line}\n")
    (tmp_path / "stablenum/diagnosis/audit/unplaced.py").touch()
    # A circle within a folder that no layers order.
    for one, other in (("pieces", "settling"), ("settling", "pieces")):
        with (tmp_path / f"stablenum/diagnosis/diff/weights/{one}.py").open("a") as file:
            file.write(f"\nimport stablenum.diagnosis.diff.weights.{other}\n")
    result = lint_imports(tmp_path)
    assert result.returncode != 0
    report = re.sub(r"\s+", " ", result.stdout)
    unnamed = [breach for breach in BREACHES if f"{offence(*breach)} (l." not in report]
    assert unnamed == []
    assert "No cycles are allowed in stablenum.diagnosis.diff.weights" in report
    assert "stablenum.diagnosis.audit.unplaced" in report  # a module that belongs to no layer
