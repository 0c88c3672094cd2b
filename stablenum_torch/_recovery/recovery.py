"""``Recovery``: a training that goes back to its last good state when it has been hurt."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import nn

from stablenum._support.one_line import one_line
from stablenum.errors import bad_type
from stablenum.recovery.ledger import RecoveryEvent
from stablenum.recovery.loop import RecoveryLoop
from stablenum.recovery.settings import (
    RecoveryPolicy,
    RecoverySettings,
    absolute_folder,
    check_functions,
    make_policy,
)
from stablenum_torch._recovery.checks import check_guarded, check_same_model, named_states
from stablenum_torch._recovery.hooks import TorchHooks
from stablenum_torch._recovery.together import together
from stablenum_torch._step.checks import check_module
from stablenum_torch._step.optimizer import GuardedOptimizer

__all__ = ["Recovery"]


class Recovery:
    """Runs the steps of a training, and goes back to its last good state when it has been hurt.

    Buffers are measured after each step: a finite batch on another scale shows in running statistics alone.
    Snapshots of the whole state are kept in host memory: the model with all buffers, the optimizer and its
    guard, schedulers, what is in ``extra``, the random generators of torch, NumPy and Python, and the place
    in the data. When a symptom is seen, the run goes back to a snapshot from before its likely origin, leaves
    out the data in between if the response says so, and goes on: :class:`stablenum.RecoveryPolicy` says what
    is a symptom, and :class:`stablenum.typing.Response` what is done about it. Tensors are restored in place,
    so that references and compiled programs stay valid. Gradients are not part of a snapshot.

    On CUDA a snapshot is copied in the background, and the host waits for the device only at the checks,
    every ``check_every`` steps.

    If ``opt`` writes a log (``wrap(..., log="run.jsonl")``), each rewind is in it, with its reason, for
    ``stablenum report``.

    Args:
        model: the model.
        opt: its optimizer, guarded by :func:`stablenum_torch.wrap`, whose record is judged. Losses are known
            to it if they go through ``opt.backward(loss)``. A guard that raises (``max_skips_in_a_row``,
            ``on_nonfinite``) ends the loop before the run can go back.
        policy: the settings; by default made from ``settings``.
        data: a ``DataLoader``, or anything else that can be iterated again; a loader with ``state_dict`` and
            ``load_state_dict`` (torchdata's ``StatefulDataLoader``); or a function of the batch's number,
            from 0. A plain ``DataLoader`` is taken up in the middle of an epoch by reading the epoch again,
            with the random generators as they were at its beginning. Random numbers are then others in the
            workers of a loader with ``persistent_workers``, and in those of a ``StatefulDataLoader``.
        scheduler: the learning-rate scheduler, or a list of them.
        extra: other things that a step changes, by name: modules (an average of the weights), optimizers,
            generators, and objects with ``state_dict`` and ``load_state_dict`` (a ``GradScaler``).
        folder: snapshots are written into this folder as well, each rank's part by itself, so that
            :meth:`resume` can go on from there after a crash; by default they are in memory alone. The same
            ones are there as in memory. Training waits while one is written. If it cannot be written (a full
            disk), a warning is logged and the training goes on.
        process_group: the ranks that go back together. By default those of the optimizer's groups, of the
            parameters' mesh, or of the ``DistributedDataParallel`` model. All of them must have the same
            settings and make the same calls.
        predicate: called at each check; returns a clause if the run looks hurt to you, otherwise None.
        identify: returns a batch's identifier, such as its indices, for reports: plain values. By default
            batches are identified by epoch and number.
        explain: called with the batch of the first of several skipped steps when the run gives up; its result
            becomes a part of the report. The last 256 batches are kept for it.
        **settings: fields of :class:`stablenum.RecoveryPolicy`.

    Raises:
        TypeError: an argument has a wrong type, both ``policy`` and settings are given, or ``data`` cannot go
            back.
        ValueError: a setting is out of its range; ``opt`` has no parameter of ``model``; or it is not clear
            which ranks go back together.

    Example:
        >>> import torch
        >>> import stablenum_torch
        >>> _ = torch.manual_seed(0)
        >>> x = torch.randn(64, 3)
        >>> loader = torch.utils.data.DataLoader(x, batch_size=8, shuffle=True)
        >>> model = torch.nn.Linear(3, 1)
        >>> opt = stablenum_torch.wrap(torch.optim.Adam(model.parameters(), lr=0.1), names=model)
        >>> recovery = stablenum_torch.Recovery(model, opt, data=loader, every=5, check_every=5, good_after=0)
        >>> spoiled = False
        >>> for batch in recovery.batches(steps=20):
        ...     opt.zero_grad()
        ...     opt.backward((model(batch) - batch.sum(1, keepdim=True)).square().mean())
        ...     opt.step()
        ...     if recovery.step == 12 and not spoiled:  # a fault of the machine
        ...         spoiled = True
        ...         opt.state[model.weight]["exp_avg_sq"][0, 1] = float("nan")
        >>> print(recovery.events[0])
        step 15: 2 tensors of the state are not finite (weight, exp_avg_sq of weight), likely since step 11.
        Attempt 1: back to step 10, batch 2 of epoch 1 to batch 2 of epoch 14 left out
        >>> bool(model.weight.isfinite().all())
        True
    """

    def __init__(
        self,
        model: nn.Module,
        opt: GuardedOptimizer,
        policy: RecoveryPolicy | None = None,
        *,
        data: Any,
        scheduler: Any | Sequence[Any] | None = None,
        extra: Mapping[str, Any] | None = None,
        folder: str | os.PathLike[str] | None = None,
        process_group: torch.distributed.ProcessGroup | None = None,
        predicate: Callable[[], str | None] | None = None,
        identify: Callable[[Any], Any] | None = None,
        explain: Callable[[Any], object] | None = None,
        **settings: Unpack[RecoverySettings],
    ) -> None:
        made = make_policy(policy, settings)
        check_module("model", model)
        check_guarded(opt)
        check_same_model(model, opt)
        others = named_states(scheduler, extra)
        check_functions(predicate=predicate, identify=identify, explain=explain)
        self._folder = place = absolute_folder(folder)
        ranks = together(model, opt, process_group)
        hooks = TorchHooks(model, opt, others, ranks, place)
        self._loop = RecoveryLoop(
            made,
            hooks,
            data,
            folder=place if ranks.position == 0 else None,
            predicate=predicate,
            identify=identify,
            explain=explain,
        )

    def __repr__(self) -> str:
        return one_line(self, **self._loop.fields(), folder=self._folder)

    @property
    def policy(self) -> RecoveryPolicy:
        """The settings."""
        return self._loop.policy

    @property
    def step(self) -> int:
        """How many steps the run has made, without those that it has gone back over.

        It is brought up to date when the next batch is asked for.
        """
        return self._loop.step

    @property
    def events(self) -> Sequence[RecoveryEvent]:
        """The times that the run has gone back, oldest first, those before a restart included."""
        return self._loop.events

    def batches(self, steps: int) -> Iterator[Any]:
        """Yield a batch for each step, until ``steps`` steps have been made, those of before included.

        The work is done when the next batch is asked for, after the step and whatever follows it in the body
        of the loop. After the last step the state is checked, too. A loop that is left with ``break`` can be
        continued by calling this again. The batch it was left with counts as a step.

        Args:
            steps: how many steps the whole run makes. An epoch ends and the next one begins without notice.

        Raises:
            ValueError: ``steps`` is not a whole number from 0; or a parameter, buffer or moment is not finite
                before the first step. Buffers that were not finite when the recovery was made may be so.
            RecoveryStopped: the responses to a fault, or the whole budget, are used up. The state is the last
                good one.
        """
        return self._loop.batches(steps)

    def resume(self) -> int:
        """Go on from the newest snapshot in ``folder``: call it before :meth:`batches`, on all ranks.

        All that is in a snapshot is restored, so that the run goes on as if it had not been interrupted, with
        the budget that is left. It needs the model, the optimizer, the data and whatever else there is as the
        program made them, and as many ranks.

        Returns:
            The step of the snapshot; 0 if there is none, or no ``folder``, and nothing is changed.

        Raises:
            CheckpointError: there are snapshots, but none that is whole on all ranks. Nothing is changed.
            RuntimeError: the model or the optimizer is not that of the snapshot.
        """
        return self._loop.resume()

    def evaluated(self, value: Any) -> None:
        """Take in the result of an evaluation: if it is not finite, the run goes back at the next check.

        Args:
            value: a number, or a tensor with one element.

        Raises:
            TypeError: ``value`` is neither.
        """
        try:
            finite = math.isfinite(value)
        except (TypeError, ValueError, RuntimeError):
            raise bad_type("value", "a number or a tensor with one element", value) from None
        self._loop.evaluated(finite=finite)

    def report(self, text: str, origin: int | None = None) -> None:
        """Report a symptom that only you can see: the run goes back at the next check.

        Args:
            text: a clause that says what was seen.
            origin: the first step that may have been hurt, counted from 1; by default the first one after the
                last check.

        Raises:
            TypeError: ``text`` is not a string.
            ValueError: ``origin`` is not a whole number from 1.
        """
        self._loop.report(text, origin)

    def history(self) -> list[dict[str, Any]]:
        """Return what ``opt.history()`` returns, with the identifier of each step's batch under ``"batch"``.

        It is None for rows from before the recovery or a restart, and where there are not as many rows as
        batches, as when gradients are accumulated over several of them. Reading it waits for the device.
        """
        return self._loop.history()


Recovery.__module__ = "stablenum_torch"  # pickles and messages name it as it is imported
