"""What an integration says whose partner is missing or too old."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import pytest

from stablenum_torch.integrations._partners import imported

ROOT = Path(__file__).parents[2]
PARTNERS = {
    "lightning": ("lightning 2.6", "pip install 'lightning>=2.6'"),
    "ignite": ("pytorch-ignite 0.5.3", "pip install 'pytorch-ignite>=0.5.3'"),
    "fastai": ("fastai 2.8", "pip install 'fastai>=2.8'"),
}


def run(*lines: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "\n".join(lines)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)


@pytest.mark.parametrize("name", PARTNERS)
def test_a_missing_partner_is_named_with_the_command_that_installs_it(name):
    needs, install = PARTNERS[name]
    result = run(
        "import sys",
        # A module that is None in sys.modules acts as if it were not installed.
        "for name in ('lightning', 'pytorch_lightning', 'ignite', 'fastai'): sys.modules[name] = None",
        f"import stablenum_torch.integrations.{name}",
    )
    last = result.stderr.splitlines()[-1]
    assert last == f"ImportError: stablenum_torch.integrations.{name} needs {needs} or newer: {install}"


def test_a_partner_that_is_too_old_is_named_with_its_version(monkeypatch):
    old = types.ModuleType("oldpartner")
    old.__version__ = "2.5.9rc1"
    monkeypatch.setitem(sys.modules, "oldpartner", old)
    with pytest.raises(ImportError, match=r"old-partner 2.6 or newer; found 2.5.9rc1: pip"):
        imported("mine", {"oldpartner": "old-partner"}, "2.6")
    assert imported("mine", {"missing": "missing", "oldpartner": "old-partner"}, "2.5") is old


def test_what_a_partner_itself_fails_to_import_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "brokenpartner.py").write_text("import a_module_that_nobody_has")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="a_module_that_nobody_has"):
        imported("mine", {"brokenpartner": "broken-partner"}, "1.0")


def test_the_package_of_integrations_imports_no_partner():
    result = run(
        "import sys, stablenum_torch.integrations",
        "print(*{'fastai', 'ignite', 'lightning', 'pytorch_lightning'} & set(sys.modules))",
    )
    assert result.stdout == "\n"
