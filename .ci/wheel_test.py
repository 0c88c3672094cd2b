"""Builds the sdist, and from it the wheel; checks what is inside; runs the tests against the installed wheel.

    python .ci/wheel_test.py [pytest arguments]

The wheel goes into a virtual environment of its own, which borrows its dependencies from the interpreter that
runs this script. The tests are copied too, so that nothing can be imported from the source tree.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("stablenum", "stablenum_jax", "stablenum_torch")
SUFFIXES = {".py", ".css", ".js"}
# What the sdist must hold besides: to build, to test, and to cite.
NEEDED = {
    "CHANGELOG.md", "CITATION.cff", "LICENSE", "LICENSES/MIT-uPlot.txt", "Makefile", "README.md",
    "conda/recipe.yaml", "conftest.py", "constraints.txt", "corpus/labels.json",
    "docs/index.md", "pyproject.toml", "tests/conftest.py",
}  # fmt: skip
DIST_INFO = {
    "METADATA",
    "RECORD",
    "WHEEL",
    "entry_points.txt",
    "licenses/LICENSE",
    "licenses/LICENSES/MIT-uPlot.txt",
}

# pytest's settings, and what the topmost conftest.py imports.
SETTINGS = (
    "pyproject.toml",
    "conftest.py",
    "benchmarks/__init__.py",
    "benchmarks/partners/__init__.py",
    "benchmarks/partners/torchvision_on_cpu.py",
)

# Tests of the repository rather than of the package: they read its pages, benchmarks or sources.
LEFT_OUT = (
    "tests/benchmarks",
    "tests/browser/test_built_docs.py",
    "tests/verifying/test_page.py",
    "tests/corpus/test_labels.py::test_the_readme_has_the_counts_and_a_label_as_it_is",
    "tests/corpus/test_labels.py::test_the_tool_in_the_readme_runs",
    "tests/corpus/test_leaderboard.py",
    "tests/corpus/test_sharded.py::test_the_recorded_figures_reach_the_goal",
    "tests/documents",
    "tests/jax/test_meshes.py::test_the_programs_of_the_page_run_on_eight_devices",
    "tests/lockfile/test_cases.py",
    "tests/lockfile/test_logprobs.py",
    "tests/lockfile/test_page.py",
    "tests/losses/test_cost.py",
    "tests/mending/test_page.py",
    "tests/mutants",
    "tests/parity/test_diff_repro.py::test_the_scripts_on_the_page_are_those_that_are_written",
    "tests/partners/migration.py",
    "tests/partners/test_accelerate.py",
    "tests/partners/test_conformance.py",
    "tests/partners/test_fastai.py",
    "tests/partners/test_ignite.py",
    "tests/partners/test_jax_loops.py",
    "tests/partners/test_lightning.py",
    "tests/partners/test_lightning_settings.py",
    "tests/partners/test_migration.py",
    "tests/partners/test_migration_scales.py",
    "tests/partners/test_sentence_transformers.py",
    "tests/partners/test_torch_ranks.py",
    "tests/partners/test_transformers.py",
    "tests/partners/test_trl.py",
    "tests/release",
    "tests/test_diff_examples.py",
    "tests/test_distributed_examples.py",
    "tests/test_docs.py",
    "tests/test_imports.py::test_the_import_contracts_can_break",
    "tests/test_imports.py::test_the_import_contracts_hold",
    "tests/test_public_names.py::test_the_api_pages_hold_every_public_name_and_nothing_else",
    "tests/test_readme.py",
    "tests/test_recorded.py",
    "tests/test_recovery_example.py",
    "tests/torch/test_audit.py::test_the_page_shows_what_is_printed",
    "tests/torch/test_explain_torchrun.py::test_the_page_shows_the_commands_own_output",
)


def run(*command: object, **options: object) -> None:
    """Run a command, and stop here if it fails."""
    subprocess.run([str(part) for part in command], check=True, **options)


def source_files() -> set[str]:
    """What the wheel must hold of the packages: every module, what pages are made of, and the markers."""
    files = (path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file())
    return {
        path.relative_to(ROOT).as_posix()
        for path in files
        if path.suffix in SUFFIXES or path.name == "py.typed"
    }


def check_contents(wheel: Path, sdist: Path) -> None:
    """The wheel holds the packages and nothing else; the sdist holds the tests too."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    dist_info = "-".join(wheel.name.split("-")[:2]) + ".dist-info"
    expected = source_files() | {f"{dist_info}/{name}" for name in DIST_INFO}
    if names != expected:
        sys.exit(f"{wheel.name}: missing {sorted(expected - names)}, not wanted {sorted(names - expected)}")
    if missing := [package for package in PACKAGES if f"{package}/py.typed" not in names]:
        sys.exit(f"{wheel.name}: no py.typed in {missing}")
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    needed = source_files() | NEEDED
    if missing := sorted(needed - packed):
        sys.exit(f"{sdist.name}: missing {missing}")
    print(f"{wheel.name}: {len(names)} files; {sdist.name}: {len(packed)} entries", flush=True)


def install(wheel: Path, folder: Path) -> Path:
    """The interpreter of a new environment with the wheel in it and the dependencies of this one."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        wheel,
    )
    (packages,) = folder.glob("lib/python*/site-packages")
    # The line adds the folder alone: .pth files in it (an editable stablenum is one) are not read.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    return python


def check_origin(python: Path, folder: Path, env: dict[str, str]) -> None:
    """Every package is imported from the environment of the wheel."""
    program = f"import sys, {', '.join(PACKAGES)}\nprint(*sys.path, sep='\\n')\n" + "".join(
        f"print({package}.__file__)\n" for package in PACKAGES
    )
    result = subprocess.run(
        [python, "-c", program], cwd=folder, env=env, capture_output=True, text=True, check=True
    )
    *path, first, second, third = result.stdout.splitlines()
    for origin in (first, second, third):
        if not Path(origin).is_relative_to(folder):
            sys.exit(f"imported from {origin} instead of the wheel")
    if str(ROOT) in path:
        sys.exit("the source tree is on sys.path")


def copy_tests(folder: Path) -> list[str]:
    """Copy tests, corpus and pytest's settings; the options that leave out what needs the repository."""
    for name in ("corpus", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in SETTINGS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    options = []
    for name in LEFT_OUT:
        file, _, function = name.partition("::")
        source = ROOT / file
        if not source.exists() or (function and f"def {function}(" not in source.read_text(encoding="utf-8")):
            sys.exit(f"LEFT_OUT names {name}, which does not exist")
        options += ["--deselect" if function else "--ignore", name]
    return options


def main() -> None:
    """Build, check, install, test."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        run(sys.executable, "-m", "build", "--outdir", folder / "dist", ROOT, stdout=subprocess.DEVNULL)
        (wheel,), (sdist,) = (folder / "dist").glob("*.whl"), (folder / "dist").glob("*.tar.gz")
        check_contents(wheel, sdist)
        python = install(wheel, folder / "venv")
        env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        check_origin(python, folder, env)
        options = copy_tests(folder)
        run(python, "-m", "pytest", *options, *(sys.argv[1:] or ["tests"]), cwd=folder, env=env)


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
