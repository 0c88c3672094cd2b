"""The script and the styles of pages with plots of runs."""

from __future__ import annotations

from importlib.resources import files

__all__ = ["PARTS", "asset", "script", "style"]

PARTS = ("data", "plots", "view", "tip", "start")


def script(main: str) -> str:
    """Return the whole script of a page, which runs ``main``.

    There, ``drawRuns(data, place)`` draws what :func:`stablenum.commands.run_plots.page_data.plotted` returns
    into the element of class ``plots`` in ``place``. Its legend, its buttons and the steps shown are in
    ``place`` too, as far as the page has them.
    """
    parts = "\n".join(asset(f"{name}.js") for name in PARTS)
    return (
        f'{asset("uplot.js")}\n(() => {{\n"use strict";\n'
        f"function drawRuns(DATA, PAGE) {{\n{parts}}}\n{main}\n}})();"
    )


def style() -> str:
    """Return the styles of the plots."""
    return asset("uplot.css") + asset("page.css")


def asset(name: str) -> str:
    """Return the text of a file of the page."""
    return files("stablenum.commands.run_plots").joinpath("assets", name).read_text(encoding="utf-8")
