"""The built documentation in a browser: each page light, dark and on a phone, and no dead link."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urlparse

import pytest

HTML = Path(__file__).parents[2] / "docs" / "_build" / "html"
PAGES = sorted(
    p.relative_to(HTML).as_posix() for p in HTML.rglob("*.html") if p.relative_to(HTML).parts[0] != "_modules"
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PAGES, reason="the documentation is not built; `make docs` builds it"),
]

VIEWS = {
    "light": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 844}, "color_scheme": "light"},
}
LOOK = """() => ({
    wider: document.scrollingElement.scrollWidth - innerWidth,
    broken: [...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src),
    links: [...document.querySelectorAll("a[href]")].map(a => a.href),
    ids: [...document.querySelectorAll("[id]")].map(e => e.id),
})"""


@pytest.fixture(scope="module")
def looks(browser: Any) -> dict[tuple[str, str], dict[str, Any]]:
    """What each page looks like in each view."""
    found = {}
    for name, options in VIEWS.items():
        context = browser.new_context(**options)
        page, troubles = context.new_page(), list[str]()
        page.on(
            "console", lambda m, troubles=troubles: troubles.append(m.text) if m.type == "error" else None
        )
        page.on("pageerror", lambda error, troubles=troubles: troubles.append(str(error)))
        for path in PAGES:
            troubles.clear()
            page.goto((HTML / path).as_uri())
            found[name, path] = {**page.evaluate(LOOK), "troubles": list(troubles)}
        context.close()
    return found


@pytest.mark.parametrize("view", VIEWS)
def test_no_page_is_wider_than_its_window_or_lacks_a_picture(view: str, looks: Any) -> None:
    wrong = {
        path: {k: v for k, v in look.items() if k in ("wider", "broken", "troubles") and v not in (0, [])}
        for (name, path), look in looks.items()
        if name == view
    }
    assert {path: found for path, found in wrong.items() if found} == {}


def _targets(look: dict[str, Any]) -> Iterator[tuple[Path, str]]:
    for href in look["links"]:
        link, anchor = urldefrag(href)
        if urlparse(link).scheme == "file":
            yield Path(unquote(urlparse(link).path)), unquote(anchor)


def test_every_link_inside_leads_to_a_page_and_a_place(looks: Any) -> None:
    ids = {HTML / path: set(look["ids"]) for (name, path), look in looks.items() if name == "light"}
    dead = {
        (path, str(target.relative_to(HTML)), anchor)
        for (name, path), look in looks.items()
        if name == "light"
        for target, anchor in _targets(look)
        if not target.exists() or (anchor and target in ids and anchor not in ids[target])
    }
    assert dead == set()
