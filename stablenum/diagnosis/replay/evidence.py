"""What a replay found, and what follows from it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from stablenum._support.pickled_fields import pickled_by_name
from stablenum.diagnosis.replay.causes import Cause
from stablenum.diagnosis.replay.findings import Finding

__all__ = ["Evidence", "Verdict"]


@pickled_by_name
@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything that a replay found; None for checks that were not made.

    Attributes:
        framework: "torch" or "jax", for the spelling of the remedy.
        findings: the first causes, from :func:`stablenum.diagnosis.replay.walk.first_causes`.
        loss_finite: whether the loss of the replay is finite.
        bad_gradients: the names of the gradients that are not finite.
        bad_parameters: the names of the parameters that were not finite before the step.
        bad_updates: the names of the parameters that are not finite after an update by finite gradients.
        labels: a description of what is wrong with the labels; "" if nothing is.
        reproduced: whether a second replay, or the replay of a step known to be bad, went wrong too.
        loss_scale: the loss scale of the gradients.
        unscaled_finite: whether gradients are finite at scale 1.
        norm_overflow: whether the gradients are finite but the plain sum of their squares is not.
        state: descriptions of problems in the optimizer's state, the worst first.
        settings: descriptions of settings of the optimizer that are not numbers.
        other_rank: whether another rank reported the failure, or the first finding is a collective that
            brought the value to this rank.
        differences: descriptions of what differs between the step and a replay that did not reproduce it.
        unreplayed: the error by which the replay itself failed; "" if it did not.
        unjudged: why a step that is known to have failed could not be judged; "" if it was.
        exploded: a description of the earlier step in which the parameters grew out of proportion; "" if none
            is known.
        tried: what came of the safe function on the recorded arguments: "finite", "not finite" or "raises";
            "" if it was not tried.
        untried: why the remedy was not tried; "" if it was, or if nobody has looked.
        left: further places on the way that give NaN or inf of their own, for which nothing was tried.
        only_loss: whether neither the backward pass nor the update gave NaN or inf, and nothing compared a
            NaN with a number.
        unbounded: a description of an objective that ran away below 0; "" if none is known to.
        poisoned: the names of buffers that the forward pass left NaN with a batch whose step was left out.
    """

    framework: str
    findings: tuple[Finding, ...] = ()
    loss_finite: bool | None = None
    bad_gradients: tuple[str, ...] = ()
    bad_parameters: tuple[str, ...] = ()
    bad_updates: tuple[str, ...] = ()
    labels: str = ""
    reproduced: bool | None = None
    loss_scale: float = 1.0
    unscaled_finite: bool | None = None
    norm_overflow: bool = False
    state: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    other_rank: bool = False
    differences: tuple[str, ...] = ()
    unreplayed: str = ""
    unjudged: str = ""
    exploded: str = ""
    tried: str = ""
    untried: str = ""
    left: tuple[str, ...] = ()
    only_loss: bool = False
    unbounded: str = ""
    poisoned: tuple[str, ...] = ()

    @property
    def first(self) -> Finding | None:
        """The first cause."""
        return self.findings[0] if self.findings else None

    @property
    def bad(self) -> bool:
        """Whether the replay itself went wrong."""
        return bool(
            self.findings
            or self.loss_finite is False
            or self.bad_gradients
            or self.bad_parameters
            or self.bad_updates
            or self.labels
            or self.norm_overflow
            or self.poisoned
            or self.unreplayed
            or self.unjudged
        )


@pickled_by_name
@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The cause, the evidence for it, and what to do.

    Attributes:
        cause: one of :class:`Cause`.
        what: what the cause means.
        evidence: descriptions of the facts.
        remedy: what to do.
        safe_function: the full name of the safe function; "" if there is none.
        code: a line of code that calls the safe function.
        tried: "finite" if the safe function, on the recorded arguments, has a finite value and derivative; ""
            if it was not tried.
        left: further places that give NaN or inf of their own, for which nothing was tried.
        patch: the user's lines with the safe function, as in a patch; empty if they were not changed.
        trial: what another run of the script has shown of the remedy, or why there was none.
    """

    cause: Cause
    what: str
    evidence: tuple[str, ...]
    remedy: str
    safe_function: str = ""
    code: str = ""
    tried: str = ""
    left: tuple[str, ...] = ()
    patch: tuple[str, ...] = ()
    trial: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            **asdict(self),
            "cause": self.cause.value,
            "evidence": list(self.evidence),
            "left": list(self.left),
            "patch": list(self.patch),
        }
