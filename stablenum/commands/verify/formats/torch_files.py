"""Read what ``torch.save`` wrote, without running any code of the file."""

from __future__ import annotations

import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from stablenum._support.partners import imported
from stablenum.commands.verify.contents import Contents, Entry, NotCheckedError, Plain
from stablenum.commands.verify.contents import Path as Keys

__all__ = ["LEGACY", "as_numpy", "entries_in", "holds_arrays", "load", "read", "torch_module"]

Tensor: TypeAlias = Any

# How files begin that torch wrote before version 1.6, or with _use_new_zipfile_serialization=False.
LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_OLDEST = "2.11"
# Formats that NumPy lacks, by the integers that have their width.
_BITS = {1: "uint8", 2: "int16"}


def torch_module() -> Any:
    """Return torch.

    Raises:
        NotCheckedError: torch is not installed, or too old.
    """
    try:
        return imported("a file that torch wrote", {"torch": "torch"}, _OLDEST)
    except ImportError as error:
        raise NotCheckedError("unreadable", str(error)) from error


def read(path: Path) -> Contents:
    """Return what is in a file of ``torch.save``.

    Raises:
        NotCheckedError: it needs code of its own, it is damaged, or torch is missing.
    """
    torch = torch_module()
    tree = load(torch, path)
    arrays: list[Entry] = []
    values: dict[Keys, Plain] = {}
    notes: list[str] = []
    for entry in entries_in(torch, tree, (), notes):
        if isinstance(entry, Entry):
            arrays.append(entry)
        else:
            values[entry[0]] = entry[1]
    if not arrays and not values:
        raise NotCheckedError("unknown", f"it holds no tensor and no number, but {type(tree).__name__}")
    return Contents(format="torch", arrays=tuple(arrays), values=values, notes=tuple(notes))


def holds_arrays(path: Path) -> bool:
    """Return whether an archive of ``torch.save`` has storages; arguments that were pickled have none."""
    with zipfile.ZipFile(path) as archive:
        return any("/data/" in f"/{name}" for name in archive.namelist())


def load(torch: Any, source: Any) -> Any:
    """Return the object in a file, or in a stream, of ``torch.save``.

    Raises:
        NotCheckedError: it needs code of its own, or is damaged.
    """
    archive = zipfile.is_zipfile(source)
    if archive:
        _check_sums(source)
    if not isinstance(source, Path):
        source.seek(0)
    allowed = [np.dtype, np.ndarray, *_numpy_globals()]
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals(allowed):
            warnings.simplefilter("ignore")
            return torch.load(
                str(source) if isinstance(source, Path) else source,
                map_location="cpu",
                weights_only=True,
                mmap=(archive and isinstance(source, Path)) or None,
            )
    except Exception as error:
        raise _named(error) from error


def _numpy_globals() -> list[Any]:
    """Return what rebuilds arrays and numbers of NumPy, and nothing else: it runs no code of the file."""
    multiarray = np.zeros(0).__reduce__()[0]
    scalar = np.float64(0).__reduce__()[0]
    kinds = {type(np.dtype(name)) for name in ("bool", "u1", "u4", "u8", "i4", "i8", "f2", "f4", "f8")}
    return [multiarray, scalar, *kinds]


def _named(error: Exception) -> NotCheckedError:
    """Return the reason why torch did not load a file."""
    text = str(error)
    if re.search(
        r"nsupported (global|class)|not an allowed|unrecognized function|Can only build|locklisted", text
    ):
        wanted = re.search(r"GLOBAL ([\w.]+)", text)
        which = f" ({wanted[1]})" if wanted else ""
        return NotCheckedError("unreadable", f"needs arbitrary code{which}; it was not run")
    ended = "the file ends too early" if isinstance(error, EOFError) else type(error).__name__
    return NotCheckedError("corrupt", _first_line(text) or ended)


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""


def _check_sums(source: Any) -> None:
    """Compare the checksums that the archive has; torch itself does not.

    Raises:
        NotCheckedError: a part of the archive is damaged.
    """
    with zipfile.ZipFile(source) as archive:
        for member in archive.infolist():
            # Without sums (torch.serialization.set_crc32_options) all of them are 0.
            if member.CRC and not _is_sound(archive, member):
                raise NotCheckedError("corrupt", f"the checksum of {member.filename} in it is wrong")


def _is_sound(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bool:
    try:
        with archive.open(member) as stream:
            while stream.read(2**20):
                pass
    except (zipfile.BadZipFile, EOFError, NotImplementedError):
        return False
    return True


# --- what is in it ---------------------------------------------------------------------------


def entries_in(torch: Any, tree: Any, path: Keys, notes: list[str]) -> Iterator[Entry | tuple[Keys, Plain]]:
    """Yield the tensors and plain values in dicts, lists and tuples, with their paths."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from entries_in(torch, value, (*path, str(key)), notes)
    elif isinstance(tree, torch.Tensor):
        yield _entry(torch, path or ("tensor",), tree, notes)
    elif isinstance(tree, np.ndarray | np.generic):
        yield from _of_numpy(np.asarray(tree), path or ("array",))
    elif isinstance(tree, bool | int | float | str):
        yield path or ("value",), tree
    elif isinstance(tree, Sequence) and not isinstance(tree, bytes | bytearray):
        for i, value in enumerate(tree):
            yield from entries_in(torch, value, (*path, str(i)), notes)


def _of_numpy(values: Any, path: Keys) -> Iterator[Entry]:
    if values.dtype.kind in "fc":
        yield Entry(path=path, dtype=values.dtype.name, shape=values.shape, read=lambda: values)


def _entry(torch: Any, path: Keys, tensor: Tensor, notes: list[str]) -> Entry:
    if hasattr(tensor, "to_local"):  # a DTensor, of which a file holds the part of one rank
        notes.append(f"{'.'.join(path)} is the part of one rank")
        tensor = tensor.to_local()
    return Entry(
        path=path,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        read=lambda: as_numpy(torch, tensor),
    )


def as_numpy(torch: Any, tensor: Tensor) -> Any:
    """Return a tensor as an array of NumPy; of a sparse one the elements that it stores."""
    values = tensor.detach()
    if values.layout != torch.strided:
        values = values.coalesce().values() if values.is_sparse else values.values()
    if values.is_quantized:
        values = values.dequantize()
    name = str(values.dtype).removeprefix("torch.")
    if name != "bfloat16" and not name.startswith("float8"):
        return values.resolve_conj().resolve_neg().numpy()
    bits = values.contiguous().view(getattr(torch, _BITS[values.element_size()]))
    return bits.numpy().view(np.dtype(getattr(ml_dtypes, name)))
