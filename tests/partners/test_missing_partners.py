"""What an integration says whose partner is missing or too old."""

from __future__ import annotations

import importlib
import subprocess
import sys
import types
from pathlib import Path

import pytest

from stablenum._support.partners import imported

ROOT = Path(__file__).parents[2]
# Each integration: the modules of its partner, how that is installed, and the oldest version.
PARTNERS = {
    "stablenum_torch.integrations.accelerate": (["accelerate"], "accelerate", "1.0"),
    "stablenum_torch.integrations.fastai": (["fastai"], "fastai", "2.8"),
    "stablenum_torch.integrations.ignite": (["ignite"], "pytorch-ignite", "0.5.3"),
    "stablenum_torch.integrations.lightning": (
        ["lightning.pytorch", "pytorch_lightning"],
        "lightning",
        "2.6",
    ),
    "stablenum_torch.integrations.transformers": (["transformers"], "transformers", "5.0"),
    "stablenum_jax.integrations.flax": (["flax"], "flax", "0.12.8"),
    "stablenum_jax.integrations.orbax": (["orbax.checkpoint"], "orbax-checkpoint", "0.12.8"),
}


def version(number: str) -> types.ModuleType:
    made = types.ModuleType("partner")
    made.__version__ = number
    return made


def message(integration: str, monkeypatch: pytest.MonkeyPatch, partner: types.ModuleType | None) -> str:
    """What an integration says if its partner is a module, or None: not installed."""
    monkeypatch.delitem(sys.modules, integration, raising=False)
    for module in PARTNERS[integration][0]:
        monkeypatch.setitem(sys.modules, module, partner)
    with pytest.raises(ImportError) as caught:
        importlib.import_module(integration)
    return str(caught.value)


@pytest.mark.parametrize("integration", PARTNERS)
def test_a_missing_or_old_partner_is_named_with_the_command_that_installs_it(integration, monkeypatch):
    _, name, oldest = PARTNERS[integration]
    needs, install = f"{integration} needs {name} {oldest} or newer", f"pip install '{name}>={oldest}'"
    assert message(integration, monkeypatch, None) == f"{needs}: {install}"
    assert message(integration, monkeypatch, version("0.4.9")) == f"{needs}; found 0.4.9: {install}"


@pytest.mark.parametrize("found", ["2.5", "2.5.9rc1", "2.6.0", "2.6.2"])
def test_a_version_before_the_oldest_is_too_old(found, monkeypatch):
    monkeypatch.setitem(sys.modules, "oldpartner", version(found))
    with pytest.raises(ImportError, match=rf"old-partner 2\.6\.3 or newer; found {found}: pip"):
        imported("mine", {"oldpartner": "old-partner"}, "2.6.3")


@pytest.mark.parametrize("found", ["2.6", "2.6.0", "2.6.1rc1", "2.13.0+cpu", "3.0"])
def test_a_newer_version_is_taken_from_the_first_module_that_is_installed(found, monkeypatch):
    new = version(found)
    monkeypatch.setitem(sys.modules, "newpartner", new)
    assert imported("mine", {"missingpartner": "missing", "newpartner": "new-partner"}, "2.6") is new


def test_what_a_partner_itself_fails_to_import_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "brokenpartner.py").write_text("import a_module_that_nobody_has")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="a_module_that_nobody_has"):
        imported("mine", {"brokenpartner": "broken-partner"}, "1.0")


@pytest.mark.parametrize("package", ["stablenum_torch", "stablenum_jax"])
def test_a_package_and_its_integrations_import_no_partner(package):
    partners = {module.partition(".")[0] for modules, *_ in PARTNERS.values() for module in modules}
    program = f"import sys, {package}.integrations; print(*{sorted(partners)} & sys.modules.keys())"
    program = program.replace("[", "{").replace("]", "}")
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert (result.stdout, result.stderr) == ("\n", "")
