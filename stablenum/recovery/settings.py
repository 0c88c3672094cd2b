"""The settings of a recovery: when snapshots are taken, what is a symptom, and what is done about it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from stablenum._support.pickled_fields import pickled_by_name
from stablenum._support.settings_checks import check_callable, check_field, check_flag
from stablenum.errors import bad_field, bad_type
from stablenum.guard.recorder import CAPACITY

__all__ = [
    "RecoveryPolicy",
    "RecoverySettings",
    "Response",
    "absolute_folder",
    "check_functions",
    "make_policy",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """What one attempt to recover does: it always goes back to a good snapshot.

    Args:
        older: how many good snapshots to go back beyond the newest one that the fault cannot have reached.
        skip_data: whether the data between the snapshot and the symptom are left out, as PaLM did (Chowdhery
            et al. 2022, arXiv 2204.02311, section 5.1). If not, the same batches follow again: a fault of the
            machine does not come back, and the run is then the one that it would have been.
        skip_further: how many batches after the symptom are left out too, because a stretch of bad data may
            go on; 0 without ``skip_data``.
        rate: a factor on the learning rate, above 0 and at most 1.
        clip: the largest gradient norm, in multiples of the median norm of the steps before the symptom;
            None leaves the clip threshold alone. A lower threshold that is already set stays.
        wider: whether a guard with ``escalate`` computes one format wider.
        steps: for how many steps after that of the symptom ``rate``, ``clip`` and ``wider`` hold.

    Raises:
        ValueError: a field is out of its range, there is something to hold and ``steps`` is 0, or
            ``skip_further`` is given without ``skip_data``.
        TypeError: ``skip_data`` or ``wider`` is not a bool.

    Example:
        >>> Response(older=1, rate=0.5, steps=200).rate
        0.5
    """

    older: int = 0
    skip_data: bool = True
    skip_further: int = 0
    rate: float = 1.0
    clip: float | None = None
    wider: bool = False
    steps: int = 0

    def __post_init__(self) -> None:
        check_field(self, "older", whole=True, at_least=0)
        check_field(self, "skip_further", whole=True, at_least=0)
        check_field(self, "rate", above=0.0, at_most=1.0)
        check_field(self, "steps", whole=True, at_least=0)
        check_flag("Response.skip_data", self.skip_data)
        check_flag("Response.wider", self.wider)
        if self.clip is not None:
            check_field(self, "clip", above=0.0)
        if self.skip_further and not self.skip_data:
            raise bad_field("Response.skip_further", "0 where skip_data is False", self.skip_further)
        if self.eases and not self.steps:
            raise bad_field("Response.steps", "at least 1 where rate, clip or wider is given", self.steps)

    @property
    def eases(self) -> bool:
        """Whether the steps after the rewind are taken more carefully for a while."""
        return self.rate != 1.0 or self.clip is not None or self.wider


_RESPONSES = (
    Response(skip_further=100),
    Response(older=1, skip_further=200, rate=0.5, steps=200),
    Response(older=2, skip_further=300, rate=0.25, clip=1.0, steps=400),
)


@pickled_by_name
@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPolicy:
    """When to go back, how far, and how often.

    A fault often shows late, so a snapshot is good only when ``good_after`` further steps have passed without
    a symptom. A symptom has a likely origin: the first step of a row of skips or of high values, or the first
    step after the last check that found nothing. The run goes back to the newest snapshot that was good by
    then. If there is none, it goes back to the oldest.

    The first symptom of a fault gets the first response. If another symptom comes before the run is
    ``forget_after`` steps past it, it is the same fault, which gets the next response. When the responses are
    used up, or ``budget`` rewinds were made in all, the run stops in the last good state
    (:class:`stablenum.RecoveryStopped`).

    Args:
        every: steps between two snapshots, at least 1.
        keep: how many good snapshots are held in host memory, at least 1, besides at most 4 that are not yet
            good.
        good_after: steps without a symptom after which a snapshot is good, at least 0.
        check_every: steps between two looks at the record and the state, 1 to 127: the record holds 128, and
            a row is judged when the next one is there.
        skips_in_a_row: so many skipped steps in a row are a symptom; None for never. Skips with which a
            dynamic loss scale comes down do not count.
        runaway_steps: the median loss or gradient norm of so many applied steps is compared with the steps
            before them; None for never. At least 3.
        runaway_threshold: how far above their median it must be to be a symptom, in robust standard
            deviations (1.4826 MAD, of the logarithms where all are positive; at least 1 % of the median and
            1 % of the run's first values), above 0. A norm must also be 10 times the median.
        window: how many ordinary steps are compared with, at least 8. There is no verdict before there are
            half as many, at the beginning of the run and after going back to it.
        audit: whether parameters and moments are measured at each snapshot. Symptoms are negative second
            moments, those that no gradients make, and a parameter whose norm more than doubles and grows by
            more than 10 times its largest change so far.
        responses: what the attempts at one fault do, in order; at least one.
        budget: how many rewinds the whole run may make, at least 1. Restarts do not refill it.
        forget_after: steps after a symptom's step from which on a further symptom is another fault.
        buffer_threshold: a buffer that more than doubles in a step, by more than so many times its largest
            change of about the last ``window`` steps, is a symptom; above 0, None for never. The running
            statistics of a layer are judged together, other buffers of 2 to 65,536 floating-point numbers by
            themselves.

    Raises:
        ValueError: a field is out of its range.
        TypeError: a field has a wrong type.

    Example:
        >>> RecoveryPolicy(every=50).good_after
        128
    """

    every: int = 100
    keep: int = 3
    good_after: int = 128
    check_every: int = 10
    skips_in_a_row: int | None = 8
    runaway_steps: int | None = 20
    runaway_threshold: float = 6.0
    window: int = 128
    audit: bool = True
    responses: tuple[Response, ...] = _RESPONSES
    budget: int = 10
    forget_after: int = 300
    buffer_threshold: float | None = 10.0  # last: pickles of 0.1.0 have the values in this order

    def __post_init__(self) -> None:
        for name, low in (("every", 1), ("keep", 1), ("good_after", 0), ("window", 8), ("budget", 1)):
            check_field(self, name, whole=True, at_least=low)
        check_field(self, "forget_after", whole=True, at_least=0)
        check_field(self, "check_every", whole=True, at_least=1, at_most=CAPACITY - 1)
        check_field(self, "runaway_threshold", above=0.0)
        if self.skips_in_a_row is not None:
            check_field(self, "skips_in_a_row", whole=True, at_least=1)
        if self.runaway_steps is not None:
            check_field(self, "runaway_steps", whole=True, at_least=3)
        if self.buffer_threshold is not None:
            check_field(self, "buffer_threshold", above=0.0)
        check_flag("RecoveryPolicy.audit", self.audit)
        self._check_responses()

    def _check_responses(self) -> None:
        given = self.responses
        responses = (given,) if isinstance(given, Response) else given
        if not isinstance(responses, (tuple, list)) or not all(isinstance(r, Response) for r in responses):
            raise bad_type("RecoveryPolicy.responses", "a tuple of Response", given)
        if not responses:
            raise bad_field("RecoveryPolicy.responses", "at least one Response", given)
        object.__setattr__(self, "responses", tuple(responses))


class RecoverySettings(TypedDict, total=False):
    """The fields of :class:`RecoveryPolicy`, as keyword arguments."""

    every: int
    keep: int
    good_after: int
    check_every: int
    skips_in_a_row: int | None
    runaway_steps: int | None
    runaway_threshold: float
    window: int
    audit: bool
    responses: tuple[Response, ...]
    budget: int
    forget_after: int
    buffer_threshold: float | None


def make_policy(policy: RecoveryPolicy | None, overrides: RecoverySettings) -> RecoveryPolicy:
    """Return the policy that was given, or one of the fields that were given.

    Raises:
        TypeError: both were given, a field is unknown, or ``policy`` is something else.
        ValueError: a field is out of its range.
    """
    if policy is None:
        return RecoveryPolicy(**overrides)
    if not isinstance(policy, RecoveryPolicy):
        raise bad_type("policy", "a RecoveryPolicy or None", policy)
    if overrides:
        raise TypeError(
            f"policy or its fields must be given, not both; got a policy and {', '.join(overrides)}. "
            "Use dataclasses.replace(policy, ...)."
        )
    return policy


def check_functions(**given: object) -> None:
    """Check options that are functions or None.

    Raises:
        TypeError: one of them is neither.
    """
    for name, value in given.items():
        if value is not None:
            check_callable(name, value, "a function or None")


def absolute_folder(folder: object) -> Path | None:
    """Return a folder that was given as a path that stays the same if the program changes its own.

    Raises:
        TypeError: it is no path.
    """
    if folder is None:
        return None
    if not isinstance(folder, str | os.PathLike):
        raise bad_type("folder", "a path or None", folder)
    return Path(folder).absolute()
