"""``Store``: the checkpoints in a folder, saved, kept and loaded by one policy."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from stablenum._support.files import sync_folder
from stablenum._support.settings_checks import check_int
from stablenum.checkpoints.codec import ALONE, Codec, Ranks, on_all, on_each
from stablenum.checkpoints.finiteness import NonFinite, is_meant, listed
from stablenum.checkpoints.folders import POST_MORTEMS, check_kind, found_in, intact_in, remove, tidy
from stablenum.checkpoints.locks import writing_into
from stablenum.checkpoints.manifest import Manifest
from stablenum.checkpoints.reading import Loaded, newest_good
from stablenum.checkpoints.retention import superseded
from stablenum.checkpoints.settings import StoreSettings
from stablenum.checkpoints.writing import write_checkpoint
from stablenum.errors import CheckpointError, PoisonedStateError

__all__ = ["Store"]

_KEPT_POST_MORTEMS = 3
_logger = logging.getLogger("stablenum")


class Store:
    """The checkpoints in a folder. With several ranks, all of them call each method.

    Args:
        folder: where the checkpoints are; it is made when the first one is saved.
        codec: the format.
        settings: how they are saved and kept.
        ranks: the processes that save and load together.
        kind: what is saved, as in :attr:`Manifest.kind`.
    """

    def __init__(
        self, folder: Path, codec: Codec, settings: StoreSettings, ranks: Ranks = ALONE, kind: str = ""
    ) -> None:
        # A program may change its working folder.
        self.folder, self.codec, self.settings, self.ranks = folder.absolute(), codec, settings, ranks
        self.kind = kind
        self.adopted: set[str] = set()  # of the kind, although their manifests do not say so

    def save(self, step: int, state: Any, *, confirmed: bool = True) -> Path | None:
        """Write a checkpoint, and remove those that are no longer needed.

        Args:
            step: the number of steps that the state has taken.
            state: what the codec writes; it is not changed.
            confirmed: whether the state is known to be good. One that is not confirmed is loaded only if no
                other is good, and the newest confirmed one is kept beside it.

        Returns:
            The folder of the checkpoint or of the post-mortem; None if it could not be written and
            ``on_error`` is ``"go on"``.

        Raises:
            PoisonedStateError: the state is not finite, and ``on_poisoned`` is ``"refuse"``.
            CheckpointError: it could not be written, and ``on_error`` is ``"raise"``; or the folder has what
                something else saved.
            TypeError, ValueError: the step or the state is not allowed. In each case the checkpoints that
                were there are unchanged.
        """
        step = check_int("step", step, at_least=0, at_most=10**15)
        poison, meant = self._examined(state)
        if poison and self.settings.on_poisoned == "refuse":
            raise PoisonedStateError(self._refusal(step, poison), step=step, names=[e.name for e in poison])
        try:
            folder = self._written(step, state, confirmed, poison, meant)
        except OSError as error:
            message = self._failure(step, error)
            if self.settings.on_error == "raise":
                raise CheckpointError(message) from error
            self._warn(message)
            return None
        if poison:
            self._warn(f"step {step} is not finite ({listed(poison)}) and was set aside in {folder}.")
        return folder

    def load(self, like: Any, step: int | None = None) -> Loaded:
        """Return the newest good checkpoint, verified and read; nothing is changed.

        Args:
            like: what the state is to be loaded into.
            step: the only step that is tried; default all, the newest first.

        Raises:
            CheckpointError: no checkpoint is good; ``reasons`` says why.
        """
        if step is not None:
            step = check_int("step", step, at_least=0, at_most=10**15)
        allow = self.settings.allow
        return newest_good(self.folder, like, self.codec, self.ranks, allow, step, self.kind)

    def steps(self) -> list[int]:
        """Return the steps that are there with all files in full length, in the order of writing.

        Checksums are compared only by :meth:`load`.
        """
        there = on_all(self.ranks, lambda: intact_in(self.folder) if self.ranks.rank == 0 else [])[0]
        return list(dict.fromkeys(manifest.step for _, manifest in there))

    def confirm(self, step: int) -> None:
        """Note that a step saved with ``confirmed=False`` has proved good.

        Raises:
            CheckpointError: there is no such step, or it cannot be noted.
        """

        def note() -> None:
            if self.ranks.rank == 0:
                self._confirm(step)

        try:
            on_each(self.ranks, note)
        except OSError as error:
            raise CheckpointError(f"step {step} could not be confirmed in {self.folder}: {error}") from error

    def _confirm(self, step: int) -> None:
        found = [(folder, m) for folder, m in intact_in(self.folder) if m.step == step]
        if not found:
            raise CheckpointError(f"there is no checkpoint of step {step} in {self.folder} to confirm.")
        folder, manifest = found[-1]
        dataclasses.replace(manifest, confirmed=True).write(folder)
        sync_folder(folder)
        self._remove_superseded()

    def _examined(self, state: Any) -> tuple[list[NonFinite], list[NonFinite]]:
        """Return the entries of all ranks that are poison, and those that are meant to be not finite."""
        parts = on_all(self.ranks, lambda: list(self.codec.nonfinite(state)))
        poison: dict[str, NonFinite] = {}
        meant: dict[str, NonFinite] = {}
        for entry in (entry for part in parts for entry in part):
            (meant if is_meant(entry, self.settings.allow) else poison).setdefault(entry.name, entry)
        # What is poison on one rank is so whatever another rank has under that name.
        return list(poison.values()), [meant[name] for name in meant if name not in poison]

    def _written(
        self,
        step: int,
        state: Any,
        confirmed: bool,
        poison: Sequence[NonFinite],
        meant: Sequence[NonFinite],
    ) -> Path:
        place = self.folder / POST_MORTEMS if poison else self.folder

        def manifest() -> Manifest:
            return Manifest(
                step=step,
                serial=1 + max((f.manifest.serial for f in found_in(self.folder) if f.manifest), default=0),
                format=self.codec.name,
                confirmed=confirmed,
                time=datetime.now(UTC).isoformat(timespec="seconds"),
                versions=dict(self.codec.versions()),
                allowed=tuple(entry.name for entry in meant if entry.kind != "guard"),
                poisoned=tuple(entry.name for entry in poison),
                kind=self.kind,
            )

        with contextlib.ExitStack() as writing:

            def begin() -> None:
                if self.ranks.rank == 0:
                    check_kind(self.folder, self.kind, self.adopted)
                    self.folder.mkdir(parents=True, exist_ok=True)
                    writing.enter_context(writing_into(self.folder, lambda: tidy(self.folder)))

            on_each(self.ranks, begin)
            folder = write_checkpoint(self.folder, place, state, self.codec, self.ranks, manifest)
            if self.ranks.rank == 0:
                self._remove_superseded()
        return folder

    def _remove_superseded(self) -> None:
        """Remove what newer checkpoints have replaced; one that cannot be removed takes space, no more."""
        try:
            there = intact_in(self.folder)
            gone = [there[i][0] for i in superseded([m for _, m in there], self.settings.keep)]
            for folder in [*gone, *self._old_post_mortems()]:
                remove(folder, self.folder)
        except OSError as error:
            self._warn(f"a checkpoint in {self.folder} that is no longer needed is still there: {error}")

    def _old_post_mortems(self) -> list[Path]:
        place = self.folder / POST_MORTEMS
        if not place.is_dir():
            return []
        by_age = sorted(place.glob("step-*"), key=lambda folder: folder.stat().st_mtime_ns)
        return by_age[:-_KEPT_POST_MORTEMS]

    def _warn(self, message: str) -> None:
        if self.ranks.rank == 0:
            _logger.warning(message)

    def _refusal(self, step: int, poison: Sequence[NonFinite]) -> str:
        return (
            f"step {step} is not saved, because it is not finite: {listed(poison)}. Nothing was written; "
            f"{self._what_is_there()} If this is on purpose, as in a mask, allow it by name or pattern: "
            "allow=('*.mask',)."
        )

    def _failure(self, step: int, error: OSError) -> str:
        return (
            f"step {step} could not be saved in {self.folder}: {error}; {self._what_is_there()} "
            "Make space or the folder writable, or choose another folder."
        )

    def _what_is_there(self) -> str:
        try:
            steps = [manifest.step for _, manifest in intact_in(self.folder)]
        except OSError:
            return "the folder cannot be read."
        if not steps:
            return "there is no checkpoint yet."
        return f"the checkpoints there are unchanged (steps {', '.join(map(str, steps))})."
