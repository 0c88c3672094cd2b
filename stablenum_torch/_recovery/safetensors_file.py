"""The format ``"safetensors"``: the tensors in one file, everything else as JSON; nothing is unpickled."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import stablenum
from stablenum._support.partners import imported
from stablenum.checkpoints.finiteness import NonFinite
from stablenum.checkpoints.structure import put_together, taken_apart
from stablenum.errors import CheckpointError
from stablenum_torch._recovery.entries import nonfinite
from stablenum_torch._recovery.states import State
from stablenum_torch._recovery.torch_file import check_whole

__all__ = ["SafetensorsFile", "is_tensor", "read_plain", "write_plain"]

_TENSORS, _PLAIN = "tensors.safetensors", "state.json"
# A complex tensor is written as the pairs of its parts, under its name with this behind it.
_PAIRS = "#complex"


class SafetensorsFile:
    """Writes a state into ``tensors.safetensors`` and ``state.json``.

    Args:
        writes: whether this process writes; otherwise another rank does.
    """

    name = "safetensors"

    def __init__(self, writes: bool = True) -> None:
        needed_by = 'stablenum_torch.Checkpoints(format="safetensors")'
        self._library = imported(needed_by, {"safetensors": "safetensors"}, "0.6")
        self._torch = importlib.import_module("safetensors.torch")
        self._writes = writes

    def versions(self) -> Mapping[str, str]:
        versions = {"stablenum": stablenum.__version__, "torch": torch.__version__}
        return versions | {"safetensors": self._library.__version__}

    def write(self, folder: Path, state: State) -> None:
        check_whole(state, self.name)
        plain, tensors = taken_apart(state.values, is_tensor)
        stored = _apart(dict(_stored(name, tensor) for name, tensor in tensors.items()))
        if not self._writes:
            return
        write_plain(folder / _PLAIN, plain)
        try:
            self._torch.save_file(stored, folder / _TENSORS)
        except self._library.SafetensorError as error:
            if "I/O error" not in str(error):
                raise ValueError(f"safetensors cannot hold the state: {error}") from error
            raise OSError(f"{_TENSORS} cannot be written: {error}") from error

    def read(self, folder: Path, like: State) -> State:
        try:
            stored = self._torch.load_file(folder / _TENSORS)
            tensors = dict(_restored(name, tensor) for name, tensor in stored.items())
            return State(put_together(read_plain(folder / _PLAIN), tensors))
        except (self._library.SafetensorError, KeyError, ValueError) as error:
            raise CheckpointError(f"{_TENSORS} or {_PLAIN} cannot be read: {error}") from error

    def nonfinite(self, state: State) -> list[NonFinite]:
        return nonfinite(state.values, state.kinds)


def is_tensor(value: object) -> bool:
    """Return whether a value is a tensor."""
    return isinstance(value, Tensor)


def write_plain(path: Path, plain: Any) -> None:
    """Write JSON values.

    Raises:
        OSError: the file cannot be written.
    """
    path.write_text(json.dumps(plain, allow_nan=False), encoding="utf-8")


def read_plain(path: Path) -> Any:
    """Return the JSON values in a file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not JSON.
    """
    return json.loads(path.read_text(encoding="utf-8"))


def _stored(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    """Return a tensor as the file can hold it: dense and on the host.

    Raises:
        ValueError: it has another layout, or the name of a complex tensor.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized or hasattr(tensor, "__tensor_flatten__"):
        raise ValueError(
            f'{name} must be a dense tensor for format="safetensors"; got {type(tensor).__name__} with '
            f'layout {tensor.layout}. Use format="torch".'
        )
    if name.endswith(_PAIRS):
        raise ValueError(f"{name} must not end with {_PAIRS!r}, which marks complex tensors. Rename it.")
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        name, tensor = name + _PAIRS, torch.view_as_real(tensor)
    return name, tensor.cpu().contiguous()


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with memory of their own, as the library demands: tied weights are written twice."""
    found, seen = {}, set()
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        shared = storage.data_ptr() in seen or storage.nbytes() != tensor.nbytes
        seen.add(storage.data_ptr())
        found[name] = tensor.clone() if shared else tensor
    return found


def _restored(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    tensor = tensor.clone()  # the library maps the file, and whoever overwrites it would change the tensor
    if not name.endswith(_PAIRS):
        return name, tensor
    return name.removesuffix(_PAIRS), torch.view_as_complex(tensor)
