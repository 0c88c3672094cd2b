"""Files that claim more than they hold, call what they should not, or hide what is wrong."""

from __future__ import annotations

import collections
import io
import json
import math
import os
import pathlib
import pickle
import signal
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.distributed import checkpoint
from torch.distributed.checkpoint import metadata
from typer.testing import CliRunner

import stablenum_torch
from stablenum import CheckpointError, cli
from stablenum.checkpoints.manifest import FileRecord, Manifest
from stablenum.commands.verify import counts
from stablenum.commands.verify.formats import numpy_files
from stablenum.commands.verify.limits import Limits
from stablenum.commands.verify.looking import look_at
from stablenum.commands.verify.verdicts import Outcome
from tests.verifying import jax_states

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning"
)
NAN = math.nan


@pytest.fixture(autouse=True)
def ends() -> Iterator[None]:
    """End a test that would run for ever; the slowest takes a second."""

    def stop(*_: object) -> None:
        pytest.exit("it does not end")  # which no reader catches

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def seen(path: Path, **limits: int) -> Outcome:
    (outcome,), _ = look_at(path, limits=Limits(**limits))
    return outcome


def saved(tmp_path: Path, state: Any) -> Path:
    torch.save(state, tmp_path / "x.pt")
    return tmp_path / "x.pt"


# --- good means looked at ----------------------------------------------------------------------------------


def guard_state() -> dict[str, Any]:
    weight = torch.nn.Parameter(torch.ones(2))
    return stablenum_torch.wrap(torch.optim.SGD([weight], 0.1), loss_scale="dynamic").guard_state_dict()


@pytest.mark.parametrize("beside", [{}, {"version": 1}, {"names_id": 3}, {"names": ["w"], "version": 1}])
@pytest.mark.parametrize("place", [(), ("training",), ("a", "b")])
def test_a_guards_state_hides_nothing_beside_it(beside, place, tmp_path):
    state: Any = {"model": {"w": torch.full((3,), NAN)}, "guard": guard_state()["state"], **beside}
    for key in reversed(place):
        state = {key: state}
    outcome = seen(saved(tmp_path, state))
    assert [p.name for p in outcome.verdict.poison] == [".".join((*place, "model", "w"))]


@pytest.mark.parametrize("where", [(), ("recorder",), ("loss_scale",), ("clip", "0"), ("spike",)])
def test_a_guards_state_covers_the_fields_that_it_has(where, tmp_path):
    inside = state = guard_state()["state"] | {"clip": {"0": {}}, "spike": {}}
    for key in where:
        inside = inside[key]
    inside["kernel"] = torch.full((2,), NAN)
    outcome = seen(saved(tmp_path, {"guard": state, "x": torch.ones(1)}))
    assert [p.name.rpartition(".")[2] for p in outcome.verdict.poison] == ["kernel"]


def test_a_number_under_the_name_of_the_guard_is_judged(tmp_path):
    assert seen(saved(tmp_path, {"stablenum": {"loss": NAN}, "x": torch.ones(1)})).word == "poisoned"


@pytest.mark.parametrize(
    "value",
    [
        complex(NAN, 0),
        {1.0, NAN},
        frozenset((NAN,)),
        (1, [NAN]),
        np.float64(NAN),
        np.complex128(complex(0, NAN)),
        np.asarray([(1, NAN)], [("a", "i4"), ("b", "f4")]),
        np.asarray([(1, [1, NAN])], [("a", "i4"), ("b", "f4", 2)]),
        torch.tensor([complex(1, NAN)]),
        torch.tensor([1.0, NAN]).to_sparse(),
        torch.tensor(NAN).expand(3, 4),
        torch.tensor([1.0, NAN, 2.0]).unfold(0, 2, 1),
        torch.tensor([1.0, NAN]).to(torch.float8_e5m2),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_kind_of_number_is_looked_at(value, tmp_path):
    with np.errstate(all="ignore"):
        assert seen(saved(tmp_path, {"x": value, "y": torch.ones(1)})).word == "poisoned"


def test_structured_arrays_of_numpy(tmp_path):
    values = np.zeros(3, [("count", "i4"), ("inner", [("w", "f4", (2,)), ("z", "c8")])])
    values["inner"]["w"][1, 1] = NAN
    np.savez(tmp_path / "a.npz", x=values)
    np.save(tmp_path / "a.npy", values)
    for name, path in (("x", "a.npz"), ("a", "a.npy")):
        (poison,) = seen(tmp_path / path).verdict.poison
        assert (poison.name, poison.first) == (f"{name}.inner.w", (1, 1))


@pytest.mark.parametrize(
    "state", [{"x": torch.ones(0)}, {"x": torch.ones(3, dtype=torch.int8)}, {"x": "text", "n": 3}]
)
def test_nothing_judged_is_not_good(state, tmp_path):
    outcome = seen(saved(tmp_path, state))
    assert (outcome.exit_code, outcome.word) == (2, "unknown")
    assert "nothing in it was judged" in outcome.why


def test_what_was_judged_is_counted(tmp_path):
    path = saved(tmp_path, {"w": torch.ones(3), "lr": 0.1, "guard": guard_state()["state"]})
    result = CliRunner().invoke(cli.app("verify", "report"), ["verify", str(path)])
    assert "1 array, 3 floating-point numbers and" in result.output
    assert "of a guard" not in result.output
    assert "in it were not judged" in " ".join(result.output.split())


# --- readers never change the process ----------------------------------------------------------------------


NAMES = [
    "pathlib PosixPath", "collections OrderedDict", "torch Size", "torch float32",
    "torch.serialization _get_layout", "builtins getattr",
    *(f"torch.distributed.checkpoint.metadata {name}" for name in (
        "Metadata", "MetadataIndex", "TensorProperties", "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING"
    )),
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "state", [b"}X\x06\x00\x00\x00is_dirX\x01\x00\x00\x00xs", b"}X\x05\x00\x00\x00_madeNs"]
)
def test_metadata_set_nothing(name, state, tmp_path):
    module, attribute = name.split()
    found = getattr(__import__(module, fromlist=["x"]), attribute)
    before = dict(getattr(found, "__dict__", {}))
    named = b"\x80\x02c" + name.replace(" ", "\n").encode() + b"\n"
    slots, made = b"N" + state + b"\x86b.", named + b")\x81"
    for payload in (named + slots, named + state + b"b.", made + state + b"b.", made + slots):
        (tmp_path / ".metadata").write_bytes(payload)
        assert seen(tmp_path).exit_code == 2
    assert dict(getattr(found, "__dict__", {})) == before
    assert Path.is_dir is pathlib.Path.is_dir
    assert callable(Path.is_dir)


def test_metadata_of_torch_are_read(tmp_path):
    state = {"model": {"w": torch.tensor([1.0, NAN])}, "lr": 0.1, "step": 3, "betas": (0.9, 0.99)}
    checkpoint.save(state, checkpoint_id=tmp_path / "dcp")
    outcome = seen(tmp_path / "dcp")
    assert [p.name for p in outcome.verdict.poison] == ["model.w"]
    assert outcome.verdict.elements == 2
    assert outcome.verdict.numbers == 3


# --- work in proportion to the file ------------------------------------------------------------------------


def doubled(depth: int = 60) -> list[Any]:
    value: list[Any] = [torch.ones(2)]
    for _ in range(depth):
        value = [value, value]
    return value


def endless() -> list[Any]:
    value: list[Any] = [torch.ones(1)]
    value.append(value)
    return value


def nested(depth: int) -> list[Any]:
    value: list[Any] = [torch.ones(1)]
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("make", "elements"),
    [
        (doubled, 4),
        (endless, 1),
        (lambda: torch.tensor(1.0).expand(2**40), 1),
        (lambda: torch.ones(3).expand(2**38, 3), 3),
        (lambda: torch.ones(2**12).as_strided((2**11, 2**11), (1, 1)), 2**12 - 1),
        (lambda: [torch.ones(2**12)[:1].expand(2**40)] * 10_000, 10_000),
        (lambda: {f"{i}": torch.ones(1) for i in range(3)} | {".".join("a" * 20_000): torch.ones(1)}, 4),
        (lambda: {"/".join("b" * 200) + str(i): torch.ones(1) for i in range(300)}, 300),
    ],
    ids=["doubled", "endless", "expanded", "rows", "windows", "many", "dots", "paths"],
)
def test_what_a_file_repeats_is_read_once(make, elements, tmp_path):
    outcome = seen(saved(tmp_path, make()))
    assert (outcome.word, outcome.verdict.elements) == ("good", elements), outcome


def small_archive(path: Path, arrays: dict[str, Any]) -> Path:
    np.savez_compressed(path, **arrays)
    return path


@pytest.mark.parametrize(
    ("make", "limit"),
    [
        (lambda p: saved(p, nested(300)), "depth"),
        (lambda p: saved(p, [0.0] * 3000), "parts"),
        (lambda p: small_archive(p / "x.npz", {"x": np.zeros(2**18)}), "unpacked"),
        (lambda p: repacked(saved(p, torch.zeros(2**18))), "unpacked"),
        (lambda p: claimed_zarr(p), "unpacked"),
    ],
    ids=["depth", "parts", "npz", "pt", "orbax"],
)
def test_a_limit_is_named_and_can_be_raised(make, limit, tmp_path):
    path = make(tmp_path)
    usual = {"parts": 1000, "unpacked": 2**20, "ratio": 64}
    outcome = seen(path, **usual)
    assert (outcome.word, outcome.exit_code) == ("unreadable", 2)
    assert f"--limit {limit}=NUMBER" in outcome.why
    result = CliRunner().invoke(
        cli.app("verify", "report"), ["verify", str(path), "--limit", f"{limit}={10**9}"]
    )
    assert result.exit_code == 0, result.output


def repacked(path: Path) -> Path:
    """Return the archive with its parts deflated."""
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in parts.items():
            archive.writestr(name, data)
    return path


PACKED = {"deflate": zipfile.ZIP_DEFLATED, "bz2": zipfile.ZIP_BZIP2, "lzma": zipfile.ZIP_LZMA}
LARGE = 2**23  # float32 numbers, 32 MiB


@pytest.fixture(scope="module", params=PACKED)
def packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive of a large array, whose columns come first, with one NaN."""
    values = np.zeros((8, LARGE // 8), np.float32, order="F")
    values[3, 5] = np.nan
    content, path = io.BytesIO(), tmp_path_factory.mktemp("packed") / "large.npz"
    np.save(content, values)
    with zipfile.ZipFile(path, "w", PACKED[request.param]) as archive:
        archive.writestr("w.npy", content.getvalue())
    return path


def seen_in_little_memory(path: Path) -> Outcome:
    tracemalloc.start()
    try:
        outcome = seen(path)
        # Half the array: the dictionary of lzma has 8 MiB.
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()
    return outcome


def test_what_is_packed_is_unpacked_in_blocks(packed):
    outcome = seen_in_little_memory(packed)
    assert outcome.word == "poisoned", outcome.why
    (poison,) = outcome.verdict.poison
    assert (poison.nan, poison.size, poison.first) == (1, LARGE, (3, 5))


def test_a_member_is_not_unpacked_beyond_the_size_that_it_gives(packed, tmp_path):
    path = tmp_path / "lie.npz"
    header = io.BytesIO()
    np.save(header, np.zeros(16, np.float32))
    with zipfile.ZipFile(path, "w") as archive, zipfile.ZipFile(packed) as of:
        kind = of.infolist()[0].compress_type
        archive.writestr("w.npy", header.getvalue() + bytes(2**25), compress_type=kind)
        archive.infolist()[0].file_size = len(header.getvalue())
    outcome = seen_in_little_memory(path)
    assert (outcome.word, "more than the" in outcome.why) == ("corrupt", True)


@pytest.mark.parametrize("kind", PACKED)
def test_a_storage_of_torch_is_not_unpacked_beyond_the_size_that_it_gives(kind, tmp_path):
    path, content = tmp_path / "lie.pt", io.BytesIO()
    torch.save({"w": torch.zeros(4)}, content)
    with zipfile.ZipFile(path, "w") as archive, zipfile.ZipFile(content) as of:
        for member in of.infolist():
            storage = member.filename.endswith("data/0")
            data = bytes(2**25) if storage else of.read(member)
            archive.writestr(member.filename, data, PACKED[kind] if storage else zipfile.ZIP_STORED)
            archive.infolist()[-1].file_size = member.file_size
    assert seen_in_little_memory(path).word == "corrupt"


@pytest.mark.parametrize("kind", PACKED)
def test_a_packed_storage_of_torch_is_read(kind, tmp_path):
    path, content = tmp_path / "packed.pt", io.BytesIO()
    torch.save({"w": torch.tensor([1.0, float("nan")])}, content)
    with zipfile.ZipFile(path, "w", PACKED[kind]) as archive, zipfile.ZipFile(content) as of:
        for member in of.infolist():
            archive.writestr(member.filename, of.read(member))
    (poison,) = seen(path).verdict.poison
    assert (poison.nan, poison.first) == (1, (1,))


def test_a_structured_array_is_unpacked_once_for_all_its_fields(tmp_path, monkeypatch):
    path, made = tmp_path / "fields.npz", []
    np.savez_compressed(path, w=np.zeros(100, [(f"f{i}", "f4") for i in range(50)]))
    begin = numpy_files.Unpacked.__init__
    monkeypatch.setattr(
        numpy_files.Unpacked, "__init__", lambda self, *of: (made.append(of), begin(self, *of))[1]
    )
    outcome = seen(path)
    assert (outcome.word, outcome.verdict.elements) == ("good", 5000)
    assert len(made) == 2  # for the header, and for the fields


def _truncating(path: Path) -> Callable[[Any], Any]:
    """Return what makes the file shorter at the second block that is counted."""
    blocks, widened = [], counts.widened

    def truncating(block: Any) -> Any:
        blocks.append(len(block))
        if len(blocks) == 2:
            os.truncate(path, path.stat().st_size // 4)
        return widened(block)

    return truncating


@pytest.mark.parametrize("form", ["safetensors", "npy", "npz"])
def test_a_file_that_becomes_shorter_while_it_is_read(form, tmp_path, monkeypatch):
    path = tmp_path / f"large.{form}"
    large = np.zeros(2**21, np.float32)
    if form == "safetensors":
        save_file({"a": torch.zeros(2**10), "w": torch.from_numpy(large)}, path)
    elif form == "npz":
        np.savez(path, w=large, b=large)
    else:
        np.save(path, large)
    monkeypatch.setattr(counts, "widened", _truncating(path))
    outcome = seen(path)
    assert (outcome.word, outcome.exit_code) == ("corrupt", 2)


def claimed_zarr(folder: Path) -> Path:
    """A checkpoint of Orbax with an array of zeros, which take no room in its files."""
    ocp = pytest.importorskip("orbax.checkpoint")
    path = folder / "orbax"
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave({"w": np.zeros(2**19), "x": np.ones(1)}))
    return path


@pytest.mark.parametrize("text", ["depth", "depth=x", "deep=3", "depth=-1", "depth=" + "9" * 30])
def test_limits_that_are_none(text, tmp_path):
    result = CliRunner().invoke(cli.app("verify", "report"), ["verify", str(tmp_path), "--limit", text])
    assert (result.exit_code, "a limit must be NAME=NUMBER" in " ".join(result.output.split())) == (2, True)


def test_a_header_that_claims_more_than_the_file(tmp_path):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (2**40,)})
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("x.npy", header.getvalue())
    (tmp_path / "x.npy").write_bytes(header.getvalue())
    for name in ("x.npz", "x.npy"):
        assert seen(tmp_path / name).word == "corrupt"


def test_metadata_that_claim_more_than_the_files(tmp_path):
    checkpoint.save({"w": torch.ones(4)}, checkpoint_id=tmp_path)
    found = pickle.loads((tmp_path / ".metadata").read_bytes())
    described = found.state_dict_metadata["w"]
    for size, chunks in (
        ((2**40,), described.chunks),
        ((2**40,), [metadata.ChunkStorageMetadata(torch.Size([0]), torch.Size([2**40]))]),
        ((4 * 10**5,), described.chunks * 10**5),
    ):
        found.state_dict_metadata["w"] = metadata.TensorStorageMetadata(
            described.properties, torch.Size(size), chunks
        )
        (tmp_path / ".metadata").write_bytes(pickle.dumps(found))
        assert seen(tmp_path).exit_code == 2


def test_what_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "x.pt")
    (tmp_path / "loop").symlink_to(tmp_path)
    for i in range(40):
        (tmp_path / f"again{i}").symlink_to(tmp_path)
    assert "a pipe" in seen(tmp_path / "x.pt").why
    assert seen(tmp_path).why == "there is no checkpoint in it"
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    outcomes, _ = look_at(tmp_path)
    assert [Path(outcome.path).name for outcome in outcomes] == ["a.pt"]


@pytest.mark.parametrize(
    ("form", "names"),
    [
        ("orbax", ["manifest.ocdbt", "_sharding", "d/more", "linked"]),
        ("distributed", ["__0_0.distcp", "more"]),
        ("ours", ["state.pt", "more"]),
    ],
)
def test_a_folder_in_which_something_is_no_file(form, names, tmp_path):
    if form == "orbax":
        folder = jax_states.WRITERS["orbax"](jax_states.started("adamw"), tmp_path)
    elif form == "distributed":
        checkpoint.save({"w": torch.ones(2)}, checkpoint_id=str(folder := tmp_path / "dcp"))
    else:
        folder = stablenum_torch.Checkpoints(tmp_path).save(1, {"model": torch.nn.Linear(2, 1)})
    assert seen(folder).word == "good"
    for name in names:
        path = folder / name
        before = path.read_bytes() if path.exists() else None
        path.unlink(missing_ok=True)
        if name == "linked":
            path.symlink_to("/dev/zero")
        else:
            path.parent.mkdir(exist_ok=True)
            os.mkfifo(path)
        outcome = seen(folder)
        assert (outcome.exit_code, f"{name} in it is neither a file" in outcome.why) == (2, True), outcome
        path.unlink()
        if before is not None:
            path.write_bytes(before)
    assert seen(folder).word == "good"


@pytest.mark.parametrize("name", ["/dev/zero", "../x", "a/../../x", "fifo", "link"])
def test_a_manifest_names_files_of_its_folder(name, tmp_path):
    folder = tmp_path / "step-000000001"
    folder.mkdir()
    (tmp_path / "x").write_bytes(b"")
    os.mkfifo(folder / "fifo")
    (folder / "link").symlink_to("/dev/zero")
    empty = FileRecord(0, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855")
    Manifest(
        step=1, serial=1, format="torch", confirmed=True, time="", versions={}, files={name: empty}
    ).write(folder)
    assert seen(folder).exit_code == 2
    with pytest.raises(CheckpointError):
        stablenum_torch.Checkpoints(tmp_path).load({"w": torch.ones(1)})


def test_a_deep_header_of_safetensors(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"w": torch.ones(1)}, path)
    for header in (
        b'{"a":' * 50_000,
        json.dumps({"w": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}).encode(),
        json.dumps({"w": {"dtype": "F32", "shape": [1] * 70, "data_offsets": [0, 4]}}).encode(),
        json.dumps({"w": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}).encode(),
        json.dumps({"__metadata__": 3, "w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode(),
    ):
        path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
        assert seen(path).word == "corrupt"


def test_shared_settings_are_seen_in_every_group(tmp_path):
    """A small container that several others share, as a default of an optimizer, is shown in each of them."""
    groups = [{"params": [i], "betas": (0.9, 0.999)} for i in range(2)]
    groups[1]["betas"] = groups[0]["betas"]
    state = collections.OrderedDict(optimizer={"state": {}, "param_groups": groups}, w=torch.ones(1))
    assert seen(saved(tmp_path, state)).verdict.numbers == 4
