"""The user's files are safe: what has changed, lies elsewhere or behind a link is left alone."""

import sys
from pathlib import Path

import pytest

from stablenum.diagnosis.edits.edit import Edit, StaleEditError
from stablenum.diagnosis.edits.files import readable, write_changes
from stablenum.diagnosis.edits.fix import patch_of
from stablenum.diagnosis.edits.written import written


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "port.py"
    path.write_bytes(b"x = 1\r\ny = 2\r\n")
    return path.resolve()


def test_a_change_is_written_with_a_copy_beside_it(file):
    before = {str(file): "x = 1\r\ny = 2\r\n"}
    after = {str(file): "x = 3\r\ny = 2\r\n"}
    first = write_changes(before, after)
    assert file.read_bytes() == b"x = 3\r\ny = 2\r\n"
    assert [copy.read_bytes() for _, copy in first] == [b"x = 1\r\ny = 2\r\n"]
    second = write_changes(after, before)
    assert [copy.name for _, copy in (*first, *second)] == ["port.py.bak", "port.py.bak1"]
    assert write_changes(before, before) == []


def test_nothing_is_written_if_one_file_has_changed(file):
    other = file.with_name("other.py")
    other.write_text("z = 1\n")
    before = {str(other): "z = 1\n", str(file): "x = 0\n"}
    with pytest.raises(StaleEditError, match=r"port\.py has changed since it was read"):
        write_changes(before, {str(other): "z = 2\n", str(file): "x = 1\n"})
    assert other.read_text() == "z = 1\n"
    assert sorted(p.name for p in file.parent.iterdir()) == ["other.py", "port.py"]


@pytest.mark.skipif(sys.platform == "win32", reason="links need rights there")
def test_links_are_left_alone(file):
    link = file.with_name("link.py")
    link.symlink_to(file)
    assert readable(link, file.parent) is None
    with pytest.raises(StaleEditError):
        write_changes({str(link): "x = 1\r\ny = 2\r\n"}, {str(link): ""})
    assert file.read_bytes() == b"x = 1\r\ny = 2\r\n"


def test_only_sources_in_the_folder_may_be_changed(file, tmp_path):
    packaged, latin = tmp_path / "site-packages" / "lib.py", tmp_path / "latin.py"
    packaged.parent.mkdir()
    packaged.write_text("")
    latin.write_bytes("é = 1".encode("latin-1"))
    assert readable(file, tmp_path) == "x = 1\r\ny = 2\r\n"
    for path in (Path(__file__), packaged, latin, tmp_path / "missing.py", tmp_path):
        assert readable(path, tmp_path) is None


def _edit(span, before, after):
    return Edit(file="a.py", span=span, before=before, after=after, module="safe")


def test_edits_are_written_as_their_author_would():
    source = '"""Doc."""\nimport torch\n\ny = torch.log(\n    x\n)\nz = a / b + c / d\n'
    edits = [
        Edit(
            file="a.py", span=(4, 6, 4, 1), before="torch.log(\n    x\n)", after="safe.log(x)", module="safe"
        ),
        Edit(file="a.py", span=(7, 7, 4, 9), before="a / b", after="safe.divide(a, b)", module="safe"),
        Edit(file="a.py", span=(7, 7, 24, 29), before="c / d", after="safe.divide(c, d)", module="safe"),
    ]
    text = written(source, edits)
    expected = '"""Doc."""\nimport torch\nimport safe\n\ny = safe.log(x)\n'
    assert text == f"{expected}z = safe.divide(a, b) + safe.divide(c, d)\n"
    with pytest.raises(StaleEditError):
        written("y = 1\n", edits)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('"""Doc."""\ny = a / b\n', '"""Doc."""\nimport safe\ny = safe.divide(a, b)\n'),
        ("y = a / b", "import safe\ny = safe.divide(a, b)"),
        ("import safe\ny = a / b\n", "import safe\ny = safe.divide(a, b)\n"),
        ("#!/bin/sh\n# coding\ny = a / b\n", "#!/bin/sh\n# coding\nimport safe\ny = safe.divide(a, b)\n"),
        ("import os\r\ny = a / b\r\n", "import os\r\nimport safe\r\ny = safe.divide(a, b)\r\n"),
    ],
)
def test_an_import_gets_a_line_of_its_own(source, expected):
    line = source[: source.index("a / b")].count("\n") + 1
    edit = Edit(
        file="a.py", span=(line, line, 4, 9), before="a / b", after="safe.divide(a, b)", module="safe"
    )
    assert written(source, [edit]) == expected


def test_a_patch_shows_changed_files_only():
    patch = patch_of({"a.py": "x = 1\n", "b.py": "y"}, {"b.py": "z"})
    end = "\\ No newline at end of file\n"
    assert patch == f"--- a/b.py\n+++ b/b.py\n@@ -1 +1 @@\n-y\n{end}+z\n{end}"
