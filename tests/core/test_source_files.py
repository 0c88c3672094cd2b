"""A framework's files are known for what they are, wherever it is installed."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest
import torch

from stablenum.diagnosis.replay.source_files import folders_of
from stablenum_jax._diagnosis.replay import source_lines as jax_lines
from stablenum_torch._diagnosis.replay import source_lines as torch_lines


@pytest.mark.parametrize(
    ("lines", "is_users", "framework"),
    [(jax_lines, jax_lines.is_user_code, jax), (torch_lines, torch_lines.is_user_file, torch)],
    ids=["jax", "torch"],
)
def test_a_framework_outside_of_this_environment_is_no_user_code(lines, is_users, framework, monkeypatch):
    """This happens in an environment that extends another one, or with ``pip install --target``."""
    monkeypatch.setattr(lines, "SITE", ("/nowhere/",))
    monkeypatch.setattr(lines, "STANDARD", ("/nowhere/",))
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
    assert folders_of(["elsewhere"]) == (f"{tmp_path / 'elsewhere'}/",)
