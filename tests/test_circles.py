"""No module imports itself through others. Imports inside functions and for types only count, too."""

from __future__ import annotations

import grimp
import pytest

PACKAGES = ("stablenum", "stablenum_jax", "stablenum_torch")


def circles(graph: grimp.ImportGraph) -> list[list[str]]:
    """The sets of modules that all import one another, directly or indirectly."""
    reached = {module: graph.find_upstream_modules(module) for module in graph.modules}
    found = {
        frozenset({module, *(other for other in reached[module] if module in reached[other])})
        for module in reached
    }
    return sorted(sorted(circle) for circle in found if len(circle) > 1)


def test_there_are_no_import_cycles():
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    assert len(graph.modules) > 200
    assert circles(graph) == []


PLANTED = {
    "within a function": (
        "def f():\n    from planted.b import g\n",
        "from planted.c import h\n",
        "import planted.a\n",
    ),
    "for types alone": (
        "from planted.b import g\n",
        "from planted.c import h\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from planted.a import f\n",
    ),
}


@pytest.mark.parametrize("bodies", PLANTED.values(), ids=PLANTED)
def test_an_import_cycle_is_found(tmp_path, monkeypatch, bodies):
    package = tmp_path / "planted"
    package.mkdir()
    (package / "__init__.py").touch()
    for name, body in zip("abc", bodies, strict=True):
        (package / f"{name}.py").write_text(body)
    (package / "d.py").write_text("import planted.a\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    graph = grimp.build_graph("planted", cache_dir=None)
    assert circles(graph) == [["planted.a", "planted.b", "planted.c"]]
