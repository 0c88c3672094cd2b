"""The layout of a recording: a zip archive of arrays of NumPy and one text of JSON, and nothing that is run.

======================  =========  ===========================================================================
member                  dtype      contents
======================  =========  ===========================================================================
``program.json``        text       format number, versions, operations, source lines, results, parameters
``prints.npy``          float64    (values, 7): the sums and extremes of each value in float64, and how many
                                   entries they are of
``flags.npy``           uint8      (values,): 1 if a value holds floating-point numbers, 2 if it has a NaN
``tolerance.npy``       float64    (values,): how far rounding in float64 moves each value
``errors.npy``          float64    (values,): how far each value was off its float64 twin; NaN if not known
``typical.npy``         float64    (values,): the same of its typical entry
``limits.npy``          float64    (values,): how far rounding may take it on any machine
``value_ID.npy``        any        the array of one value in float64; as many of the smallest as there is room
``weight_N.npy``        float      the N-th parameter, if the weights lie in the file
``state_N.npy``         float      the N-th entry of what the optimizer kept
======================  =========  ===========================================================================
"""

from __future__ import annotations

import glob
import io
import json
import math
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from stablenum._support.files import write_file

__all__ = [
    "FORMAT",
    "MOST_BYTES",
    "SUFFIX",
    "TEXT",
    "Archive",
    "other_weights",
    "weights_beside",
    "write_archive",
]

# Raised whenever the layout changes; a version reads the formats up to its own.
FORMAT = 1
SUFFIX = ".snum"
TEXT = "program.json"
# A file that would take more memory than this once it is unpacked is none of ours: the arrays of values are
# limited when it is written. Chosen, not measured.
MOST_BYTES = 2**28
# So many bytes of text: that of 20,000 operations takes a third. Chosen, not measured.
_MOST_TEXT = 2**25
_DIGITS = 12  # of the hash, in a file's name
_PACKED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
# All members are dated alike, so that equal recordings are equal files: the first day that zip can express.
_DATE = (1980, 1, 1, 0, 0, 0)


def weights_beside(path: Path, digest: str) -> Path:
    """Return where the weights of a recording lie if they are too large for it. They are named by what they
    hold, so that a recording that is replaced has its own until the new one is whole."""
    return path.with_name(f"{path.name}.{digest[:_DIGITS]}.weights")


def other_weights(path: Path, digest: str) -> list[Path]:
    """Return the weights of earlier recordings of a name."""
    found = path.parent.glob(f"{glob.escape(path.name)}.{'[0-9a-f]' * _DIGITS}.weights")
    return [p for p in found if p != weights_beside(path, digest)]


def write_archive(
    path: Path, arrays: Mapping[str, Any], text: Mapping[str, Any] | None, *, packed: bool
) -> None:
    """Write arrays, and a text as JSON, whole or not at all.

    Args:
        path: where to.
        arrays: by name, without ".npy".
        text: plain values; None for no text.
        packed: whether the members are compressed.
    """
    kind = zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED

    def fill(target: Path) -> None:
        with zipfile.ZipFile(target, "w", compression=kind) as archive:
            for name, data in _members(arrays, text):
                archive.writestr(zipfile.ZipInfo(name, _DATE), data, compress_type=kind)

    write_file(path, fill)


def _members(arrays: Mapping[str, Any], text: Mapping[str, Any] | None) -> Iterable[tuple[str, bytes]]:
    if text is not None:
        yield TEXT, json.dumps(text, allow_nan=False, separators=(",", ":")).encode()
    for name, array in arrays.items():
        buffer = io.BytesIO()
        np.lib.format.write_array(buffer, np.asarray(array, order="C"), allow_pickle=False)
        yield f"{name}.npy", buffer.getvalue()


class Archive:
    """An archive that is read member by member; nothing in it is run.

    Args:
        path: the file.
        most: the bytes that all members may take once they are unpacked.
    """

    def __init__(self, path: Path, most: int = MOST_BYTES) -> None:
        self._zip = zipfile.ZipFile(path)
        self._sizes = {info.filename: info.file_size for info in self._zip.infolist()}
        if any(info.compress_type not in _PACKED for info in self._zip.infolist()):
            self.close()
            raise ValueError("it is packed in a way that recordings are not")
        if self._sizes.get(TEXT, 0) > _MOST_TEXT:
            self.close()
            raise ValueError(f"its text would take more than {_MOST_TEXT >> 20} MiB of memory")
        if sum(self._sizes.values()) > most:
            self.close()
            raise ValueError(f"it would take more than {most >> 20} MiB of memory")

    def close(self) -> None:
        """Close the file."""
        self._zip.close()

    def names(self) -> list[str]:
        """Return the names of the arrays."""
        return [name.removesuffix(".npy") for name in self._sizes if name.endswith(".npy")]

    def members(self) -> list[str]:
        """Return the names of all members."""
        return list(self._sizes)

    def text(self) -> dict[str, Any]:
        """Return the text."""
        if TEXT not in self._sizes:
            raise ValueError(f"it holds no {TEXT}")
        found = json.loads(self._read(TEXT))
        if not isinstance(found, dict):
            raise ValueError(f"{TEXT} holds no table")
        return found

    def array(self, name: str) -> Any:
        """Return an array of numbers."""
        whole = self._read(f"{name}.npy")
        data = io.BytesIO(whole)
        version = np.lib.format.read_magic(data)
        reading = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        if version not in reading:
            raise ValueError(f"{name} is an array of a format that is not known")
        shape, by_columns, dtype = reading[version](data)
        if dtype.kind not in "biufc" or dtype.hasobject:
            raise ValueError(f"{name} holds no numbers")
        if math.prod(shape) * dtype.itemsize != len(whole) - data.tell():
            raise ValueError(f"{name} holds fewer or more numbers than it says")
        flat = np.frombuffer(whole, dtype, offset=data.tell())
        return flat.reshape(shape, order="F" if by_columns else "C").copy()

    def _read(self, name: str) -> bytes:
        with self._zip.open(name) as member:
            data = member.read(self._sizes[name] + 1)
        if len(data) > self._sizes[name]:
            raise ValueError(f"{name} is longer than the archive says")
        return data
