"""What both kinds of scenario share: an optimizer, an outcome, and how closely backends must agree."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from stablenum._support.settings_checks import check_choice, check_int, check_number
from stablenum.errors import bad_field, either
from stablenum.guard.config import GuardConfig

__all__ = [
    "DTYPES",
    "OPTIMIZERS",
    "Expected",
    "OptimizerSpec",
    "Outcome",
    "Tolerance",
    "check_guard_names",
    "check_name",
    "tensor_names",
]

OPTIMIZERS = ("sgd", "adam", "adamw")
DTYPES = ("float32", "bfloat16", "float16")


class Outcome(StrEnum):
    """The outcome of a run, judged by its parameters at the end."""

    SURVIVES = "survives"  # all parameters are finite, and the goal (if there is one) is reached
    DIES = "dies"  # some parameters are NaN or infinite
    STALLS = "stalls"  # the parameters equal the start bit for bit although the true gradients were not zero
    FAILS = "fails"  # the parameters are finite, but the goal is missed
    STOPS = "stops"  # the guard or the recovery ends the run, as configured, with good parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """An optimizer that every backend has.

    Args:
        name: ``"sgd"``, ``"adam"`` or ``"adamw"``.
        lr: the learning rate.
        momentum: the momentum of SGD.
        eps: the eps of Adam.
        weight_decay: L2 for SGD and Adam, decoupled for AdamW.

    Raises:
        ValueError: a field is out of its range.
    """

    name: str = "sgd"
    lr: float = 0.01
    momentum: float = 0.0
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if self.name not in OPTIMIZERS:
            raise bad_field("optimizer.name", f"one of {either(OPTIMIZERS)}", self.name)
        check_number("optimizer.lr", self.lr, at_least=0.0)
        check_number("optimizer.momentum", self.momentum, at_least=0.0, below=1.0)
        check_number("optimizer.eps", self.eps, at_least=0.0)
        check_number("optimizer.weight_decay", self.weight_decay, at_least=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The expected result of a scenario. A field that is None is not checked.

    Args:
        plain: the outcome without a guard.
        guarded: the outcome with a guard.
        skips: the number of steps that the guard skips.
        rewinds: how often the guarded run goes back to a snapshot.
        final_loss_scale: the loss scale after the last step.
        moved: for a stream, how far each tensor is from its start after the last guarded step, as a root mean
            square; checked to within a thousandth.

    Raises:
        ValueError: a field is out of its range.
    """

    plain: Outcome | None = None
    guarded: Outcome | None = None
    skips: int | None = None
    rewinds: int | None = None
    final_loss_scale: float | None = None
    moved: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        for name, outcome in (("plain", self.plain), ("guarded", self.guarded)):
            if outcome is not None:
                check_choice(f"expected.{name}", outcome, [o.value for o in Outcome])
        if self.skips is not None:
            check_int("expected.skips", self.skips, at_least=0)
        if self.rewinds is not None:
            check_int("expected.rewinds", self.rewinds, at_least=0)
        if self.final_loss_scale is not None:
            check_number("expected.final_loss_scale", self.final_loss_scale, above=0.0)
        if self.moved is not None:
            if not isinstance(self.moved, (tuple, list)):
                raise bad_field("expected.moved", "a list of numbers, one per tensor", self.moved)
            moved = tuple(check_number("expected.moved", number, at_least=0.0) for number in self.moved)
            object.__setattr__(self, "moved", moved)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """How far a backend may differ from NumPy. Decisions and loss scales must be equal.

    Args:
        norm: the relative tolerance for gradient norms and clip coefficients.
        loss: the relative tolerance for the recorded loss.
        params: the tolerance for the parameters at the end: the largest difference in a tensor divided by
            the largest number in it.
        why: the reason if the tolerance is wider than the standard one.

    Raises:
        ValueError: a field is out of its range.
    """

    norm: float = 1e-6
    loss: float = 0.0
    params: float = 1e-5
    why: str = ""

    def __post_init__(self) -> None:
        check_number("tolerance.norm", self.norm, at_least=0.0)
        check_number("tolerance.loss", self.loss, at_least=0.0)
        check_number("tolerance.params", self.params, at_least=0.0)
        if not isinstance(self.why, str):
            raise bad_field("tolerance.why", "a sentence", self.why)


def check_name(name: object) -> None:
    """Check that a scenario may have this name."""
    if not isinstance(name, str) or not name or name.split() != [name]:
        raise bad_field("name", "one word without spaces", name)


def tensor_names(count: int) -> list[str]:
    """Return the names of the tensors, for rules that select by name: their indices, as in a JAX list."""
    return [str(i) for i in range(count)]


def check_guard_names(guard: GuardConfig, count: int) -> None:
    """Check that the names in a guard's rules match tensors, of which there are ``count``.

    Raises:
        ValueError: a pattern matches no tensor.
    """
    if guard.unit_rule is not None:
        guard.unit_rule.included(tensor_names(count))
