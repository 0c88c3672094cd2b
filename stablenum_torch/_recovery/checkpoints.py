"""``Checkpoints``: save what is finite, whole or not at all, and load the newest good one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from stablenum._support.one_line import one_line
from stablenum._support.settings_checks import check_choice
from stablenum.checkpoints.codec import ALONE, Codec, Ranks, on_each
from stablenum.checkpoints.settings import StoreSettings
from stablenum.checkpoints.store import Store
from stablenum.errors import CheckpointError, bad_type
from stablenum_torch._devices.ranks import check_group, several_ranks
from stablenum_torch._recovery.dcp_folder import DcpFolder
from stablenum_torch._recovery.safetensors_file import SafetensorsFile
from stablenum_torch._recovery.states import Loading, captured
from stablenum_torch._recovery.torch_file import TorchFile

__all__ = ["Checkpoints"]

_FORMATS: dict[str, Callable[[Ranks, dist.ProcessGroup | None], Codec]] = {
    "torch": lambda ranks, group: TorchFile(writes=ranks.rank == 0),
    "safetensors": lambda ranks, group: SafetensorsFile(writes=ranks.rank == 0),
    "dcp": DcpFolder,
}


class Checkpoints:
    """The checkpoints in a folder: none of them is poisoned, and none half written.

    - A state with a value that is not finite is not saved.
    - Each checkpoint is a folder ``step-000000100`` with its files and ``manifest.json``, which has their
      checksums. It is written under a hidden name, flushed to the disk and then renamed, so that at any
      moment it is there completely or not at all.
    - Only then are older ones removed. The last good one never is.
    - Before anything is loaded, its checksums and values are verified. If it is not good, the next older one
      is loaded, and a warning is logged (logger ``stablenum``).

    If there are several ranks, all of them call each method, whatever the format, and act alike. ``"torch"``
    and ``"safetensors"`` are written by the first rank, and hold no DTensors.

    Args:
        folder: where the checkpoints are; it is made by the first :meth:`save`. Several ranks need a file
            system that they share.
        keep: how many are kept; None for all.
        on_poisoned: what :meth:`save` does with a state that is not finite. ``"refuse"`` raises an error;
            ``"set aside"`` logs a warning and writes it into ``post-mortem/``, from which nothing is loaded
            and where the last three are kept.
        on_error: what :meth:`save` does if a checkpoint cannot be written, as on a full disk. ``"raise"``
            raises an error, ``"go on"`` logs a warning. What was there stays in both cases.
        format: ``"torch"`` (``torch.save``), ``"safetensors"`` (with everything but tensors as JSON) or
            ``"dcp"`` (``torch.distributed.checkpoint``).
        allow: patterns of names, such as ``"*.mask"``, of entries that may be not finite. These may be so
            without being named: inf and -inf in one number beside models and optimizers (a best value so
            far) and in most settings, the numbers of a guard's state, and masks: buffers, and tensors beside
            models, with two or more dimensions that hold nothing but 0 and -inf.
        process_group: the ranks that save and load together; default all.

    Raises:
        ImportError: the package that the format needs is not installed.
        TypeError, ValueError: an argument is not allowed; the message names it.

    Example:
        >>> import tempfile, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> opt = torch.optim.AdamW(model.parameters())
        >>> checkpoints = Checkpoints(tempfile.mkdtemp(), keep=2)
        >>> folder = checkpoints.save(100, {"model": model, "optimizer": opt})
        >>> folder.name
        'step-000000100'
        >>> checkpoints.load({"model": model, "optimizer": opt})
        100
        >>> _ = model.weight.data.fill_(float("nan"))
        >>> checkpoints.save(200, {"model": model, "optimizer": opt})
        Traceback (most recent call last):
        stablenum.PoisonedStateError: step 200 is not saved, ...: model.weight (2 NaN of 2). Nothing ...
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int | None = 3,
        on_poisoned: Literal["refuse", "set aside"] = "refuse",
        on_error: Literal["raise", "go on"] = "raise",
        format: Literal["torch", "safetensors", "dcp"] = "torch",  # noqa: A002 - as files are said to have
        allow: Sequence[str] = (),
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if not isinstance(folder, (str, os.PathLike)):
            raise bad_type("folder", "a path", folder)
        self._settings = StoreSettings(keep=keep, on_poisoned=on_poisoned, on_error=on_error, allow=allow)
        check_choice("format", format, tuple(_FORMATS))
        check_group("process_group", process_group)
        # A program may change its working folder.
        self._folder, self._format, self._group = Path(folder).absolute(), format, process_group
        _FORMATS[format](ALONE, None)  # an import error comes now

    def __repr__(self) -> str:
        return one_line(self, folder=self._folder, format=self._format, **self._settings.fields())

    @property
    def folder(self) -> Path:
        """Where the checkpoints are."""
        return self._folder

    def save(self, step: int, state: MutableMapping[str, Any], *, confirmed: bool = True) -> Path | None:
        """Save a state, unless it is not finite. The state is not changed.

        Args:
            step: the number of steps that have been taken, which names the checkpoint. If a step is saved
                again, the new checkpoint replaces the old one.
            state: objects with ``state_dict()`` and ``load_state_dict()``, and plain values (tensors,
                numbers, strings, and dicts, lists and tuples of them), by name.
            confirmed: False if the state is not known to be good yet; see :meth:`confirm`.

        Returns:
            The folder of the checkpoint or the post-mortem; None if it could not be written and ``on_error``
            is ``"go on"``.

        Raises:
            PoisonedStateError: the state is not finite, and ``on_poisoned`` is ``"refuse"``.
            CheckpointError: it cannot be written, and ``on_error`` is ``"raise"``.
            TypeError, ValueError: the format cannot hold the state. In each case the older checkpoints are
                unchanged.
        """
        store = self._store()
        return store.save(step, on_each(store.ranks, lambda: captured(state)), confirmed=confirmed)

    def load(self, state: MutableMapping[str, Any], *, step: int | None = None) -> int:
        """Load the newest good checkpoint, and return its step.

        The newest is the one that was saved last, which after a rewind need not be the highest step. It is
        verified and read before anything is changed. Host memory is needed for it and for a copy of what it
        replaces.

        Args:
            state: as in :meth:`save`; objects are loaded into, and plain values are replaced in this dict. It
                may leave out what is not to be loaded.
            step: load this step or none; default the newest good one.

        Raises:
            CheckpointError: no checkpoint is good, or it does not fit the objects: ``reasons`` says why, and
                is empty only if there is none. Nothing is changed, on any rank.
            TypeError: ``state`` is not a dict.
        """
        store = self._store()
        loaded = store.load(on_each(store.ranks, lambda: captured(state)), step)
        values, where = loaded.state.values, str(loaded.folder)
        with _as_reason(loaded.folder.name):
            loading = on_each(store.ranks, lambda: Loading(state, values, where))
            try:
                on_each(store.ranks, loading.load)
            except BaseException:  # it does not fit, here or on another rank, or Ctrl-C was pressed
                loading.undo()
                raise
        return loaded.step

    def steps(self) -> list[int]:
        """Return the steps of the checkpoints that are complete, in the order in which they were saved.

        Their files have the sizes that they were written with; checksums are verified by :meth:`load`.
        """
        return self._store().steps()

    def confirm(self, step: int) -> None:
        """Note that a step that was saved with ``confirmed=False`` has proved good.

        A fault may show long after its cause, when the state has already been saved. A checkpoint that is not
        confirmed is loaded only if there is no good one that is, and never replaces the last confirmed one.

        Raises:
            CheckpointError: there is no checkpoint of this step, or it cannot be written.
        """
        self._store().confirm(step)

    def _store(self) -> Store:
        ranks = _Group(self._group) if several_ranks() else ALONE
        return Store(self._folder, _FORMATS[self._format](ranks, self._group), self._settings, ranks)


@contextlib.contextmanager
def _as_reason(name: str) -> Iterator[None]:
    """Note which checkpoint it is that does not fit."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(str(error), reasons={name: str(error)}) from error


class _Group:
    """The ranks of a group."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.rank = dist.get_rank(group)

    def gather(self, value: Any) -> list[Any]:
        values = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(values, value, group=self._group)
        return values


Checkpoints.__module__ = "stablenum_torch"  # pickles and messages name it as it is imported
