"""The recorded value of each tensor: known, from outside the replay, or written through another view."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from stablenum.diagnosis.replay.operations import UNSEEN_WRITE
from stablenum.diagnosis.replay.trace import Step, Trace, Value
from stablenum_torch._diagnosis.replay.collectives import local_of
from stablenum_torch._diagnosis.replay.flags import bad_positions, flags_of, outliers_of, stats_of
from stablenum_torch._diagnosis.replay.loaders import WORKER, is_from_worker
from stablenum_torch._diagnosis.replay.snapshot import Snapshot
from stablenum_torch._diagnosis.replay.tensor_memory import Memory, Storage, is_freed, view_key

__all__ = ["TensorValues"]


class TensorValues:
    """The values of all tensors that a replay has seen.

    Args:
        trace: what is recorded.
        snapshot: keeps everything that is about to be written.
        names: id of a tensor -> (role, name).

    Attributes:
        leaves: parameters that were seen, by id.
        memory: the storages that were seen.
        taking: the last step that took a batch from a loader with workers.

    With ``with_outliers`` each input from outside is searched for entries far from the rest, which takes a
    median of it.
    """

    def __init__(
        self,
        trace: Trace,
        snapshot: Snapshot,
        names: dict[int, tuple[str, str]],
        *,
        with_outliers: bool = True,
    ) -> None:
        self.leaves: dict[int, Tensor] = {}
        self.memory = Memory()
        self.taking: Step | None = None
        self._parts: list[Tensor] = []  # of DTensors; they are kept, so that their ids stay theirs
        self._trace, self._snapshot, self._names = trace, snapshot, names
        self._with_outliers = with_outliers

    def of(self, tensor: Tensor, *, role: str = "", reads: bool = True) -> Value:
        """Return the value that a tensor has now.

        Args:
            tensor: any tensor; of a DTensor, this rank's part has the value.
            role: that of a tensor that is not known yet.
            reads: whether its elements are read, which is so only after collectives that write them have
                ended.
        """
        whole, tensor = tensor, local_of(tensor)
        if whole is not tensor:
            self.note_leaf(whole)
            if id(whole) in self._names:
                self._names[id(tensor)] = self._names[id(whole)]
                self._parts.append(tensor)
        storage = self.memory.find(tensor)
        if storage is not None and storage.pending and reads:
            self._settle(storage)
        if storage is None:
            return self._from_outside(tensor, self.memory.add(tensor, outside=True), role)
        key = view_key(tensor)
        current = storage.current(key)
        if current is not None:
            self.note_leaf(tensor)
            value = self._trace.values[current]
            if storage.doubtful and flags_of(tensor) != (value.nan, value.posinf, value.neginf):
                return self._from_outside(tensor, storage)
            return value
        # The memory existed before the replay, which has not written to it: the tensor is another view of it.
        if storage.outside and not storage.epoch:
            return self._from_outside(tensor, storage)
        return self._reread(tensor, storage)

    def _from_outside(self, tensor: Tensor, storage: Storage, role: str = "") -> Value:
        self.note_leaf(tensor)
        role, name = self._names.get(id(tensor), (role, ""))
        known = next((self._trace.values[v] for v, _ in storage.views.values()), None)
        if not role:
            leaf = tensor.requires_grad and not tensor._is_view() and tensor.is_leaf
            role, name = (known.role, known.name) if known else ("parameter" if leaf else "input", "")
        flags = flags_of(tensor)
        stats = stats_of(tensor, name=name, at=bad_positions(tensor)) if any(flags) else None
        value = self._trace.values[self._trace.add_value(flags=flags, role=role, name=name, stats=stats)]
        if role == "input" and self._with_outliers:
            value.outliers = outliers_of(tensor)
        storage.views[view_key(tensor)] = (value.id, storage.epoch)
        value.entrance = known.entrance if known else None
        if any(flags) and role == "input" and is_from_worker(tensor):
            value.maker, value.entrance = WORKER, self.taking or value.entrance
        return value

    def note_entrance(self, tensors: Sequence[Tensor], step: Step) -> None:
        """Note the step that brought tensors from outside, of whose memory nothing may be known yet."""
        for value in map(self.of, tensors):
            if value.producer is None:
                value.entrance = value.entrance or step

    def forget_good(self) -> None:
        """Forget all tensors but those that are not finite: while nothing is recorded, the others change."""

        def is_bad(storage: Storage) -> bool:
            seen = [value for value, epoch in storage.views.values() if epoch == storage.epoch]
            return any(not self._trace.values[value].finite for value in seen)

        self.leaves.clear()
        self._parts.clear()
        self.memory.keep(is_bad)

    def note_pending(self, tensor: Tensor, step: Step) -> None:
        """Note that a collective writes a tensor, which must not be read before the program has waited."""
        storage = self.memory.find(tensor) or self.memory.add(tensor, outside=False)
        storage.pending.append((step, tensor))

    def is_pending(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether a collective may still be writing one of these."""
        found = [self.memory.find(t) for t in tensors]
        return any(storage is not None and storage.pending for storage in found)

    def _settle(self, storage: Storage) -> None:
        """Note the values that collectives have given to tensors."""
        pending, storage.pending = storage.pending, []
        for step, tensor in pending:
            if is_freed(tensor):
                continue
            flags = flags_of(tensor)
            stats = stats_of(tensor, at=bad_positions(tensor)) if any(flags) else None
            value = self._trace.add_value(flags=flags, stats=stats)
            self._trace.values[value].producer = step.index
            step.outputs = (*step.outputs, value)
            storage.epoch += 1
            storage.writes.append((storage.epoch, value))
            storage.views[view_key(tensor)] = (value, storage.epoch)

    def note_leaf(self, tensor: Tensor) -> None:
        """Note a parameter that was not known, so that its gradient is kept like those of the others."""
        # A view of a parameter that was made in no-grad mode looks like a leaf, too.
        if id(tensor) in self.leaves or not tensor.requires_grad or tensor._is_view():
            return
        if tensor.is_leaf:
            self.leaves[id(tensor)] = tensor
            self._snapshot.keep_tensor(tensor)

    def _reread(self, tensor: Tensor, storage: Storage) -> Value:
        """Return the value of memory that was written through another view, such as ``x[0]`` after
        ``x.add_(1)``.

        No operation made this tensor's value, so a step "copy" is added that makes it from the values that
        were written.
        """
        key, flags = view_key(tensor), flags_of(tensor)
        sources = storage.sources(key)
        read = [self._trace.values[i] for i in sources]
        # The value is bad, but only good values were written: the rest of the memory was never initialised.
        # Uninitialised memory was recorded as finite, because reading it is harmless unless it is used. Here
        # it is used.
        if any(flags) and storage.unwritten is not None and all(v.finite for v in read):
            unwritten = self._trace.values[storage.unwritten]
            unwritten.nan, unwritten.posinf, unwritten.neginf = flags
        value = self._trace.add_value(flags=flags)
        # The step is attributed to the place of the last write; of a value that is bad, of a bad number.
        writers = [v.producer for v in [v for v in read if not v.finite] or read if v.producer is not None]
        near = self._trace.steps[max(writers)] if writers else None
        self._trace.add_step(
            "copy",
            primitive="a view of memory that was written",
            inputs=sources,
            outputs=[value],
            phase=near.phase if near else "forward",
            module=near.module if near else "",
            place=near.place if near else None,
            frames=near.frames if near else (),
            forward=near.forward if near else None,
        )
        storage.views[key] = (value, storage.epoch)
        return self._trace.values[value]

    def changed(self, known: int, tensor: Tensor) -> int:
        """Return the value of a tensor that was read: another one if its memory was written without torch."""
        value, flags = self._trace.values[known], flags_of(tensor)
        if not value.finite or not any(flags):
            return known
        stats = stats_of(tensor, name=value.name, at=bad_positions(tensor))
        new = self._trace.add_value(flags=flags, role="input", name=value.name, stats=stats)
        self._trace.values[new].maker = UNSEEN_WRITE
        return new

    def holds_data(self, tensor: Tensor) -> bool:
        """Return whether the memory of a tensor is known, and was ever written."""
        storage = self.memory.find(tensor)
        return storage is not None and (storage.unwritten is None or bool(storage.writes))

    def before_write(self, tensor: Tensor) -> None:
        """Keep a copy of memory from outside the replay before it is first written."""
        storage = self.memory.find(tensor) or self.memory.add(tensor, outside=True)
        if storage.outside and not storage.epoch and not storage.writes:
            self._snapshot.keep_memory(tensor)

    def note(self, tensor: Tensor, value: int, *, written: bool, uninitialised: bool) -> None:
        """Note the value that an operation has given to a tensor.

        Args:
            tensor: what the operation has made or written.
            value: the index of its value.
            written: whether the memory existed and was written.
            uninitialised: whether the memory is new and was not written.
        """
        storage = self.memory.find(tensor) or self.memory.add(tensor, outside=False)
        if written:
            storage.epoch += 1
            storage.writes.append((storage.epoch, value))
        elif uninitialised:
            storage.unwritten = value
        storage.views[view_key(tensor)] = (value, storage.epoch)
