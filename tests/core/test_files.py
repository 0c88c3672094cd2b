"""Reports are written whole: what stops the writing leaves the old file, and nothing beside it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from stablenum._support.files import write_file, write_text
from stablenum.diagnosis import Report
from stablenum.diagnosis.replay.judge import Evidence
from tests.injection import executed_lines, interrupted_at


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file takes a few characters, and no more."""
    write = Path.write_text

    def stops(path: Path, data: str, *args: object, **kwargs: object) -> int:
        write(path, data[:3])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(Path, "write_text", stops)


@pytest.mark.parametrize("suffix", [".html", ".json", ".txt"])
def test_a_full_disk_leaves_the_old_report(tmp_path, suffix, request):
    report, target = Report.of(Evidence(framework="torch")), tmp_path / f"report{suffix}"
    report.save(target)
    old = target.read_text(encoding="utf-8")
    request.getfixturevalue("full_disk")
    with pytest.raises(OSError, match="No space left"):
        report.save(target)
    assert target.read_text(encoding="utf-8") == old
    assert list(tmp_path.iterdir()) == [target]


def test_an_interrupt_at_any_line_leaves_the_old_file_or_the_new_one(tmp_path):
    target = tmp_path / "report.txt"
    count = len(executed_lines(lambda: write_text(target, "new")))
    for number in range(count):
        target.write_text("old", encoding="utf-8")
        place = interrupted_at(number, lambda: write_text(target, "new"))
        assert place is not None
        assert target.read_text(encoding="utf-8") in ("old", "new"), place
        assert list(tmp_path.iterdir()) == [target], place


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "report.txt", tmp_path / "link.txt"
    target.write_text("old", encoding="utf-8")
    link.symlink_to(target)
    write_text(link, "new")
    assert link.is_symlink()
    assert target.read_text(encoding="utf-8") == "new"


def test_a_file_in_a_folder_that_takes_no_new_files_is_written_into(tmp_path, monkeypatch):
    target = tmp_path / "report.txt"
    target.write_text("something longer", encoding="utf-8")
    # Permissions do not apply to the superuser, so the check is replaced instead of setting them.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    write_text(target, "new")
    assert target.read_text(encoding="utf-8") == "new"


def test_the_suffix_selects_the_format_of_a_file_that_is_written_aside(tmp_path):
    seen = []
    write_file(tmp_path / "plot.pdf", lambda path: (seen.append(path.suffix), path.touch()))
    assert seen == [".pdf"]
    assert (tmp_path / "plot.pdf").exists()


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644, 0o444])
def test_a_file_that_is_replaced_keeps_its_rights(mode, tmp_path):
    target = tmp_path / "report.json"
    target.write_text("old")
    target.chmod(mode)
    write_text(target, "new")
    assert (target.read_text(), target.stat().st_mode & 0o777) == ("new", mode)


@pytest.mark.parametrize("name", ["a" * 245, "ü" * 120 + ".json", "a." + "b" * 240, "." + "c" * 250])
def test_names_that_are_as_long_as_a_file_system_allows(name, tmp_path):
    write_text(tmp_path / name, "text")
    assert [path.name for path in tmp_path.iterdir()] == [name]
