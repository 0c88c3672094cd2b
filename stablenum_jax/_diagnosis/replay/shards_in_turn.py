"""The shards of a mesh, run one after another up to the operations at which they wait for each other.

Each shard has a thread, of which one runs at a time, so that branches and loops are evaluated for a shard as
for any program, and may differ from shard to shard as far as the mesh allows.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from stablenum_jax._diagnosis.replay.shards import Shard, number_of

__all__ = ["Crew", "StuckError", "Task"]


class StuckError(RuntimeError):
    """Shards wait for others that never come, as they would on their devices."""


class _Abandoned(BaseException):
    """Ends the thread of a shard whose results nobody waits for any more."""


@dataclass(frozen=True, slots=True)
class _Call:
    """What a shard waits for: a collective operation, or the shards of a mesh inside its own."""

    eqn: Any = None
    axes: tuple[Any, ...] = ()
    value: Any = None
    answer: Callable[[Sequence[Task], Sequence[Any]], Sequence[Any]] | None = None
    inner: Sequence[Task] = ()


@dataclass(eq=False)
class Task:
    """The work of one shard.

    Attributes:
        shard: its place.
        sizes: the size of each axis of the meshes around it.
        work: what it does, given the task.
    """

    crew: Crew
    shard: Shard
    sizes: Mapping[Any, int]
    work: Callable[[Task], Any]
    result: Any = None
    waits_for: _Call | None = None
    done: bool = False
    _reply: Any = None
    _go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    _thread: threading.Thread | None = None

    def together(
        self,
        eqn: Any,
        axes: tuple[Any, ...],
        value: Any,
        answer: Callable[[Sequence[Task], Sequence[Any]], Sequence[Any]],
    ) -> Any:
        """Wait for the other shards along the axes, and return what ``answer`` has for this one.

        Args:
            eqn: the equation that all of them evaluate.
            axes: the axes of the mesh, in the order in which they number the shards.
            value: what this shard brings.
            answer: is called once with the shards of the group and their values, in order.
        """
        return self._wait(_Call(eqn=eqn, axes=axes, value=value, answer=answer))

    def inside(self, inner: Sequence[Task]) -> None:
        """Wait until tasks of a mesh inside this shard are done."""
        self._wait(_Call(inner=inner))

    def _wait(self, call: _Call) -> Any:
        self.waits_for = call
        self.crew.back.release()
        self._go.acquire()
        self.check()
        return self._reply

    def check(self) -> None:
        """End the work here if nobody waits for it any more, as after an interrupt."""
        if self.crew.abandoned:
            raise _Abandoned

    def reply(self, value: Any) -> None:
        """Let the task go on with this."""
        self.waits_for, self._reply = None, value

    def resume(self) -> None:
        """Run the task until it waits or is done."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"shard {self.shard}", daemon=True)
            self._thread.start()
        self._go.release()
        self.crew.back.acquire()

    def _run(self) -> None:
        self._go.acquire()
        try:
            if not self.crew.abandoned:
                with self.crew.settings():
                    self.result = self.work(self)
        except _Abandoned:
            pass
        except BaseException as error:  # noqa: BLE001  raised again in the thread of the crew
            self.crew.error = error
        finally:
            self.done = True
            self.crew.back.release()

    def leave(self) -> None:
        """End the thread."""
        if self._thread is not None and not self.done:
            self._go.release()
        if self._thread is not None:
            self._thread.join()


class Crew:
    """All shards of one ``shard_map``, and of those inside it."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.back = threading.Semaphore(0)
        self.error: BaseException | None = None
        self.abandoned = False
        self.settings = _settings()

    def add(self, shard: Shard, sizes: Mapping[Any, int], work: Callable[[Task], Any]) -> Task:
        """Add the work of a shard."""
        task = Task(self, shard, sizes, work)
        self.tasks.append(task)
        return task

    def run(self) -> None:
        """Run all tasks.

        Raises:
            StuckError: shards wait for others that never come.
        """
        try:
            while not all(task.done for task in self.tasks):
                ready = next((t for t in self.tasks if not t.done and t.waits_for is None), None)
                if ready is not None:
                    ready.resume()
                elif not self._answer():
                    raise StuckError("the shards wait for each other")
                if self.error is not None:
                    raise self.error
        finally:
            self.abandoned = True
            for task in self.tasks:
                task.leave()

    def _answer(self) -> bool:
        """Let shards go on that no longer have to wait; return whether there are any."""
        answered = False
        groups: dict[Any, list[Task]] = {}
        for task in self.tasks:
            call = task.waits_for
            if call is None:
                continue
            if call.answer is None:
                if all(t.done for t in call.inner):
                    task.reply(None)
                    answered = True
                continue
            rest = tuple(c for c in task.shard.coordinates if c[0] not in call.axes)
            groups.setdefault((id(call.eqn), rest), []).append(task)
        for group in groups.values():
            answered |= _met(group)
        return answered


def _met(group: list[Task]) -> bool:
    """Let the shards of a group go on if all of them are there; return whether they are."""
    call = group[0].waits_for
    if call is None or call.answer is None:
        return False
    sizes = [group[0].sizes[a] for a in call.axes]
    if len(group) != math.prod(sizes):
        return False
    group = sorted(group, key=lambda t: number_of(t.shard.along(call.axes), sizes))
    values = [t.waits_for.value for t in group if t.waits_for is not None]
    for task, reply in zip(group, call.answer(group, values), strict=True):
        task.reply(reply)
    return True


def _settings() -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Return a context with those settings of this thread that change what is computed."""
    x64, device = jax.config.jax_enable_x64, jax.config.jax_default_device

    def settings() -> contextlib.AbstractContextManager[Any]:
        contexts = contextlib.ExitStack()
        for context in (jax.enable_x64(x64), jax.default_device(device)):
            contexts.enter_context(context)
        for context in (jax.debug_nans(False), jax.debug_infs(False), jax.disable_jit(False)):
            contexts.enter_context(context)
        return contexts

    return settings
