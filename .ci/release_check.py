"""Checks that a release could go out: sdist and wheel, their contents and metadata, and the README.

    python .ci/release_check.py [--release] [--constraint FILE]

Builds both distributions, runs ``twine check --strict``, compares the version and the licences wherever they
are written, installs the wheel into an empty virtual environment, lists the commands there, adds the extras
that the README names, and runs the README's examples and commands. With ``--release``, the changelog and the
citation must name the version and its date, too.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Sequence
from email.parser import Parser
from pathlib import Path

from wheel_test import check_contents, run

ROOT = Path(__file__).resolve().parents[1]
# Script, the words of the command, the exit status, and what it prints. The first two are the README's.
COMMANDS = (
    (
        "docs/failures/train.py",
        ("explain", "train.py", "--", "--lr", "0.1", "--epochs", "8"),
        1,
        "sqrt gives NaN",
    ),
    ("examples/diff/layer_norm_epsilon.py", ("diff", "layer_norm_epsilon.py"), 1, "epsilon_value"),
)


def text(name: str) -> str:
    """A file of the repository."""
    return (ROOT / name).read_text(encoding="utf-8")


def found(pattern: str, name: str) -> str:
    """What the group of a pattern matches in a file of the repository, "" for nothing."""
    match = re.search(pattern, text(name), re.MULTILINE)
    return match[1] if match else ""


def contradictions(released: bool) -> list[str]:
    """Where version and licence are written, and differ."""
    project = tomllib.loads(text("pyproject.toml"))["project"]
    version = found(r'^__version__ = "(.+)"$', "stablenum/__init__.py")
    same = {
        "conda/recipe.yaml: version": (found(r'^  version: "(.+)"$', "conda/recipe.yaml"), version),
        "conda/recipe.yaml: license": (found(r"^  license: (.+)$", "conda/recipe.yaml"), project["license"]),
    }
    if released:
        same |= {
            "CITATION.cff: version": (found(r"^version: (.+)$", "CITATION.cff"), version),
            "CHANGELOG.md: newest version": (
                found(r"^## \[(\d.*)\] - \d{4}-\d\d-\d\d$", "CHANGELOG.md"),
                version,
            ),
            "CITATION.cff: date-released": (
                found(r"^date-released: (.+)$", "CITATION.cff"),
                found(r"^## \[\d.*\] - (.+)$", "CHANGELOG.md"),
            ),
        }
    return [
        f"{place} is {there!r}, expected {here!r}" for place, (there, here) in same.items() if there != here
    ]


def check_metadata(wheel: Path) -> None:
    """The wheel's metadata have the licences of everything in it, and a description."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        fields = Parser().parsestr(archive.read(name).decode("utf-8"))
        licences = fields.get_all("License-File", [])
        held = set(archive.namelist())
    folder = name.removesuffix("METADATA")
    wrong = [file for file in licences if f"{folder}licenses/{file}" not in held]
    if wrong or fields["License-Expression"] != tomllib.loads(text("pyproject.toml"))["project"]["license"]:
        sys.exit(f"{wheel.name}: licence {fields['License-Expression']}, files {licences}, missing {wrong}")
    print(f"{fields['Name']} {fields['Version']}, {fields['License-Expression']}, {', '.join(licences)}")


def check_readme(wheel: Path, folder: Path, constraints: Sequence[str]) -> None:
    """Install the wheel into an empty environment, and run the README's examples and commands there.

    First without any extra: then the command must list itself.
    """
    venv.create(folder / "venv", with_pip=True)
    python, work = folder / "venv" / "bin" / "python", folder / "work"
    work.mkdir()
    pip = [python, "-m", "pip", "install", "--quiet", *constraints]
    run(*pip, wheel)
    run(folder / "venv" / "bin" / "stablenum", "--help", stdout=subprocess.DEVNULL)
    run(*pip, f"{wheel}[cli,jax,torch]", "flax")  # the program of the second command uses flax
    for number, example in enumerate(re.findall(r"^```python\n(.*?)^```", text("README.md"), re.M | re.S)):
        file = work / f"example{number}.py"
        file.write_text(example, encoding="utf-8")
        done = subprocess.run([python, file], cwd=work, capture_output=True, text=True, check=False)
        if done.returncode or "NONFINITE_LOSS" not in done.stdout:
            sys.exit(f"example {number} of README.md: {done.stdout}{done.stderr}")
        print(f"example {number} of README.md: right", flush=True)
    for script, words, status, wanted in COMMANDS:
        (work / Path(script).name).write_text(text(script), encoding="utf-8")
        command = [folder / "venv" / "bin" / "stablenum", *words]
        done = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
        if done.returncode != status or wanted not in done.stdout:
            sys.exit(f"stablenum {' '.join(words)}: {done.returncode}\n{done.stdout}{done.stderr}")
        print(f"stablenum {' '.join(words)}: right", flush=True)


def main() -> None:
    """Build, check, install, run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--release", action="store_true", help="changelog and citation name the version")
    parser.add_argument("--constraint", action="append", default=[], help="as for pip")
    options = parser.parse_args()
    if wrong := contradictions(options.release):
        sys.exit("\n".join(wrong))
    constraints = [
        word for file in options.constraint for word in ("--constraint", str(Path(file).resolve()))
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        run(sys.executable, "-m", "build", "--outdir", folder / "dist", ROOT, stdout=subprocess.DEVNULL)
        (wheel,), (sdist,) = (folder / "dist").glob("*.whl"), (folder / "dist").glob("*.tar.gz")
        run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
        check_contents(wheel, sdist)
        check_metadata(wheel)
        check_readme(wheel, folder, constraints)


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
