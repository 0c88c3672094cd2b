"""What is public: every name of a public package is on an API page, and nothing else is."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pickle
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import stablenum
import stablenum_jax
import stablenum_torch
from stablenum.commands.diff.command import diff

PAGES = sorted(Path(__file__).parents[1].joinpath("docs", "api").glob("*.md"))


def importable(module: str) -> bool:
    """Return whether a module can be imported. In the repository all can, or the API pages name too much."""
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


INTEGRATIONS = tuple(
    f"stablenum_torch.integrations.{partner}"
    for partner in ("accelerate", "fastai", "ignite", "lightning", "transformers")
)
PUBLIC = (
    "stablenum",
    "stablenum.diagnosis",
    "stablenum.guard",
    "stablenum.losses",
    "stablenum.numerics",
    "stablenum.precision",
    "stablenum.typing",
    "stablenum_jax",
    "stablenum_jax.integrations.flax",
    "stablenum_jax.integrations.orbax",
    "stablenum_jax.losses",
    "stablenum_jax.numerics",
    "stablenum_jax.policy",
    "stablenum_jax.typing",
    "stablenum_torch",
    "stablenum_torch.losses",
    "stablenum_torch.numerics",
    "stablenum_torch.typing",
    *filter(importable, INTEGRATIONS),
)


def documented(text: str) -> set[str]:
    """The full names that a page's directives document."""
    one_by_one = re.findall(r"^\.\. (?:auto(?:class|function|data)|py:data):: (\S+)$", text, re.M)
    modules = re.findall(r"^\.\. automodule:: (\S+)$(?!\n   :no-members:)", text, re.M)
    return {*one_by_one, *(f"{module}.{name}" for module in modules for name in names_of(module))}


def names_of(module: str) -> list[str]:
    """The public names of a module without its submodules, which are public packages themselves."""
    loaded = importlib.import_module(module)
    return [name for name in loaded.__all__ if not isinstance(getattr(loaded, name), ModuleType)]


def test_the_api_pages_hold_every_public_name_and_nothing_else():
    on_pages = set().union(*(documented(page.read_text(encoding="utf-8")) for page in PAGES))
    public = {f"{module}.{name}" for module in PUBLIC for name in names_of(module)}
    assert sorted(public - on_pages) == []
    assert sorted(on_pages - public) == []


def test_a_name_that_is_missing_on_a_page_is_noticed():
    assert documented(".. autofunction:: stablenum.decide\n") == {"stablenum.decide"}
    assert documented(".. automodule:: stablenum\n   :no-members:\n") == set()
    assert "stablenum_jax.policy.get_policy" in documented(".. automodule:: stablenum_jax.policy\n")


@pytest.mark.parametrize("name", PUBLIC)
def test_dir_shows_the_public_names_and_nothing_else(name):
    module = importlib.import_module(name)
    assert dir(module) == sorted(module.__all__)


@pytest.mark.parametrize("module", PUBLIC)
def test_classes_are_pickled_under_the_name_by_which_they_are_imported(module):
    for name in names_of(module):
        value = getattr(importlib.import_module(module), name)
        if isinstance(value, type):
            assert (value.__module__, value.__qualname__) == (module, name)
            assert pickle.loads(pickle.dumps(value)) is value


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("stablenum", "Metrics"),
        ("stablenum_jax", "GuardOptState"),
        ("stablenum_torch", "PolicyHandle"),
    ],
)
def test_types_for_annotations_have_a_module_of_their_own(module, name):
    assert not hasattr(importlib.import_module(module), name)
    assert name in importlib.import_module(f"{module}.typing").__all__


@pytest.mark.parametrize("adapter", ["stablenum_jax", "stablenum_torch"])
def test_the_packages_have_one_version(adapter):
    assert importlib.import_module(adapter).__version__ == importlib.import_module("stablenum").__version__


@pytest.mark.parametrize("adapter", ["stablenum_jax", "stablenum_torch"])
def test_rules_and_settings_are_found_in_the_core_alone(adapter):
    assert not set(names_of(adapter)) & set(names_of("stablenum"))


def test_the_comparison_of_programs_is_called_experimental_wherever_it_is_described():
    may_change = "the names of causes and the JSON may change in a minor version."
    described = (stablenum.diff, stablenum.DiffReport, stablenum_jax.program, stablenum_torch.program, diff)
    texts = [inspect.getdoc(one) or "" for one in described]
    texts.append(PAGES[0].parents[1].joinpath("diff.md").read_text(encoding="utf-8"))
    for text in texts:
        assert re.search(rf"Experimental(: t|\nT){may_change[1:]}", text)


def methods() -> Iterator[tuple[str, Any]]:
    """Methods of public classes, which doctest leaves out because the class carries the package's name."""
    for module in PUBLIC:
        for name in names_of(module):
            value = getattr(importlib.import_module(module), name)
            for method in vars(value).values() if isinstance(value, type) else ():
                function = getattr(method, "fget", None) or getattr(method, "__func__", method)
                if inspect.isfunction(function) and ">>>" in (function.__doc__ or ""):
                    yield f"{module}.{function.__qualname__}", function


def test_the_examples_of_methods_run():
    found = dict(methods())
    assert {"stablenum.AdaptiveGradClip.unit_shape", "stablenum_torch.GuardedOptimizer.explain"} <= set(found)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for name, function in found.items():
        names = {**vars(sys.modules[function.__globals__["__name__"]])}
        for example in doctest.DocTestFinder().find(function, name, module=False, globs=names):
            runner.run(example)
    assert runner.failures == 0
    assert runner.tries > len(found)
