"""What cannot be checked ends with exit code 2 and a message, never with a verdict and never with a crash."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from stablenum import cli
from stablenum.commands.verify import looking
from stablenum.commands.verify.looking import look_at
from stablenum.commands.verify.verdicts import Outcome
from tests.verifying import jax_states, torch_states

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning"
)
FILES = {
    ("torch", "torch"),
    ("torch", "legacy"),
    ("torch", "safetensors"),
    ("torch", "npz"),
    ("jax", "npz"),
    ("jax", "safetensors"),
}
FOLDERS = {
    ("torch", "dcp"),
    ("torch", "ours, torch"),
    ("torch", "ours, safetensors"),
    ("torch", "ours, dcp"),
    ("jax", "orbax"),
    ("jax", "orbax, files"),
    ("jax", "ours, npz"),
    ("jax", "ours, safetensors"),
    ("jax", "ours, orbax"),
}


def looked_at(path: Path) -> Outcome:
    (outcome,), _ = look_at(path)
    return outcome


def good(framework: str, format_name: str, folder: Path) -> Path:
    if framework == "torch":
        return torch_states.WRITERS[format_name](torch_states.trained("adamw"), folder)
    return jax_states.WRITERS[format_name](jax_states.started("adamw"), folder)


def assert_not_checked(path: Path, *words: str) -> None:
    outcome = looked_at(path)
    assert outcome.exit_code == 2, outcome
    assert outcome.word in words, outcome
    assert len(outcome.why) > 10, outcome


@pytest.mark.parametrize("kept", [0.02, 0.5, 0.99])
@pytest.mark.parametrize(("framework", "format_name"), sorted(FILES))
def test_a_truncated_file(framework, format_name, kept, tmp_path):
    path = good(framework, format_name, tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole))])
    assert_not_checked(path, "corrupt")


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.99])
@pytest.mark.parametrize(("framework", "format_name"), sorted(FOLDERS))
def test_a_folder_with_a_truncated_file(framework, format_name, kept, tmp_path):
    path = good(framework, format_name, tmp_path)
    largest = max((p for p in path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    whole = largest.read_bytes()
    largest.write_bytes(whole[: int(kept * len(whole))])
    assert_not_checked(path, "corrupt")


@pytest.mark.parametrize(("framework", "format_name"), sorted(FOLDERS))
def test_a_folder_from_which_a_file_is_missing(framework, format_name, tmp_path):
    path = good(framework, format_name, tmp_path)
    largest = max((p for p in path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    largest.unlink()
    assert_not_checked(path, "corrupt")


@pytest.mark.parametrize(
    ("framework", "format_name"),
    [pair for pair in sorted(FILES | FOLDERS) if pair[1] in ("torch", "npz", "dcp") or "ours" in pair[1]],
)
def test_a_flipped_bit_is_found_by_the_checksums_that_a_format_has(framework, format_name, tmp_path):
    path = good(framework, format_name, tmp_path)
    files = [p for p in (path, *path.rglob("*")) if p.is_file() and p.name != "manifest.json"]
    largest = max(files, key=lambda p: p.stat().st_size)
    changed = bytearray(largest.read_bytes())
    at = _inside_an_array(largest, changed)
    changed[at] ^= 0x04
    largest.write_bytes(changed)
    assert_not_checked(path, "corrupt")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize(
    "member",
    [
        np.arange(4096),
        np.arange(4096) % 2 == 0,
        np.full(512, "abcdefgh"),
        np.arange(3072, dtype="u1").view("V3"),
        np.zeros(512, [("a", "i4"), ("b", "i8")]),
        np.asfortranarray(np.arange(4096).reshape(64, 64)),
    ],
    ids=lambda member: str(member.dtype),
)
def test_a_flipped_bit_is_found_in_arrays_that_are_not_judged(save, member, tmp_path):
    path = tmp_path / "state.npz"
    save(path, w=np.ones(4, np.float32), member=member)
    assert looked_at(path).word == "good"
    with zipfile.ZipFile(path) as archive:
        size = archive.getinfo("member.npy").compress_size
        at = archive.getinfo("member.npy").header_offset
    content = bytearray(path.read_bytes())
    content[at + size * 2 // 3] ^= 4
    path.write_bytes(content)
    assert_not_checked(path, "corrupt")


def _inside_an_array(path: Path, content: bytearray) -> int:
    """A position that is part of the data, and not of the space between them."""
    start, end = 0, len(content)
    if path.suffix == ".distcp":
        for index, place in pickle.loads((path.parent / ".metadata").read_bytes()).storage_data.items():
            if index.fqn == "model.last.weight":
                start, end = place.offset, place.offset + place.length
    part = bytes(content[start:end])
    if not zipfile.is_zipfile(io.BytesIO(part)):
        return len(content) // 2
    with zipfile.ZipFile(io.BytesIO(part)) as archive:
        member = max(
            (m for m in archive.infolist() if "data.pkl" not in m.filename), key=lambda m: m.file_size
        )
    name = member.filename.encode()
    extra = int.from_bytes(part[member.header_offset + 28 : member.header_offset + 30], "little")
    return start + member.header_offset + 30 + len(name) + extra + member.file_size // 2


def test_a_changed_manifest(tmp_path):
    path = good("torch", "ours, torch", tmp_path)
    manifest = path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"step": 3', '"step": 4'))
    assert_not_checked(path, "corrupt")


def test_a_file_that_the_manifest_does_not_list(tmp_path):
    path = good("torch", "ours, torch", tmp_path)
    torch.save({"w": torch.ones(2)}, path / "more.pt")
    outcome = looked_at(path)
    assert (outcome.word, outcome.why) == ("corrupt", "more.pt is not in the manifest")


def test_a_hidden_file_of_a_file_manager_is_no_damage(tmp_path):
    path = good("torch", "ours, torch", tmp_path)
    (path / ".DS_Store").write_bytes(b"\0\0\0\1Bud1")
    assert looked_at(path).word == "good"


class NeedsCode:
    """An object that a checkpoint must not be able to make."""


def test_what_needs_code_is_not_run(tmp_path):
    torch.save({"model": {"w": torch.ones(2)}, "model_class": NeedsCode()}, tmp_path / "objects.pt")
    (tmp_path / "plain.pkl").write_bytes(pickle.dumps({"w": [1.0]}))
    np.savez(tmp_path / "objects.npz", a=np.array([NeedsCode()], dtype=object))
    for name, word in (("objects.pt", "NeedsCode"), ("plain.pkl", "pickle"), ("objects.npz", "objects")):
        outcome = looked_at(tmp_path / name)
        assert (outcome.exit_code, outcome.word) == (2, "unreadable")
        assert outcome.why.startswith("needs arbitrary code")
        assert word in outcome.why


class Bomb:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return (Path.touch, (self.target,))


@pytest.mark.parametrize("where", ["torch", "dcp metadata", "dcp value"])
def test_a_checkpoint_runs_no_code(where, tmp_path):
    target, folder = tmp_path / "ran", tmp_path / "dcp"
    bomb = Bomb(target)
    if where == "torch":
        path = tmp_path / "bomb.pt"
        torch.save({"w": torch.ones(2), "bomb": bomb}, path)
    else:
        path = torch_states.WRITERS["dcp"]({"w": torch.ones(2)}, tmp_path)
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        if where == "dcp metadata":
            metadata.planner_data = bomb
            (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        else:
            shutil.rmtree(folder)
            torch_states.WRITERS["dcp"]({"w": torch.ones(2), "bomb": bomb}, tmp_path)
    outcome = looked_at(path)
    assert (outcome.exit_code, outcome.word) == (2, "unreadable"), outcome
    assert not target.exists()
    pickle.loads(pickle.dumps(bomb))
    assert target.exists(), "the bomb itself works"


def test_what_is_something_else(tmp_path):
    (tmp_path / "empty.pt").touch()
    (tmp_path / "text.txt").write_text("these are words")
    (tmp_path / "number.bin").write_bytes(b"\x01")
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("a.txt", "text")
    with zipfile.ZipFile(tmp_path / "nothing.zip", "w"):
        pass
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("no checkpoint")
    (tmp_path / "empty folder").mkdir()
    torch.save("a word", tmp_path / "word.pt")
    torch.save([object], tmp_path / "class.pt")
    for name in ("empty.pt", "text.txt", "number.bin", "other.zip", "nothing.zip", "folder", "empty folder"):
        assert_not_checked(tmp_path / name, "unknown")
    assert_not_checked(tmp_path / "class.pt", "unreadable", "unknown")


def test_a_torch_file_of_numbers_alone_is_judged_and_an_empty_one_is_not(tmp_path):
    torch.save({"step": 3, "lr": 0.1}, tmp_path / "numbers.pt")
    torch.save({}, tmp_path / "empty.pt")
    assert looked_at(tmp_path / "numbers.pt").exit_code == 0
    assert_not_checked(tmp_path / "empty.pt", "unknown")


@pytest.mark.parametrize(
    ("header", "word"),
    [
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "should have 8 bytes"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}, "should begin at byte 0"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, "have 4 bytes, the file has 8"),
        ({"a": {"dtype": "F32", "shape": "x", "data_offsets": [0, 8]}}, "does not describe arrays"),
        ({"a": 3}, "does not describe arrays"),
        ([1, 2], "does not describe|not a JSON object"),
    ],
)
def test_a_safetensors_header_that_does_not_fit_its_file(header, word, tmp_path):
    text = json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    outcome = looked_at(path)
    assert outcome.exit_code == 2
    if isinstance(header, dict):
        assert word in outcome.why


def test_an_interrupted_save(tmp_path):
    dcp = torch_states.WRITERS["dcp"](torch_states.trained("adamw"), tmp_path)
    (dcp / ".metadata").unlink()
    assert_not_checked(dcp, "corrupt")
    orbax = jax_states.WRITERS["orbax"](jax_states.started("adamw"), tmp_path)
    temporary = orbax.rename(f"{orbax}.orbax-checkpoint-tmp-1")
    assert_not_checked(temporary, "corrupt")


@pytest.mark.parametrize("scale", [0.0, -1.0, 2.0**101])
def test_a_guard_whose_loss_scale_no_guard_would_load(scale, tmp_path):
    step = jax_states.WRITERS["orbax, manager"](jax_states.started("guarded"), tmp_path)
    (file,) = step.rglob("guard.json")
    plain = json.loads(file.read_text(encoding="utf-8"))
    plain["state"]["loss_scale"]["scale"] = scale
    file.write_text(json.dumps(plain), encoding="utf-8")
    assert_not_checked(step, "corrupt")
    assert "state.loss_scale.scale" in looked_at(step).why


def test_a_file_that_may_not_be_read(tmp_path, monkeypatch):
    path = good("torch", "torch", tmp_path)

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    outcome = looked_at(path)
    assert (outcome.word, outcome.why) == ("unreadable", "Permission denied")


def test_an_error_that_nobody_foresaw_is_no_verdict(tmp_path, monkeypatch):
    path = good("torch", "safetensors", tmp_path)
    monkeypatch.setattr("stablenum.commands.verify.looking.judged", lambda *_, **__: 1 / 0)
    outcome = looked_at(path)
    assert (outcome.exit_code, outcome.word) == (2, "unreadable")
    assert "ZeroDivisionError" in outcome.why


def test_a_path_that_does_not_exist():
    result = CliRunner().invoke(cli.app("verify", "diff"), ["verify", "/nowhere/at/all"])
    assert result.exit_code == 2
    assert "there is no file or folder '/nowhere/at/all'" in result.output


SHORTENED: dict[str, Callable[[Path, dict[str, torch.Tensor]], object]] = {
    "torch": lambda path, tensors: torch.save(tensors, path),
    "safetensors": lambda path, tensors: save_file(tensors, path),
    "npz": lambda path, tensors: np.savez(path, **{name: t.numpy() for name, t in tensors.items()}),
}


@pytest.mark.parametrize("kind", SHORTENED)
def test_a_file_that_is_shortened_while_it_is_read_is_damaged(kind, tmp_path, monkeypatch):
    """As by a training that saves under the same name. If it were mapped, that would end this process."""
    path = tmp_path / "x.npz"
    SHORTENED[kind](path, {name: torch.full((300_000,), 2.0) for name in "abc"})
    assert look_at(path)[0][0].word == "good"
    read = looking._READERS[kind]

    def shortened(*given):
        contents = read(*given)
        os.truncate(path, 5000)
        return contents

    monkeypatch.setattr(looking, "_READERS", {**looking._READERS, kind: shortened})
    assert look_at(path)[0][0].word in ("corrupt", "unreadable")
