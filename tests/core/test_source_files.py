"""A framework's files are recognised, wherever it is installed."""

from __future__ import annotations

import os
import site
import sys
import types
from pathlib import Path

import jax
import pytest
import torch

from stablenum.diagnosis.replay import source_files
from stablenum.diagnosis.replay.source_files import folders_of
from stablenum_jax._diagnosis.replay import source_lines as jax_lines
from stablenum_torch._diagnosis.replay import source_lines as torch_lines


@pytest.mark.parametrize(
    ("is_users", "framework"),
    [(jax_lines.is_user_code, jax), (torch_lines.is_user_file, torch)],
    ids=["jax", "torch"],
)
def test_a_framework_outside_this_environment_is_not_user_code(is_users, framework, monkeypatch):
    """This happens in an environment that extends another one, or with ``pip install --target``."""
    monkeypatch.setattr(source_files, "_SITE", ("/nowhere/",))
    monkeypatch.setattr(source_files, "_STANDARD", ("/nowhere/",))
    is_users = getattr(is_users, "__wrapped__", is_users)  # without its cache
    assert not is_users(framework.__file__)
    assert is_users(__file__)


def test_a_package_is_found_where_it_is_imported_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "__init__.py").touch()
    assert folders_of(["elsewhere"]) == ()
    monkeypatch.syspath_prepend(tmp_path)
    assert folders_of(["elsewhere"]) == (f"{tmp_path / 'elsewhere'}{os.sep}",)


def test_a_folder_that_only_has_a_frameworks_name_is_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "haiku").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not any(folder.startswith(str(tmp_path)) for folder in folders_of(["haiku"]))


def test_a_stub_of_a_framework_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distrax", types.ModuleType("distrax"))
    assert folders_of(["distrax"]) == ()


def test_packages_of_the_environment_that_this_one_extends_are_not_the_standard_library() -> None:
    folder = site.getsitepackages([sys.base_prefix])[0]
    file = os.path.join(folder, "somebodys_package", "model.py")
    assert jax_lines.is_user_code(file)
    assert torch_lines.is_user_file(file)
