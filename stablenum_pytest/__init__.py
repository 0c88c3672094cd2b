"""A pytest plugin: the fixture ``numerics`` pins what a program computes.

    def test_loss(numerics):
        numerics.check(stablenum_torch.program(loss, batch, model=model, optimizer=optimizer), "loss")

The first run records the program in ``numerics/loss.snum`` beside the test; commit that file. Later runs
compare, on any machine. Where the environment variable ``CI`` is set, nothing is recorded: a recording that
is not there fails the test. ``--numerics-update`` records again what has changed, and shows it. pytest loads
this module at every start: all else is imported when a test asks for it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Numerics", "numerics"]

_PROPERTY = "numerics"
_USED = pytest.StashKey[dict[str, tuple[str, int]]]()
# In file names of all systems.
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("numerics", "recordings of what programs compute (stablenum)")
    group.addoption(
        "--numerics-update",
        action="store_true",
        help="Record again what no longer agrees with its recording, and show what changed.",
    )
    group.addoption(
        "--numerics-dir",
        metavar="DIR",
        help="The folder of the recordings; by default, numerics beside each test file.",
    )


@pytest.fixture
def numerics(request: pytest.FixtureRequest) -> Numerics:
    """Compare programs with their recordings; see :class:`Numerics`."""
    return Numerics(request)


class Numerics:
    """Compares programs with recordings. The fixture ``numerics`` gives one to each test.

    Attributes:
        folder: where the recordings of this test lie.
    """

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._request = request
        self._count = 0
        given = request.config.getoption("--numerics-dir")
        self.folder = (
            request.config.rootpath / Path(given).expanduser()
            if given
            else Path(request.path).parent / "numerics"
        )

    def check(self, program: Any, name: str | None = None, *, steps: int = 1, weights: Any = "match") -> None:
        """Fail the test if a program no longer computes what was recorded.

        Args:
            program: made by ``stablenum_torch.program`` or ``stablenum_jax.program``.
            name: of the recording, a file in ``folder``; characters that file names do not take become
                "-". None for the name of the test with its file and its parameters. Each check needs its own.
            steps: how many training steps are recorded.
            weights: as in ``stablenum.diff``.

        Raises:
            pytest.fail.Exception: the program differs, or there is no recording and ``CI`` is set. The text
                is that of the report; the page of the whole report lies in pytest's cache.
            TypeError, ValueError, ProgramError: as in ``stablenum.save_program`` and ``stablenum.diff``.
        """
        __tracebackhide__ = True
        file = self.folder / f"{_file_name(self._own_name() if name is None else name)}.snum"
        self._claim(file)
        update = self._request.config.getoption("--numerics-update")
        if not file.exists():
            if os.environ.get("CI", "").lower() not in ("", "0", "false") and not update:
                _fail(
                    f"There is no recording {_shown(file)}, and where CI is set none is made: run the test "
                    "on your own machine, and commit the file."
                )
            file.parent.mkdir(parents=True, exist_ok=True)
            self._record(
                program, file, steps, "recorded. Commit it: the program is compared with it from now on."
            )
            return
        changed = self._changed(program, file, steps, weights, with_page=not update)
        if changed is None:
            return
        if not update:
            _fail(f"{changed}\n--numerics-update records again what is meant to change.")
        self._record(program, file, steps, f"recorded again. What changed:\n{changed}")

    def _own_name(self) -> str:
        """Return the name of the test, with those of its file and class."""
        _, _, inner = self._request.node.nodeid.partition("::")
        return f"{Path(self._request.path).stem}-{inner}"

    def _claim(self, file: Path) -> None:
        """Refuse the recording of another check."""
        used = self._request.config.stash.setdefault(_USED, {})
        key = os.path.normcase(file.absolute()).lower()
        owner, number = (self._request.node.nodeid, self._count)
        self._count += 1
        if used.setdefault(key, (owner, number)) != (owner, number):
            raise ValueError(
                f"name must be another one for each check: {_shown(file)} belongs to one of "
                f"{used[key][0]}. Characters that file names do not take are all the same there."
            )

    def _changed(self, program: Any, file: Path, steps: int, weights: Any, *, with_page: bool) -> str | None:
        """Return what is not as it was recorded; None if nothing is."""
        from stablenum import ProgramError, diff, load_program

        try:
            recorded = load_program(file)
        except ValueError as error:
            return str(error)
        held = getattr(recorded, "steps", steps)
        if held != steps:
            return f"{_shown(file)} holds {held} training steps; the test asks for {steps}."
        try:
            report = diff(recorded, program, weights=weights)
        except (ValueError, ProgramError) as error:
            return f"{_shown(file)} cannot be compared with the program: {error}"
        if report.ok:
            return None
        page = self._page(file.stem, report) if with_page else None
        more = "" if page is None else f"\nThe whole report: {_shown(page)}"
        return f"{_shown(file)} and the program differ.\n{report}{more}"

    def _record(self, program: Any, file: Path, steps: int, done: str) -> None:
        from stablenum import save_program

        save_program(program, file, steps=steps)
        self._request.node.user_properties.append((_PROPERTY, f"{_shown(file)}: {done}"))

    def _page(self, name: str, report: Any) -> Path | None:
        """Write the page of a report into pytest's cache; None if there is no cache."""
        cache = getattr(self._request.config, "cache", None)
        if cache is None:
            return None
        try:
            page: Path = cache.mkdir("numerics") / f"{name}.html"
            report.save(page)
        except OSError:  # a cache that cannot be written is none
            return None
        return page


def _fail(text: str) -> None:
    __tracebackhide__ = True
    pytest.fail(text, pytrace=False)


def _shown(path: Path) -> str:
    """Return a path as reports name it."""
    from stablenum.diagnosis.diff.sides.recorded import shown_path

    return shown_path(str(path))


def _file_name(name: str) -> str:
    found = _UNSAFE.sub("-", name).strip("-.")
    if not found:
        raise ValueError(f"name must have a letter or a digit; got {name!r}.")
    return found


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say what was recorded; workers of pytest-xdist hand it on with their results."""
    reports = (
        r for rows in terminalreporter.stats.values() for r in rows if getattr(r, "when", "") == "call"
    )
    notes = [text for r in reports for key, text in r.user_properties if key == _PROPERTY]
    if notes:
        terminalreporter.section("numerics")
        for text in dict.fromkeys(notes):
            terminalreporter.write_line(text)
