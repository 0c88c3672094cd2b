"""``Recovery``: a training in JAX that goes back to its last good state."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, Unpack

import jax
import numpy as np

from stablenum._support.one_line import one_line
from stablenum.errors import bad_type
from stablenum.recovery.hooks import Easing
from stablenum.recovery.ledger import RecoveryEvent
from stablenum.recovery.loop import RecoveryLoop
from stablenum.recovery.settings import (
    RecoveryPolicy,
    RecoverySettings,
    absolute_folder,
    check_functions,
    make_policy,
)
from stablenum_jax._recovery.hooks import JaxHooks
from stablenum_jax._step.run_log import RunLog
from stablenum_jax._trees.state import find_guard

__all__ = ["Recovery"]

PyTree: TypeAlias = Any


class Recovery:
    """A training that goes back to its last good state when it has been hurt.

    The loop takes its batches from :meth:`batches` and keeps its state in :attr:`state`. Between two steps,
    the recovery measures the arrays that are neither parameters nor an optimizer's, such as running
    statistics, reads the guard's record and looks for numbers in the state that are not finite (every
    ``check_every`` steps), and copies the state into host memory (every ``every`` steps), without a wait. On
    a symptom it puts an older state back, leaves the batches out that were used since, and goes on from
    there; :class:`stablenum.RecoveryPolicy` says when, how far and how often.

    A state is any pytree with one guard in it: ``(params, opt_state)``, a dict that holds statistics and keys
    as well, a flax ``TrainState``, equinox modules. Objects of flax nnx are put back in place, so that
    ``Recovery((model, optimizer), ...)`` needs no assignment to :attr:`state`. Buffers may be donated to the
    step.

    Rewinding needs no new compilation: arrays come back with their dtypes, shardings and devices. A lower
    learning rate and a tighter clip after a rewind need :func:`stablenum_jax.eased` around the optimizer, a
    wider format ``escalate`` in the guard; or ``on_ease``.

    With several processes (``jax.distributed``) all go back together. Each keeps the shards of its own
    devices. All must make the recovery, and ask for batches, at the same steps.

    Args:
        state: the first state. What is not finite in it (a mask of -inf) is taken to be so on purpose.
        policy: the settings; or give fields of :class:`stablenum.RecoveryPolicy` by keyword.
        data: a function of the batch's number, from 0; a loader with ``state_dict`` and ``load_state_dict``;
            a grain loader or iterator (``get_state`` and ``set_state``); or anything that can be iterated
            again and again, such as a list. A generator cannot go back.
        folder: snapshots are written into this folder as well, each process's part by itself, so that
            :meth:`resume` can go on from there after a crash; by default they are in memory alone. The same
            ones are there as in memory. Training waits while one is written. If it cannot be written (a full
            disk), a warning is logged and the training goes on.
        predicate: called at each check; returns a clause if the user sees a symptom, None otherwise.
        identify: returns a batch's identifier, plain values for JSON, which reports then show. By default it
            is the batch's place in the data.
        explain: is given the batch of the first of several skipped steps when the run is stopped; what it
            returns is shown in the report.
        log: the :class:`stablenum_jax.RunLog` that the loop calls after each step; each rewind is then in it,
            with its reason, for ``stablenum report``.
        on_ease: called with an easing (``rate``, ``clip_at``, ``wider``, ``until``) when the next steps are
            to be taken more carefully, and with None when they are not any longer; for steps that are built
            by the caller.
        **settings: fields of :class:`stablenum.RecoveryPolicy`, such as ``every=50``.

    Raises:
        TypeError: ``data`` is none of these, or an argument is of another type.
        ValueError: ``state`` holds no guard or more than one, or a setting is out of its range.

    Example:
        >>> import jax, jax.numpy as jnp, optax, stablenum_jax
        >>> tx = optax.chain(stablenum_jax.guard(), optax.sgd(0.5))
        >>> params = {"w": jnp.ones(2)}
        >>> @jax.jit
        ... def train_step(state, batch):
        ...     params, opt_state = state
        ...     loss, grads = jax.value_and_grad(lambda p: ((p["w"] - batch) ** 2).sum())(params)
        ...     return stablenum_jax.step(tx, params, opt_state, grads, value=loss), loss
        >>> recovery = Recovery((params, tx.init(params)), data=lambda n: jnp.zeros(2), every=50)
        >>> for batch in recovery.batches(steps=100):
        ...     recovery.state, loss = train_step(recovery.state, batch)
        >>> recovery.step, float(loss), recovery.events
        (100, 0.0, [])

        With a log:

        >>> import pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp(), "run.jsonl")
        >>> with stablenum_jax.RunLog(file) as log:
        ...     recovery = Recovery((params, tx.init(params)), data=lambda n: jnp.zeros(2), log=log)
        ...     for batch in recovery.batches(steps=20):
        ...         recovery.state, loss = train_step(recovery.state, batch)
        ...         log(recovery.state)
        ...         if recovery.step == 14 and not recovery.events:
        ...             recovery.report("smoke")
        >>> [line for line in file.read_text().splitlines() if "rewind" in line][0][:62]
        '{"rewind":"reported","first":0,"last":19,"seen":"smoke","done"'
    """

    def __init__(
        self,
        state: PyTree,
        policy: RecoveryPolicy | None = None,
        *,
        data: Any,
        folder: str | os.PathLike[str] | None = None,
        predicate: Callable[[], str | None] | None = None,
        identify: Callable[[Any], Any] | None = None,
        explain: Callable[[Any], object] | None = None,
        on_ease: Callable[[Easing | None], object] | None = None,
        log: RunLog | None = None,
        **settings: Unpack[RecoverySettings],
    ) -> None:
        made = make_policy(policy, settings)
        check_functions(predicate=predicate, identify=identify, explain=explain, on_ease=on_ease)
        self._folder = place = absolute_folder(folder)
        if log is not None and not isinstance(log, RunLog):
            raise bad_type("log", "a RunLog or None", log)
        _check_state(state)
        self._structure = jax.tree.structure(state)
        self._hooks = JaxHooks(state, on_ease, place, log)
        self._loop = RecoveryLoop(
            made,
            self._hooks,
            data,
            folder=place if self._hooks.processes.position == 0 else None,
            predicate=predicate,
            identify=identify,
            explain=explain,
        )

    def __repr__(self) -> str:
        return one_line(self, **self._loop.fields(), folder=self._folder)

    @property
    def state(self) -> PyTree:
        """The state before the next step; assign what the step returns.

        Raises:
            ValueError: what is assigned holds no guard or more than one.
        """
        return self._hooks.state

    @state.setter
    def state(self, new: PyTree) -> None:
        if new is not self._hooks.state:
            structure = jax.tree.structure(new)
            if structure != self._structure:
                _check_state(new)
                self._structure = structure
            self._hooks.state = new

    @property
    def step(self) -> int:
        """How many steps have been made. A rewind takes steps back."""
        return self._loop.step

    @property
    def events(self) -> Sequence[RecoveryEvent]:
        """The rewinds so far, oldest first."""
        return self._loop.events

    def batches(self, steps: int) -> Iterator[Any]:
        """Yield batches until ``steps`` steps have been made; each must be used for one step.

        A loop that is left with ``break`` can be continued by calling this again. The batch it was left with
        counts as a step.

        Args:
            steps: the step to end at, counted from the beginning of the run.

        Raises:
            ValueError: ``steps`` is not a whole number from 0; or a parameter or a moment is NaN before the
                first step.
            RuntimeError: :attr:`state` was not assigned.
            RecoveryStopped: the responses or the budget are used up; :attr:`state` is the last good state.
        """
        return self._loop.batches(steps)

    def resume(self) -> int:
        """Go on from the newest snapshot in ``folder``: call it before :meth:`batches`, in all processes.

        All that is in a snapshot is put back, so that the run goes on as if it had not been interrupted, with
        the budget that is left. The state and the data must be as the program made them, and there must be as
        many processes; arrays may be laid out over their devices in another way.

        Returns:
            The step of the snapshot; 0 if there is none, or no ``folder``, and nothing is changed.

        Raises:
            CheckpointError: there are snapshots, but none that is whole and fits the state in all processes.
                Nothing is changed.
        """
        return self._loop.resume()

    def history(self) -> list[dict[str, Any]]:
        """Return the guard's history with the identifier of each step's batch as ``batch``.

        With a guard inside ``optax.MultiSteps``, ``batch`` is the list of the batches whose gradients were
        summed for the row, or that of the one batch that was skipped by itself. It is None for rows from
        before the recovery or a restart, for sums that began more than 1024 steps ago, and where there are
        not as many rows as batches.
        """
        return self._loop.history()

    def report(self, text: str, origin: int | None = None) -> None:
        """Report a symptom that only the caller sees; it is answered at the next check.

        Args:
            text: a clause that says what was seen.
            origin: the first step that may have been hurt, counted from 1; by default, the first one after
                the last check that found nothing.

        Raises:
            TypeError: ``text`` is not a string.
            ValueError: ``origin`` is not a whole number from 1.
        """
        self._loop.report(text, origin)

    def evaluated(self, value: PyTree) -> None:
        """Say what an evaluation gave; a result that is not finite is a symptom.

        Args:
            value: a number, an array, or a pytree of them. Reading them waits for the device.
        """
        leaves = jax.device_get(jax.tree.leaves(value))
        self._loop.evaluated(finite=all(bool(np.isfinite(np.asarray(leaf)).all()) for leaf in leaves))


def _check_state(state: PyTree) -> None:
    found = find_guard(state)
    if found.runs:
        raise ValueError(
            f"state must belong to a single training run; got one stacked to shape {found.runs}."
        )


Recovery.__module__ = "stablenum_jax"  # pickles and messages name it as it is imported
