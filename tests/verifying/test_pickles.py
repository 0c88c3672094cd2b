"""Pickles that abuse what they are read with: torch files, and the parts of distributed checkpoints."""

from __future__ import annotations

import collections
import io
import math
import pickle
import struct
import tracemalloc
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint import metadata

import stablenum_torch
from stablenum.commands.verify.limits import Limits
from stablenum.commands.verify.looking import look_at
from stablenum.commands.verify.verdicts import Outcome

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning"
)
NAN = math.nan
ONE = b"G" + struct.pack(">d", 1.0)


def seen(path: Path, **limits: int) -> Outcome:
    (outcome,), _ = look_at(path, limits=Limits(**limits))
    return outcome


def saved(tmp_path: Path, state: Any, **options: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(state, tmp_path / "x.pt", **options)
    return tmp_path / "x.pt"


def packed(tmp_path: Path, pickled: bytes, *more: tuple[str, bytes]) -> Path:
    """A torch file with this pickle, and a NaN if it is read to its end."""
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        for name, data in (("x/data.pkl", pickled), ("x/version", b"3\n"), *more):
            archive.writestr(name, data)
    return tmp_path / "x.pt"


def poisoned(outcome: Outcome) -> list[str]:
    return [p.name for p in outcome.verdict.poison] if outcome.verdict else [outcome.why]


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


# --- NumPy -------------------------------------------------------------------------------------------------

DTYPE = b"cnumpy\ndtype\n"
OBJECT = DTYPE + text("O") + b"\x85R"
BYTES = b"c_codecs\nencode\n" + text("A" * 8) + text("latin1") + b"\x86R"
VOID = DTYPE + text("V8") + b"\x89\x88\x87R"
FIELDS = (
    b"(K\x03" + text("|") + b"N" + text("a") + b"\x85}" + text("a") + OBJECT + b"K\x00\x86sK\x08K\x01K\x00tb"
)
INNER = b"(K\x03" + text("|") + OBJECT + b"K\x01\x85\x86" + b"NNK\x08K\x01K\x00tb"
MULTIARRAY = b"cnumpy._core.multiarray\n"
MADE = MULTIARRAY + b"_reconstruct\ncnumpy\nndarray\n"


@pytest.mark.parametrize(
    "value",
    [
        MULTIARRAY + b"scalar\n" + VOID + FIELDS + BYTES + b"\x86R",
        MULTIARRAY + b"scalar\n" + VOID + INNER + BYTES + b"\x86R",
        MULTIARRAY + b"scalar\n" + DTYPE + text("O,f8") + b"\x85R" + BYTES + b"\x86R",
        MADE + b"K\x00\x85" + text("b") + b"\x87R(K\x01K\x01\x85" + VOID + FIELDS + b"\x89" + BYTES + b"tb",
        MADE
        + b"K\x00\x85"
        + text("b")
        + b"\x87R(K\x01K\x64\x85"
        + DTYPE
        + text("f8")
        + b"\x85R\x89"
        + BYTES
        + b"tb",
        MADE + b"\x8a\x05\x00\x00\x00\x10\x00\x85" + text("O") + b"\x87R",
    ],
    ids=["fields of objects", "array of objects", "text", "array", "too short", "large"],
)
def test_a_dtype_of_numpy_makes_no_addresses_of_bytes(value, tmp_path):
    path = packed(tmp_path, b"\x80\x02}" + text("w") + value + b"s" + text("b") + ONE + b"s.")
    tracemalloc.start()
    assert seen(path).word == "corrupt"
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6.0).reshape(2, 3).T,
        np.arange(3, dtype=">f4"),
        np.zeros((0, 3)),
        np.array([], "U3"),
        np.array(["2020"], "M8[Y]"),
        np.array(["a", 1.0], object),
        np.array([(1, "a")], [("a", "i8"), ("b", "U1")]),
        np.int64(3),
        np.bool_(True),
    ],
    ids=repr,
)
def test_arrays_of_numpy_are_read(value, tmp_path):
    assert seen(saved(tmp_path, {"x": value, "w": torch.ones(1)})).word == "good"


def test_the_objects_of_an_array_are_looked_at(tmp_path):
    assert poisoned(seen(saved(tmp_path, {"x": np.array(["a", NAN], object)}))) == ["x.1"]


# --- what is asked for -------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["x.pt", ".metadata"])
@pytest.mark.parametrize(
    "pickled",
    [
        b"Nr" + struct.pack("<I", 2**27) + b".",
        b"\x96" + struct.pack("<Q", 2**27) + b"x.",
        b"\x8e" + struct.pack("<Q", 2**27) + b"x.",
        b"cbuiltins\nbytearray\nJ" + struct.pack("<i", 2**27) + b"\x85R.",
    ],
    ids=["memo", "bytearray", "bytes", "call"],
)
def test_what_a_pickle_claims_is_not_reserved(pickled, place, tmp_path):
    path = packed(tmp_path, b"\x80\x02" + pickled)
    if place == ".metadata":
        path = tmp_path / "dcp"
        path.mkdir()
        (path / place).write_bytes(b"\x80\x02" + pickled)
    seen(path)  # imports are no part of it
    tracemalloc.start()
    assert seen(path).exit_code == 2
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()


def test_what_a_pickle_makes_again_and_again_is_limited(tmp_path):
    call = b"h\x00" + b"h\x01" + text("latin1") + b"\x86R"
    path = packed(
        tmp_path,
        b"\x80\x02c_codecs\nencode\nq\x000" + text("a" * 2**14) + b"q\x010](" + call * 2000 + ONE + b"e.",
    )
    assert "--limit unpacked" in seen(path, unpacked=2**20, ratio=1).why
    assert seen(path).word == "good"


def shared(levels: int) -> bytes:
    """A tuple whose parts are shared: the time to hash or print it doubles with each level."""
    return b"K\x01q\x00" + b"0h\x00h\x00\x86q\x00" * levels


@pytest.mark.parametrize("levels", [40, 20_000], ids=["shared", "deep"])
@pytest.mark.parametrize(
    "pickled",
    [
        b"}%sK\x01s.",
        b"c__builtin__\nset\n](%se\x85R.",
        b"c__builtin__\nfrozenset\n](%se\x85R.",
        b"ccollections\nCounter\n}%sK\x01s\x85R.",
        b"ccollections\nOrderedDict\n](%sK\x01\x86e\x85R.",
        b"\x8f(%s\x90.",
        b"(%s\x91.",
        b"cpathlib\nPosixPath\n%s\x85R.",
        b"%s)R.",
        b"%sQ.",
        b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\n%sX\x03\x00\x00\x00cpuK\x01tQ.",
        b"ctorch\nSize\n%s\x85R.",
        b"ctorch\ndevice\n%s\x85R.",
        b"%s}b.",
    ],
    ids=[
        "dict",
        "set",
        "frozenset",
        "counter",
        "ordered",
        "set4",
        "frozenset4",
        "path",
        "call",
        "id",
        "storage",
        "size",
        "device",
        "state",
    ],
)
def test_tuples_that_share_their_parts_take_no_time(pickled, levels, tmp_path):
    outcome = seen(packed(tmp_path, b"\x80\x04" + pickled.replace(b"%s", shared(levels))))
    assert outcome.exit_code == 2, outcome
    folder = tmp_path / "dcp"
    folder.mkdir()
    (folder / ".metadata").write_bytes(b"\x80\x04" + pickled.replace(b"%s", shared(levels)))
    assert seen(folder).exit_code == 2


def test_small_tuples_are_keys(tmp_path):
    assert poisoned(seen(saved(tmp_path, {(1, ("a", 2)): NAN, "w": torch.ones(1)}))) == ["(1, ('a', 2))"]


def test_names_that_repeat_long_keys_are_limited(tmp_path):
    """In the file a key is there once; in the names it is there for every leaf, and for every level."""
    inner: Any = {f"{i}": 1.0 for i in range(300)}
    for _ in range(50):
        inner = {"k" * 1000: inner}
    path = saved(tmp_path, inner)
    assert "--limit description" in seen(path, description=2**23).why
    assert seen(path).word == "good"


@pytest.mark.parametrize("bad", [None, NAN, math.inf])
@pytest.mark.parametrize(
    "values", [list(range(200)), [0.5] * 200, [1, 0.5] * 100], ids=["int", "float", "both"]
)
def test_a_long_list_of_numbers_is_judged_as_one(values, bad, tmp_path, monkeypatch):
    """What is not finite in it is named, and judged as it is in a short list."""
    state = {"x": values if bad is None else [*values[:5], bad, *values[6:]], "w": torch.ones(1)}
    short = seen(saved(tmp_path, state))
    monkeypatch.setattr("stablenum.commands.verify.leaves._LONG", 100)
    long = seen(saved(tmp_path, state))
    assert (long.word, poisoned(long)) == (short.word, poisoned(short))
    assert poisoned(long) == (["x.5"] if bad is NAN else [])
    one = bad is None and len(set(map(type, values))) == 1
    assert long.verdict.entries == (2 if one else 1)


def test_dtypes_that_share_their_fields_take_no_time(tmp_path):
    nested = DTYPE + text("f8") + b"\x85Rq\x00"
    names = text("a") + text("b") + b"\x86"
    for _ in range(40):
        fields = b"}" + b"".join(text(name) + b"h\x00K\x00\x86s" for name in "ab")
        nested += b"0" + VOID + b"(K\x03" + text("|") + b"N" + names + fields + b"K\x08K\x01K\x00tbq\x00"
    path = packed(tmp_path, b"\x80\x02}" + text("w") + MULTIARRAY + b"scalar\n" + nested + BYTES + b"\x86Rs.")
    assert "fields" in seen(path).why


@pytest.mark.parametrize(
    "again",
    [
        DTYPE
        + text("f8")
        + b"\x85R(K\x03"
        + text("<")
        + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tq\x00bh\x00b",
        b"ctorch\nSize\n(" + b"K\x01" * 65 + b"t\x85R",
    ],
    ids=["states", "dimensions"],
)
def test_what_would_be_gone_through_again_and_again_is_small(again, tmp_path):
    assert seen(packed(tmp_path, b"\x80\x02(" + again + ONE + b"t.")).word == "corrupt"


# --- what is hidden ----------------------------------------------------------------------------------------


def with_attribute(value: Any, name: str, attribute: Any) -> Any:
    setattr(value, name, attribute)
    return value


@pytest.mark.parametrize(
    "value",
    [
        with_attribute(torch.ones(3), "scale", torch.tensor([NAN])),
        with_attribute(torch.nn.Parameter(torch.ones(3)), "scale", torch.tensor([NAN])),
        with_attribute(torch.ones(3), "scale", {"a": [1.0, NAN]}),
        with_attribute(collections.OrderedDict(w=torch.ones(1)), "scale", NAN),
    ],
    ids=["tensor", "parameter", "dict", "ordered"],
)
def test_attributes_are_looked_at(value, tmp_path):
    (name,) = poisoned(seen(saved(tmp_path, {"x": value})))
    assert name.startswith("x.scale")


@pytest.mark.parametrize("name", ["detach", "numel", "narrow", "as_strided", "contiguous", "numpy"])
def test_an_attribute_shadows_no_method(name, tmp_path):
    value = with_attribute(torch.full((3,), NAN), name, torch.Tensor)
    assert poisoned(seen(saved(tmp_path, {"w": value, "v": torch.ones(1)}))) == ["w"]


@pytest.mark.parametrize(
    "make",
    [
        lambda scale: torch._make_per_tensor_quantized_tensor(torch.ones(4, dtype=torch.int8), scale, 0),
        lambda scale: torch._make_per_channel_quantized_tensor(
            torch.ones(2, 2, dtype=torch.int8), torch.tensor([1.0, scale]), torch.zeros(2), 0
        ),
    ],
    ids=["tensor", "channel"],
)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor, torch.quantize_per_channel:UserWarning")
def test_scales_of_quantized_numbers_are_looked_at(make, tmp_path):
    (name,) = poisoned(seen(saved(tmp_path, {"w": make(NAN), "v": torch.ones(1)})))
    assert name.startswith("w.scale")
    assert seen(saved(tmp_path, {"w": make(1.0), "v": torch.ones(1)})).word == "good"


@pytest.mark.parametrize("keys", [(1, "1"), ("1", 1), (True, "True"), (2.5, "2.5"), ((1,), "(1,)")], ids=repr)
@pytest.mark.parametrize("make", [float, lambda x: torch.full((2,), x)], ids=["number", "tensor"])
@pytest.mark.parametrize("writer", ["torch", "dcp"])
def test_what_prints_alike_is_judged_apart(writer, make, keys, tmp_path):
    for values in ((NAN, 1.0), (1.0, NAN)):
        inner = dict(zip(keys, map(make, values), strict=True))
        if writer == "torch":
            path = saved(tmp_path, {"a": inner, "w": torch.ones(1)})
        else:  # in one value, which is a torch file of its own
            path = tmp_path / f"dcp{values}"
            checkpoint.save({"a": [(inner,)], "w": torch.ones(1)}, checkpoint_id=path)
        outcome = seen(path)
        assert len(poisoned(outcome)) == 1, outcome
        assert outcome.word == "poisoned"


# --- what torch writes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([1j, 2j]).conj(),
        torch.tensor([1j]).conj().imag,
        torch.eye(2).to_sparse(),
        torch.ones(3, dtype=torch.uint16),
        torch.ones(3, dtype=torch.bool),
        torch.ones(2, 3).T,
        torch.ones(5)[2:4],
        torch.ones(0, 3),
        torch.Size([1, 2]),
        torch.device("cuda", 1),
        torch.ones(3).untyped_storage(),
        bytearray(b"x"),
        b"bytes",
        collections.Counter("aab"),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("options", [{}, {"_use_new_zipfile_serialization": False}, {"pickle_protocol": 5}])
def test_what_torch_saves_is_read(value, options, tmp_path):
    state = {"x": value, "w": torch.tensor([1.0, NAN]), "again": value}
    assert poisoned(seen(saved(tmp_path, state, **options))) == ["w"]


def test_the_sign_of_a_view_counts(tmp_path):
    second = torch.tensor([1 + 1j]).conj().imag
    adam = {"state": {0: {"step": 1, "exp_avg": torch.ones(1), "exp_avg_sq": second}}, "param_groups": []}
    assert poisoned(seen(saved(tmp_path, {"optimizer": adam}))) == ["optimizer.state.0.exp_avg_sq"]


def test_numbers_of_a_machine_with_the_other_order_of_bytes(tmp_path):
    path = saved(tmp_path, {"w": torch.tensor([1.0, NAN, 2.0]), "c": torch.tensor([1j])})
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    for name, data in parts.items():
        if name.endswith("byteorder"):
            parts[name] = b"big"
        elif "/data/" in name:
            parts[name] = np.frombuffer(data, "u4").byteswap().tobytes()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in parts.items():
            archive.writestr(name, data)
    (poison,) = seen(path).verdict.poison
    assert (poison.nan, poison.first) == (1, (1,))


def test_an_archive_with_two_parts_of_one_name(tmp_path):
    """Otherwise another reader of archives may take the one that was not judged."""
    path = saved(tmp_path, {"w": torch.full((3,), NAN)})
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("x/data/0", np.ones(3, np.float32).tobytes())
    assert seen(path).word == "corrupt"


def test_an_archive_whose_parts_have_two_sizes(tmp_path):
    path = saved(tmp_path, {"w": torch.ones(3)})
    data = path.read_bytes()
    start = data.rindex(b"x/data/0") - 46  # its header in the table of contents
    sizes = struct.pack("<II", 12, 12)
    assert data[start + 20 : start + 28] == sizes
    path.write_bytes(data[: start + 20] + struct.pack("<II", 12, 16) + data[start + 28 :])
    assert seen(path).word == "corrupt"


@pytest.mark.parametrize("size", [(2**40,), (4,), (2**62, 2**62)])
def test_a_tensor_beyond_its_storage(size, tmp_path):
    storage = torch.ones(3).untyped_storage()

    class Beyond:
        def __reduce__(self):
            held = torch.storage.TypedStorage(wrap_storage=storage, dtype=torch.float32, _internal=True)
            return torch._utils._rebuild_tensor_v2, (held, 0, size, (1,) * len(size), False, {})

    for options in ({}, {"_use_new_zipfile_serialization": False}):
        assert seen(saved(tmp_path, {"w": Beyond()}, **options)).word == "corrupt"


# --- distributed checkpoints -------------------------------------------------------------------------------


def distributed(folder: Path, state: dict[str, Any]) -> Path:
    checkpoint.save(state, checkpoint_id=folder)
    return folder


def changed(folder: Path, change: Any) -> Path:
    found = pickle.loads((folder / ".metadata").read_bytes())
    change(found)
    (folder / ".metadata").write_bytes(pickle.dumps(found))
    return folder


def test_parts_of_another_dtype_than_the_metadata_say(tmp_path):
    def change(found: Any) -> None:
        found.state_dict_metadata["w"].properties.dtype = torch.int64

    path = distributed(tmp_path / "dcp", {"w": torch.full((2,), NAN), "v": torch.ones(1)})
    assert seen(changed(path, change)).word == "corrupt"


@pytest.mark.parametrize(
    "boxes",
    [
        [((0,), (2,)), ((1,), (2,))],
        [((0,), (2,)), ((3,), (2,))],
        [((0,), (3,)), ((1,), (1,))],
        [((0,), (4,)), ((4,), (0,))],
    ],
    ids=["overlap", "beyond", "inside", "empty"],
)
def test_parts_that_do_not_make_up_an_array(boxes, tmp_path):
    def change(found: Any) -> None:
        found.state_dict_metadata["w"].chunks = [
            metadata.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes
        ]
        ((index, place),) = [pair for pair in found.storage_data.items() if pair[0].fqn == "w"]
        del found.storage_data[index]
        for offsets, sizes in boxes:
            data = io.BytesIO()
            torch.save(torch.ones(sizes), data)
            name = f"{offsets}{sizes}.distcp"
            (tmp_path / "dcp" / name).write_bytes(data.getvalue())
            found.storage_data[metadata.MetadataIndex("w", torch.Size(offsets))] = type(place)(
                name, 0, len(data.getvalue())
            )

    path = changed(distributed(tmp_path / "dcp", {"w": torch.ones(4)}), change)
    whole = boxes[0] == ((0,), (4,))
    assert seen(path).word == ("good" if whole else "corrupt")


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8], ids=str)
@pytest.mark.parametrize("damage", ["zeros", "missing", "short"])
def test_parts_that_are_not_judged_are_there(damage, dtype, tmp_path):
    folder = distributed(tmp_path / "dcp", {"ids": torch.ones(100, dtype=dtype), "lr": 0.1})
    found = pickle.loads((folder / ".metadata").read_bytes())
    (place,) = [place for index, place in found.storage_data.items() if index.fqn == "ids"]
    file = folder / place.relative_path
    data = bytearray(file.read_bytes())
    if damage == "zeros":
        data[place.offset : place.offset + place.length] = bytes(place.length)
    if damage == "short":
        data = data[: place.offset + place.length // 2]
    file.write_bytes(data) if damage != "missing" else file.unlink()
    assert seen(folder).word == "corrupt"


@pytest.mark.parametrize("beside", [".metadata", ".zarray"])
def test_a_manifest_decides_what_is_read(beside, tmp_path):
    folder = stablenum_torch.Checkpoints(tmp_path / "own").save(1, {"w": torch.ones(2)})
    other = distributed(tmp_path / "dcp", {"w": torch.ones(2)})
    (folder / beside).write_bytes((other / ".metadata").read_bytes())
    assert seen(folder).why == f"{beside} is not in the manifest"
