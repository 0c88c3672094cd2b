"""Files of the repository's root as pages: their links lead to pages instead of files."""

from __future__ import annotations

from pathlib import Path

__all__ = ["PAGES", "write_root_files"]

# The file of the root, by the name of its page.
PAGES = {"changelog": "CHANGELOG.md", "contributing": "CONTRIBUTING.md", "releasing": "RELEASING.md"}


def write_root_files(root: Path, directory: Path) -> None:
    """Write ``changelog.md``, ``contributing.md`` and ``releasing.md``."""
    for page, file in PAGES.items():
        text = (root / file).read_text(encoding="utf-8").replace("](docs/", "](")
        for name, of_root in PAGES.items():
            text = text.replace(f"]({of_root})", f"]({name}.md)")
        (directory / f"{page}.md").write_text(text, encoding="utf-8")
