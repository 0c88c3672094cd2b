"""``Checkpoints``: save what is finite, whole or not at all, and load the newest good one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import jax

from stablenum._support.one_line import one_line
from stablenum._support.settings_checks import check_choice
from stablenum.checkpoints.codec import ALONE, Ranks
from stablenum.checkpoints.settings import StoreSettings
from stablenum.checkpoints.store import Store
from stablenum.errors import bad_type
from stablenum_jax._recovery.files import TreeFolder
from stablenum_jax._recovery.formats import FORMATS
from stablenum_jax._recovery.together import Processes
from stablenum_jax._recovery.trees import check_like

__all__ = ["Checkpoints"]

PyTree: TypeAlias = Any
T = TypeVar("T")


class Checkpoints:
    """The checkpoints in a folder: none of them is poisoned, and none half written.

    - A state with a value that is not finite is not saved. Arrays on devices are looked at in one compiled
      pass.
    - Each checkpoint is a folder ``step-000000100`` with its files and ``manifest.json``, which has their
      checksums. It is written under a hidden name, flushed to the disk and then renamed, so that at any
      moment it is there completely or not at all.
    - Only then are older ones removed. The last good one never is.
    - Before anything is returned, its checksums and values are verified. If it is not good, the next older
      one is loaded, and a warning is logged (logger ``stablenum``).
    - A guard's state is saved as by :func:`stablenum_jax.guard_state_dict`, so it loads with other settings.

    If there are several processes, all of them call each method and act alike. ``"npz"`` and
    ``"safetensors"`` are written by the first process, and hold no arrays that are spread over processes.

    Args:
        folder: where the checkpoints are; it is made by the first :meth:`save`. Several processes need a file
            system that they share.
        keep: how many are kept; None for all.
        on_poisoned: what :meth:`save` does with a state that is not finite. ``"refuse"`` raises an error;
            ``"set aside"`` logs a warning and writes it into ``post-mortem/``, from which nothing is loaded
            and where the last three are kept.
        on_error: what :meth:`save` does if a checkpoint cannot be written, as on a full disk. ``"raise"``
            raises an error, ``"go on"`` logs a warning. What was there stays in both cases.
        format: ``"npz"``, ``"safetensors"`` or ``"orbax"``, for the arrays; everything else is JSON.
        allow: patterns of names, such as ``"*.mask"``, of entries that may be not finite. These may be so
            without being named: inf and -inf in a plain number, in one number beside the parameters (a best
            value so far), in a scalar that optax keeps beside its moments, and in most settings; a guard's
            state; and arrays with two or more dimensions that hold nothing but 0 and -inf (masks), if they
            are not called as parameters are (``kernel``, ``weight``, ``bias``, ``embedding``, ``scale``).

    Raises:
        ImportError: the package that the format needs is not installed.
        TypeError, ValueError: an argument is not allowed; the message names it.

    Example:
        >>> import tempfile, jax.numpy as jnp, optax, stablenum_jax
        >>> tx = optax.chain(stablenum_jax.guard(clip=1.0), optax.adamw(1e-3))
        >>> params = {"w": jnp.ones(2)}
        >>> state = {"params": params, "opt_state": tx.init(params)}
        >>> checkpoints = Checkpoints(tempfile.mkdtemp(), keep=2)
        >>> checkpoints.save(100, state).name
        'step-000000100'
        >>> step, state = checkpoints.load(state)
        >>> step, state["params"]
        (100, {'w': Array([1., 1.], dtype=float32)})
        >>> checkpoints.save(200, {**state, "params": {"w": jnp.asarray([1.0, jnp.nan])}})
        Traceback (most recent call last):
        stablenum.PoisonedStateError: step 200 is not saved, ...: params.w (1 NaN of 2). Nothing ...
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int | None = 3,
        on_poisoned: Literal["refuse", "set aside"] = "refuse",
        on_error: Literal["raise", "go on"] = "raise",
        format: Literal["npz", "safetensors", "orbax"] = "npz",  # noqa: A002 - as files are said to have
        allow: Sequence[str] = (),
    ) -> None:
        if not isinstance(folder, (str, os.PathLike)):
            raise bad_type("folder", "a path", folder)
        settings = StoreSettings(keep=keep, on_poisoned=on_poisoned, on_error=on_error, allow=allow)
        check_choice("format", format, tuple(FORMATS))
        ranks: Ranks = _Processes() if jax.process_count() > 1 else ALONE
        codec = TreeFolder(FORMATS[format](), ranks)
        self._format, self._store = format, Store(Path(folder), codec, settings, ranks)

    def __repr__(self) -> str:
        return one_line(self, folder=self.folder, format=self._format, **self._store.settings.fields())

    @property
    def folder(self) -> Path:
        """Where the checkpoints are."""
        return self._store.folder

    def save(self, step: int, state: PyTree, *, confirmed: bool = True) -> Path | None:
        """Save a state, unless it is not finite.

        Args:
            step: the number of steps that have been taken, which names the checkpoint. If a step is saved
                again, the new checkpoint replaces the old one.
            state: a pytree of arrays, keys, plain values and guards' states: ``{"params": params,
                "opt_state": opt_state}``, a ``TrainState``, an ``nnx.State``. Leaves that are no data, such
                as activation functions, are not saved.
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
        return self._store.save(step, state, confirmed=confirmed)

    def load(self, like: PyTree, *, step: int | None = None) -> tuple[int, PyTree]:
        """Return the step and the state of the newest good checkpoint.

        The newest is the one that was saved last, which after a rewind need not be the highest step.

        Args:
            like: a state of the training that goes on, such as its first one. It gives structure, shapes,
                dtypes and shardings, and it may leave out what is not to be loaded. All arrays but those of
                guards may be ``jax.ShapeDtypeStruct``.
            step: load this step or none; default the newest good one.

        Raises:
            CheckpointError: no checkpoint is good, or fits: ``reasons`` says why, and is empty only if there
                is none.
            TypeError: ``like`` is traced, or the arrays of a guard in it are abstract.
        """
        check_like(like)
        loaded = self._store.load(like, step)
        return loaded.step, loaded.state

    def steps(self) -> list[int]:
        """Return the steps of the checkpoints that are complete, in the order in which they were saved.

        Their files have the sizes that they were written with; checksums are verified by :meth:`load`.
        """
        return self._store.steps()

    def confirm(self, step: int) -> None:
        """Note that a step that was saved with ``confirmed=False`` has proved good.

        A fault may show long after its cause, when the state has already been saved. A checkpoint that is not
        confirmed is loaded only if there is no good one that is, and never replaces the last confirmed one.

        Raises:
            CheckpointError: there is no checkpoint of this step, or it cannot be written.
        """
        self._store.confirm(step)


class _Processes:
    """The processes of a multi-host program."""

    def __init__(self) -> None:
        self._all = Processes()
        self.rank = self._all.position

    def gather(self, value: Any) -> list[Any]:
        return self._all.gathered(value)


Checkpoints.__module__ = "stablenum_jax"  # pickles and messages name it as it is imported
