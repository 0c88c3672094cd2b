"""The exceptions that stablenum raises: a halted run, a failed program, a wrong setting or argument."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = [
    "CheckpointError",
    "NonFiniteError",
    "PoisonedStateError",
    "ProgramError",
    "RecoveryStopped",
    "ReplicasPartedError",
    "bad_field",
    "bad_type",
    "either",
]


class NonFiniteError(ArithmeticError):
    """Raised when training stops because too many steps in a row were non-finite.

    The error is raised on the host only, after the step has been skipped: parameters and optimizer
    state still have the values they had before that step.

    Attributes:
        metrics: the skipped step as ``last`` (torch) or ``metrics`` (JAX) reports it.
        history: the steps in the recorder, oldest first.

    Example:
        >>> raise NonFiniteError("3 steps in a row were skipped")
        Traceback (most recent call last):
        stablenum.NonFiniteError: 3 steps in a row were skipped
    """

    def __init__(
        self,
        message: str,
        *,
        metrics: Mapping[str, Any] | None = None,
        history: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        super().__init__(message)
        self.metrics = dict(metrics or {})
        self.history = [dict(row) for row in history]

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions are pickled when they cross process boundaries (DataLoader workers, launchers).
        return (_rebuild, (str(self), self.metrics, self.history))


def _rebuild(message: str, metrics: dict[str, Any], history: list[Any]) -> NonFiniteError:
    return NonFiniteError(message, metrics=metrics, history=history)


class ProgramError(RuntimeError):
    """Raised by :func:`stablenum.diff` if one of the two programs fails while it runs.

    The message names the program (left or right), the user's line and the original error, which is the
    ``__cause__``. It is also raised if nothing differs but a result is NaN or infinite in both programs; the
    message then names where in each of them. Models, optimizers, arguments and generators are as they were
    before.

    Example:
        >>> raise ProgramError("the left program failed at pair.py:12 (y = 1 / 0): ZeroDivisionError: ...")
        Traceback (most recent call last):
        stablenum.ProgramError: the left program failed at pair.py:12 (y = 1 / 0): ZeroDivisionError: ...
    """


class ReplicasPartedError(RuntimeError):
    """Raised when replicas of the parameters or of the optimizer's state no longer hold the same bits.

    It is raised on all ranks alike, after the step, by ``check_replicas_every`` (PyTorch) and
    ``check_replicas`` (JAX). The check changes nothing.

    Attributes:
        step: the number of the last step; None if it is not known.
        parted: which tensors differ, and where: a list of (parameter, tensor, replicas). The replicas are
            the ranks (PyTorch) or devices (JAX) that differ from the majority; all that hold the tensor, if
            there is no majority.

    Example:
        >>> raise ReplicasPartedError("replicas have parted: rank 2 differs from ranks 0, 1, 3 in ...")
        Traceback (most recent call last):
        stablenum.ReplicasPartedError: replicas have parted: rank 2 differs from ranks 0, 1, 3 in ...
    """

    def __init__(
        self,
        message: str,
        *,
        step: int | None = None,
        parted: Sequence[tuple[str, str, tuple[int, ...]]] = (),
    ) -> None:
        super().__init__(message)
        self.step, self.parted = step, list(parted)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild_parted, (str(self), self.step, self.parted))


def _rebuild_parted(message: str, step: int | None, parted: list[Any]) -> ReplicasPartedError:
    return ReplicasPartedError(message, step=step, parted=parted)


class RecoveryStopped(SystemExit):  # as KeyboardInterrupt, it ends a program and is no error
    """Raised when a recovery gives up: the model and the optimizer are in the last good state.

    A program that does not catch it ends with exit code 3, by which a launcher can tell that starting it
    again would not help. It is a :class:`SystemExit`, so that ``except Exception`` around a training step
    cannot turn it into an endless loop.

    Attributes:
        report: what happened, which batches are suspected, and what was tried.
        step: the step of the good state.
        code: the exit code.

    Example:
        >>> str(RecoveryStopped("The training was stopped at step 812: ...", step=300))
        'The training was stopped at step 812: ...'
    """

    def __init__(self, report: str, *, step: int) -> None:
        super().__init__(3)
        self.report, self.step = report, step

    def __str__(self) -> str:
        return self.report

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild_stopped, (self.report, self.step))


def _rebuild_stopped(report: str, step: int) -> RecoveryStopped:
    return RecoveryStopped(report, step=step)


class PoisonedStateError(ArithmeticError):
    """Raised when a state that is not finite is to be saved; nothing has been written.

    Attributes:
        step: the step of the state; None if it is not known.
        names: the entries that are not finite, such as ``"optimizer.state.3.exp_avg_sq"``.

    Example:
        >>> raise PoisonedStateError("step 100 is not saved, because model.weight (1 NaN of 8) is not finite")
        Traceback (most recent call last):
        stablenum.PoisonedStateError: step 100 is not saved, because model.weight (1 NaN of 8) is not finite
    """

    def __init__(self, message: str, *, step: int | None = None, names: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.step, self.names = step, tuple(names)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild_poisoned, (str(self), self.step, self.names))


def _rebuild_poisoned(message: str, step: int | None, names: tuple[str, ...]) -> PoisonedStateError:
    return PoisonedStateError(message, step=step, names=names)


class CheckpointError(RuntimeError):
    """Raised when a checkpoint cannot be written, or none can be loaded.

    A save that fails leaves the older checkpoints as they are, and a load that fails leaves the state as it
    is.

    Attributes:
        reasons: for each checkpoint that was tried, by the name of its folder, why it cannot be loaded.

    Example:
        >>> raise CheckpointError("step 100 could not be saved in run: No space left on device")
        Traceback (most recent call last):
        stablenum.CheckpointError: step 100 could not be saved in run: No space left on device
    """

    def __init__(self, message: str, *, reasons: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.reasons = dict(reasons or {})

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild_checkpoint, (str(self), self.reasons))


def _rebuild_checkpoint(message: str, reasons: dict[str, str]) -> CheckpointError:
    return CheckpointError(message, reasons=reasons)


def bad_field(field: str, allowed: str, got: object, *, hint: str = "") -> ValueError:
    """Return a ValueError that names the field, the allowed values and the value that was given."""
    try:
        shown = repr(got)
    except RecursionError:  # lists that are nested too deeply
        shown = f"a {type(got).__name__} that is nested too deeply to be shown"
    shown = shown if len(shown) <= 200 else shown[:197] + "..."
    return ValueError(f"{field} must be {allowed}; got {shown}." + (f" {hint}" if hint else ""))


def bad_type(field: str, allowed: str, got: object, *, hint: str = "") -> TypeError:
    """Return a TypeError that names the field, what is allowed and the type that was given.

    Example:
        >>> raise bad_type("model", "a torch.nn.Module or None", 3)
        Traceback (most recent call last):
        TypeError: model must be a torch.nn.Module or None; got int.
    """
    return TypeError(f"{field} must be {allowed}; got {type(got).__name__}." + (f" {hint}" if hint else ""))


def either(choices: Iterable[str]) -> str:
    """Return a list of at least one choice as messages show it.

    Example:
        >>> either(["a", "b", "c"])
        'a, b or c'
    """
    *others, last = choices
    return f"{', '.join(others)} or {last}" if others else last
