"""Files that are cut off, foreign, from a later version, or made to do harm: a sentence, and nothing else."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import stablenum
from stablenum.diagnosis.diff.lockfile import layout, saving
from tests.lockfile.torch_program import in_torch

MEMBERS = dict[str, bytes]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording as it should be."""
    path = tmp_path_factory.mktemp("whole") / "golden.snum"
    stablenum.save_program(in_torch(), path)
    return path


def members_of(path: Path) -> MEMBERS:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def written(path: Path, members: MEMBERS) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def array(x: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, x, allow_pickle=True)
    return buffer.getvalue()


class Harm:
    """Makes a folder when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("harm",)


def text(**changes: Any) -> Callable[[MEMBERS], None]:
    def change(members: MEMBERS) -> None:
        found = json.loads(members[layout.TEXT])
        for name, new in changes.items():
            found[name] = new(found[name]) if callable(new) else new
        members[layout.TEXT] = json.dumps(found).encode()

    return change


def member(name: str, data: Callable[[bytes], bytes]) -> Callable[[MEMBERS], None]:
    def change(members: MEMBERS) -> None:
        members[name] = data(members[name])

    return change


def first_operation(place: int, new: Any) -> Callable[[Any], Any]:
    return lambda rows: [[*rows[0][:place], new, *rows[0][place + 1 :]], *rows[1:]]


BROKEN: dict[str, tuple[Callable[[MEMBERS], None], str]] = {
    "a later format": (text(format=layout.FORMAT + 1), "this version reads up to"),
    "no format": (text(format="1"), "its format is not a number"),
    "no operations": (text(operations=[]), "is not a number from 0 on below 0"),
    "an operation of the future": (text(operations=first_operation(3, [10**6])), "is not a number from 0 on"),
    "a negative value": (text(operations=first_operation(3, [-1])), "is not a number from 0 on"),
    "an operation in no phase": (text(operations=first_operation(2, "sideways")), "belongs to no phase"),
    "a result that is no value": (text(results=[["loss", "loss", 10**9, 1]]), "is not a number from 0 on"),
    "an unknown result": (text(results=[["secret", "loss", 0, 1]]), "is not a kind of result"),
    "a negative shape": (text(shapes=lambda s: [[-3], *s[1:]]), "is not a number from 0 on"),
    "a list in place of a table": (lambda m: m.update({layout.TEXT: b"[]"}), "holds no table"),
    "half of the text": (member(layout.TEXT, lambda d: d[: len(d) // 2]), "cannot be read as a recording"),
    "a text that nests without end": (lambda m: m.update({layout.TEXT: b"[" * 10**6}), "cannot be read"),
    "fewer fingerprints": (member("prints.npy", lambda d: array(np.zeros((2, 7)))), "does not describe"),
    "a tolerance that is NaN": (
        member("tolerance.npy", lambda d: array(np.full(len(np.load(io.BytesIO(d))), np.nan))),
        "a tolerance is NaN",
    ),
    "texts in place of numbers": (member("limits.npy", lambda d: array(np.array(["a"]))), "holds no numbers"),
    "a pickle": (member("limits.npy", lambda d: array(np.array([Harm()], object))), "holds no numbers"),
    "a pickle as a member": (member("limits.npy", lambda d: pickle.dumps(Harm())), "magic string"),
    "a weight of another shape": (member("weight_0.npy", lambda d: array(np.ones(3))), "another shape"),
    "text for a framework": (text(framework="x" * 10**6), "is not one of jax, torch"),
    "an escape for a version": (
        text(format=99, made={"stablenum": "1\n\x1b[31m"}),
        "\\n\\x1b[31m",
    ),
    "no format at all": (lambda m: m.update({layout.TEXT: b"{}"}), "it lacks 'format'"),
    "a value of no size": (
        member("prints.npy", lambda d: array(np.load(io.BytesIO(d)) * [0, 0, 0, 0, 0, 0, 1])),
        "has no size",
    ),
    "a shape that is no shape": (
        member("limits.npy", lambda d: array(np.zeros(4)).replace(b"(4,), }  ", b"(-4,-1), ")),
        "cannot be read",
    ),
    "a missing member": (lambda m: m.__delitem__("errors.npy"), "errors.npy"),
    "a huge array in few bytes": (
        member("limits.npy", lambda d: array(np.zeros(4)).replace(b"(4,), }       ", b"(99999999,), }")),
        "fewer or more numbers than it says",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_recording_is_refused_in_one_sentence(
    name: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    change, said = BROKEN[name]
    members = members_of(whole)
    change(members)
    path = written(tmp_path / "broken.snum", members)
    with pytest.raises(ValueError, match=r"broken\.snum cannot be read as a recording: ") as info:
        stablenum.load_program(path)
    assert said in str(info.value)
    assert "\n" not in str(info.value)
    assert len(str(info.value)) < 400
    assert [p.name for p in tmp_path.iterdir()] == ["broken.snum"]  # nothing was run or written


def test_one_parameter_under_many_names_takes_memory_once(whole: Path, tmp_path: Path) -> None:
    members = members_of(whole)
    found = json.loads(members[layout.TEXT])
    (name, shape, _), rows = found["parameters"][0], found["values"]
    own = next(i for i, row in enumerate(rows) if row[1:] == ["parameter", name])
    for i in [i for i, row in enumerate(rows) if row[0] is None and i != own]:
        rows[i], found["shapes"][i] = [None, "parameter", name], shape
        found["arrays"] = [row for row in found["arrays"] if i not in row]
    members[layout.TEXT] = json.dumps(found).encode()
    read = stablenum.load_program(written(tmp_path / "many.snum", members))
    alike = [v.id for v in read.trace.values if v.name == name and v.id in read.arrays]
    assert len(alike) > 1
    assert len({id(read.arrays[v]) for v in alike}) == 1


@pytest.mark.parametrize("kind", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_an_archive_that_is_packed_otherwise_is_refused(whole: Path, tmp_path: Path, kind: int) -> None:
    path = tmp_path / "packed.snum"
    with zipfile.ZipFile(path, "w", kind) as archive:
        for name, data in members_of(whole).items():
            archive.writestr(name, data)
    with pytest.raises(ValueError, match="it is packed in a way that recordings are not"):
        stablenum.load_program(path)


def test_a_text_of_many_lists_is_refused(whole: Path, tmp_path: Path) -> None:
    members = members_of(whole)
    members[layout.TEXT] = b"[" + b"[]," * (layout._MOST_TEXT // 3) + b"[]]"
    with pytest.raises(ValueError, match="its text would take more than 32 MiB of memory"):
        stablenum.load_program(written(tmp_path / "lists.snum", members))


def test_weights_that_are_no_file_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "_WEIGHTS", 16)
    stablenum.save_program(in_torch(), tmp_path / "golden.snum")
    (weights,) = tmp_path.glob("*.weights")
    weights.unlink()
    weights.symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="beside it is not a file"):
        stablenum.load_program(tmp_path / "golden.snum")


def test_an_archive_that_unpacks_to_more_than_it_may_is_refused(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = members_of(whole)
    members["value_999999.npy"] = bytes(2**20)
    path = written(tmp_path / "bomb.snum", members)
    monkeypatch.setattr(layout.Archive.__init__, "__defaults__", (2**20,))
    with pytest.raises(ValueError, match="it would take more than 1 MiB of memory"):
        stablenum.load_program(path)


@pytest.mark.parametrize(
    "data", [b"", b"PK", b"\x89HDF\r\n", pickle.dumps(Harm()), b"{}", bytes(1000)], ids=range(6)
)
def test_what_is_no_archive_is_refused(data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "foreign.snum"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"foreign\.snum is not a recording: it is not a zip archive"):
        stablenum.load_program(path)
    assert len(list(tmp_path.iterdir())) == 1


def test_an_empty_archive_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "empty.snum", {"readme.txt": b"hello"})
    with pytest.raises(ValueError, match="it holds neither a program nor an array"):
        stablenum.load_program(path)


def test_a_file_that_is_not_there_or_a_folder_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        stablenum.load_program(tmp_path / "none.snum")
    with pytest.raises(IsADirectoryError):
        stablenum.load_program(tmp_path)
    with pytest.raises(TypeError, match="path must be a path"):
        stablenum.load_program(7)


@pytest.mark.slow
@hypothesis.given(at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture], max_examples=150)
def test_a_flipped_bit_is_refused_or_changes_nothing_that_matters(
    whole: Path, tmp_path: Path, at: float, bit: int
) -> None:
    data = bytearray(whole.read_bytes())
    data[int(at * len(data))] ^= 1 << bit
    path = tmp_path / "flipped.snum"
    path.write_bytes(bytes(data))
    try:
        read = stablenum.load_program(path)
    except ValueError as error:
        assert "flipped.snum" in str(error)  # noqa: PT017 - either is right
    else:  # a bit of what zip keeps beside the members, such as their dates
        assert len(getattr(read, "prints", getattr(read, "arrays", ()))) > 0


@pytest.mark.slow
@hypothesis.given(part=st.floats(0, 1, exclude_max=True))
@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture], max_examples=50)
def test_a_file_that_is_cut_off_is_refused(whole: Path, tmp_path: Path, part: float) -> None:
    path = tmp_path / "cut.snum"
    data = whole.read_bytes()
    path.write_bytes(data[: int(part * len(data))])
    with pytest.raises(ValueError, match=r"cut\.snum"):
        stablenum.load_program(path)


@pytest.mark.slow
@hypothesis.given(data=st.data())
@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture], max_examples=100)
def test_any_other_value_in_the_text_is_refused_or_read(whole: Path, tmp_path: Path, data: Any) -> None:
    """Values of the text are replaced by others; what is read can be compared, or says why not."""
    members = members_of(whole)
    found = json.loads(members[layout.TEXT])
    at: Any = found
    key: Any = data.draw(st.sampled_from(sorted(found)))
    while isinstance(at[key], list | dict) and at[key] and data.draw(st.booleans()):
        at = at[key]
        key = data.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
    at[key] = data.draw(
        st.one_of(
            st.none(),
            st.integers(-2, 3),
            st.just(10**30),
            st.floats(allow_nan=False, allow_infinity=False),
            st.text(max_size=3),
            st.lists(st.integers(-1, 2), max_size=2),
            st.just({}),
        )
    )
    members[layout.TEXT] = json.dumps(found).encode()
    path = written(tmp_path / "other.snum", members)
    try:
        read = stablenum.load_program(path)
        stablenum.diff(read, read)
    except (ValueError, stablenum.ProgramError) as error:
        assert str(error)  # noqa: PT017 - either is right
