"""What a release consists of agrees: version, licences, dependencies, and the pages of several versions."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
RECIPE = (ROOT / "conda" / "recipe.yaml").read_text(encoding="utf-8")
# The names in conda's channels where they differ.
CONDA = {"torch": "pytorch", "matplotlib": "matplotlib-base", "ml-dtypes": "ml_dtypes"}


def loaded(path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(path.parent))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Any:
    return loaded(ROOT / ".ci" / "release_check.py", monkeypatch)


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> Any:
    return loaded(ROOT / "docs" / "versions.py", monkeypatch)


def test_version_and_licence_agree(check: Any) -> None:
    assert check.contradictions(released=False) == []


def test_a_release_needs_its_version_in_changelog_and_citation(check: Any, tmp_path: Path) -> None:
    for name in ("pyproject.toml", "stablenum/__init__.py", "conda/recipe.yaml", "CITATION.cff"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")
    check.ROOT = tmp_path
    (tmp_path / "CHANGELOG.md").write_text("## [Unreleased]\n", encoding="utf-8")
    places = [line.partition(" is ")[0] for line in check.contradictions(released=True)]
    assert places == ["CITATION.cff: version", "CHANGELOG.md: newest version"]
    version = check.found(r'^__version__ = "(.+)"$', "stablenum/__init__.py")
    (tmp_path / "CHANGELOG.md").write_text(
        f"## [Unreleased]\n\n## [{version}] - 2026-12-31\n", encoding="utf-8"
    )
    with (tmp_path / "CITATION.cff").open("a", encoding="utf-8") as file:
        file.write(f"version: {version}\ndate-released: 2026-12-31\n")
    assert check.contradictions(released=True) == []


def test_the_licence_of_what_is_not_ours_is_the_one_in_its_file() -> None:
    assert PROJECT["license"] == "Apache-2.0 AND MIT"
    script = (ROOT / "stablenum/commands/run_plots/assets/uplot.js").read_text(encoding="utf-8")
    kept = (ROOT / "LICENSES" / "MIT-uPlot.txt").read_text(encoding="utf-8")
    start = kept.index("The MIT License")
    assert kept[start:].strip() in script
    assert set(PROJECT["license-files"]) == {"LICENSE", "LICENSES/MIT-uPlot.txt"}
    assert all(name in RECIPE for name in PROJECT["license-files"])


def test_the_recipe_has_the_dependencies_of_the_package() -> None:
    every = [need for extra in PROJECT["optional-dependencies"].values() for need in extra]
    extras = [need for need in every if not need.startswith("stablenum[")]
    for section, needs in (("run", PROJECT["dependencies"]), ("run_constraints", extras)):
        text = re.search(rf"^  {section}:\n((?:    - .+\n|  #.+\n)+)", RECIPE, re.MULTILINE)
        assert text is not None
        found = set(re.findall(r"- (\S+) >=(\S+)", text[1])) - {("python", "${{")}
        wanted = {(CONDA.get(name, name), bound) for name, bound in (need.split(">=") for need in needs)}
        assert found == wanted
    assert f'python_min: "{PROJECT["requires-python"].removeprefix(">=")}"' in RECIPE
    assert f"stablenum = {PROJECT['scripts']['stablenum']}" in RECIPE


def test_the_pages_of_versions_stand_side_by_side(versions: Any, tmp_path: Path) -> None:
    built, site = tmp_path / "html", tmp_path / "site"
    with pytest.raises(FileNotFoundError, match="make docs"):
        versions.publish(built, site, "0.1.0")
    (built / ".doctrees").mkdir(parents=True)
    box = (ROOT / "docs" / "templates" / "sidebar" / "versions.html").read_text(encoding="utf-8")
    box = box.replace("{{ versions_list }}", "")  # as it is built: a page alone asks for no list
    (built / "recipes").mkdir()
    (built / "recipes" / "sam.html").write_text(box, encoding="utf-8")
    for version in ("0.9.0", "0.10.0rc1", "0.10.0", "1.0.0rc1", "0.9.0"):
        (built / "index.html").write_text(version, encoding="utf-8")
        versions.publish(built, site, version)
    rows = json.loads((site / "versions.json").read_text(encoding="utf-8"))
    assert [row["version"] for row in rows] == ["1.0.0rc1", "0.10.0", "0.10.0rc1", "0.9.0"]
    assert [row["version"] for row in rows if row["latest"]] == ["0.10.0"]
    assert all((site / row["path"] / "index.html").read_text("utf-8") == row["version"] for row in rows)
    assert 'url=0.10.0/"' in (site / "index.html").read_text(encoding="utf-8")
    assert not (site / "0.10.0" / ".doctrees").exists()
    assert 'data-list="../versions.json"' in (site / "0.9.0" / "recipes" / "sam.html").read_text("utf-8")


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_by_their_hash(path: Path) -> None:
    used = re.findall(r"uses: (\S+)(.*)", path.read_text(encoding="utf-8"))
    assert used
    for action, comment in used:
        assert re.search(r"@[0-9a-f]{40}$", action), action
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), action


def test_links_and_picture_of_the_readme_have_addresses_on_an_index() -> None:
    hook = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["metadata"]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    before = re.findall(r"\]\(([^)]+)\)", text)
    for substitution in hook["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(substitution["pattern"], substitution["replacement"], text)
    after = re.findall(r"\]\(([^)]+)\)", text)
    assert len(after) == len(before) > 20
    assert all(link.startswith("https://") for link in after)
    assert [link.endswith(old) for link, old in zip(after, before, strict=True)] == [True] * len(before)
    assert text.count("https://raw.githubusercontent.com") == 1  # the picture
