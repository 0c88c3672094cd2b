"""The format ``"torch"``: one file that ``torch.save`` writes and ``torch.load(weights_only=True)`` reads."""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

import stablenum
from stablenum.checkpoints.finiteness import NonFinite
from stablenum.errors import CheckpointError
from stablenum_torch._devices.ranks import is_dtensor
from stablenum_torch._recovery.entries import leaves, nonfinite
from stablenum_torch._recovery.states import State

__all__ = ["TorchFile", "check_whole"]

_FILE = "state.pt"
# What torch.load() raises for a file that it cannot read.
_UNREADABLE = (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, AttributeError)
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_SAFE: tuple[type, ...] = (Tensor, torch.nn.Parameter, torch.dtype, torch.device, torch.Size, *_PLAIN)


class TorchFile:
    """Writes a state into ``state.pt``.

    Args:
        writes: whether this process writes; otherwise another rank does.
    """

    name = "torch"

    def __init__(self, writes: bool = True) -> None:
        self._writes = writes

    def versions(self) -> Mapping[str, str]:
        return {"stablenum": stablenum.__version__, "torch": torch.__version__}

    def write(self, folder: Path, state: State) -> None:
        check_whole(state, self.name)
        if not self._writes:
            return
        with (folder / _FILE).open("wb") as file:
            noting = _Noting(file)
            try:
                torch.save(state.values, noting)
            except RuntimeError as error:
                # torch hides the error of the file behind "unexpected pos".
                raise noting.failure or error from error
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                raise _unfit(state, error) from error
        self._check_readable(folder, state)

    def _check_readable(self, folder: Path, state: State) -> None:
        """Read the file as :meth:`read` will, but for the contents of the tensors."""
        try:
            torch.load(folder / _FILE, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError as error:
            raise _unfit(state, error) from error

    def read(self, folder: Path, like: State) -> State:
        try:
            return State(torch.load(folder / _FILE, map_location="cpu", weights_only=True))
        except _UNREADABLE as error:
            raise CheckpointError(f"{_FILE} cannot be read: {error}") from error

    def nonfinite(self, state: State) -> list[NonFinite]:
        return nonfinite(state.values, state.kinds)


class _Noting:
    """A file that keeps the error with which it could not be written.

    Attributes:
        failure: the error; None if there was none.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.failure: OSError | None = None

    def write(self, part: Any) -> int:
        try:
            return self._file.write(part)
        except OSError as error:
            self.failure = error
            raise

    def flush(self) -> None:
        self._file.flush()


def check_whole(state: State, format_name: str) -> None:
    """Check that this process has the whole of every tensor.

    Raises:
        ValueError: one is a DTensor.
    """
    for name, leaf in leaves(state.values):
        if is_dtensor(leaf):
            raise ValueError(
                f'{name} is a DTensor, of which each rank has a part; format="{format_name}" would save one '
                'part. Use format="dcp".'
            )


def _unfit(state: State, error: Exception) -> TypeError:
    return TypeError(
        "the state must hold tensors and plain values that torch.load(weights_only=True) can read; "
        f"{_oddity(state, error)}. Leave it out, convert it (an array with torch.as_tensor), or "
        "allow its type with torch.serialization.add_safe_globals. Nothing was saved."
    )


def _oddity(state: State, error: Exception) -> str:
    """Return what in a state torch.load does not read: the first entry of another type, or the type alone."""
    for name, leaf in leaves(state.values):
        if type(leaf) not in _SAFE:
            return f"{name} is {type(leaf).__module__}.{type(leaf).__name__}"
    found = re.search(r"GLOBAL (\S+)", str(error))
    return f"it has {found[1] if found else 'something else'}"
