"""Put built pages beside those of other versions.

    python docs/versions.py SITE [--built docs/_build/html]

``SITE`` is the folder that is uploaded: one folder for each version, ``versions.json`` with their list, which
each page reads, and an ``index.html`` that leads to the latest release. A version that is there already is
replaced.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path

import stablenum

__all__ = ["publish"]

# Where a page names the list of versions, before and after it is published.
_NO_LIST, _LIST = 'data-list=""', 'data-list="../versions.json"'

_REDIRECT = """<!doctype html>
<meta charset="utf-8">
<title>stablenum</title>
<meta http-equiv="refresh" content="0; url={path}">
<a href="{path}">stablenum {version}</a>
"""


def publish(built: Path, site: Path, version: str) -> None:
    """Copy the pages of one version into the site, and list all versions, the newest first.

    Raises:
        FileNotFoundError: nothing is built.
    """
    if not (built / "index.html").exists():
        raise FileNotFoundError(f"{built}: no index.html; `make docs` builds the pages")
    folder = site / version
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(built, folder, ignore=shutil.ignore_patterns(".doctrees", ".buildinfo"))
    for page in folder.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        page.write_text(text.replace(_NO_LIST, _LIST, 1), encoding="utf-8")
    names = sorted((page.parent.name for page in site.glob("*/index.html")), key=_order, reverse=True)
    latest = next((name for name in names if not _is_preview(name)), names[0])
    rows = [{"version": name, "path": f"{name}/", "latest": name == latest} for name in names]
    (site / "versions.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    redirect = _REDIRECT.format(path=f"{latest}/", version=latest)
    (site / "index.html").write_text(redirect, encoding="utf-8")


def _is_preview(version: str) -> bool:
    """Whether it is a development version, an alpha, a beta or a release candidate."""
    return re.fullmatch(r"\d+(\.\d+)*", version) is None


def _order(version: str) -> tuple[list[int], bool, str]:
    """1.10 is newer than 1.9, and 1.0 than 1.0rc1."""
    release = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in release[0].split(".")] if release else [-1]
    return numbers, not _is_preview(version), version


def main() -> None:
    """Publish the pages of this version."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("site", type=Path)
    parser.add_argument("--built", type=Path, default=Path(__file__).parent / "_build" / "html")
    options = parser.parse_args()
    publish(options.built, options.site, stablenum.__version__)
    print(options.site / "index.html")  # noqa: T201 - a command


if __name__ == "__main__":
    main()
