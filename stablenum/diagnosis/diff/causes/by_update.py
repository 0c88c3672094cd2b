"""Name the cause of a difference between two updates from the numbers: what is the difference made of?"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from stablenum.diagnosis.diff.causes.by_law import (
    LEAST_POWER,
    Found,
    cause_of_laws,
    cause_of_rates,
    is_limit,
    near,
)
from stablenum.diagnosis.diff.causes.formulas.update_laws import Law, law_of
from stablenum.diagnosis.diff.places.results import Update
from stablenum.diagnosis.diff.sides.equality import SAME_ENTRIES, SAME_UPDATE

__all__ = ["Told", "cause_of_updates", "epsilon_like", "multiple_of"]

# So many entries tell a law from others: one has three constants, rate, epsilon and decay.
_FEWEST = 4
# So many entries of one parameter tell the constants of its own law, or where updates differ most: more than
# twice as many as there are constants.
_ENOUGH = 8
# Factors are the same that differ by less, and an epsilon of a clip changes one by less: torch adds 1e-6 to
# the norm. Chosen, not measured.
_ALIKE, _CLIP_EPSILON = 1e-3, 1e-3
# An epsilon changes the smallest gradients so many times as much as the largest, and nearly always a smaller
# one by more: of the entries in order, no larger part may change by more than the one before. Chosen, not
# measured.
_MUCH_MORE, _SOME_RISES = 4, 0.1
_MOST_NAMED = 3  # parameters in a sentence that says more than their names; chosen, not measured
_OF_TORCH = 1e-6  # what torch.nn.utils.clip_grad_norm_ adds to the norm
# So near is the epsilon that a factor gives, which is 1 but for a part of a millionth. Chosen, not measured.
_ROUGH = 1e-2
# What this is was not tried.
ONE_FACTOR = (
    "the two updates differ by one factor: of the rate, a schedule or momentum, or of gradients that one "
    "side clips or scales."
)
# What an optimizer does in the same way to all parameters.
_OF_ALL = {"bias_correction", "momentum_dampening", "nesterov"}


class Told(NamedTuple):
    """A cause of updates.

    Attributes:
        code, sentence, evidence: as in a cause.
        made: the right side's changes with what the left side does, parameter by parameter, None where they
            stay as they are; None if that cannot be tried, or if the numbers only suggest the cause.
    """

    code: str
    sentence: str
    evidence: str
    made: Sequence[Any] | None = None


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known of the operations of both updates; see ``cause_of_updates``."""

    names: Sequence[str]
    numbers: tuple[Collection[float], Collection[float]]
    clips: tuple[int, int]

    @property
    def every(self) -> set[float]:
        """The constants of both sides."""
        return {*self.numbers[0], *self.numbers[1]}

    @property
    def clip_named(self) -> bool:
        """Whether a side calls something that clips."""
        return any("clip" in n or n in ("norm", "clamp") for n in self.names)

    @property
    def limited(self) -> bool:
        """Whether a side may clip."""
        return self.clip_named or max(self.clips) > 0


def cause_of_updates(
    updates: Sequence[Update],
    names: Sequence[str],
    numbers: tuple[Collection[float], Collection[float]] = ((), ()),
    clips: tuple[int, int] = (0, 0),
) -> Told | None:
    """Return the cause; None if no simple rule explains the difference.

    Args:
        updates: the parameters, those included whose updates agree.
        names: what the two sides call near the difference, such as "optax.clip_by_global_norm".
        numbers: the constants of each side's update, among them the decay rates of the moments.
        clips: how many factors of each side are limited, as those of clipped gradients are.
    """
    unlike = [u for u in updates if not _equal(u.left, u.right)]
    known = _Known(names, numbers, clips)
    found = _decay(updates, unlike) or _standstill(updates, unlike) or _each_clipped(updates, unlike, known)
    found = found or _by_value(updates, unlike, known)
    return found or (_of_laws(updates, unlike, known) if unlike else None)


def _of_laws(updates: Sequence[Update], unlike: Sequence[Update], known: _Known) -> Told | None:
    """Both sides follow a known law, with other constants or in another form, or differ by a factor."""
    laws = _laws_of(updates)
    if laws is None:
        return _of_each(updates, known) or _factor(updates, unlike, known)
    told = cause_of_laws(*laws, known.numbers, _norm(updates))
    if told is None and laws[0].name == "gradient":
        found = _factor(updates, unlike, known)
        if found is not None:
            return found
    told = told or cause_of_rates(*laws, known.numbers)
    if told is None:
        return None
    made = _by_law(updates, [laws[0]] * len(updates), [*laws[0].decayed])
    return Told(told.code, told.sentence, _both(laws), made if told.sure else None)


def _by_law(updates: Sequence[Update], laws: Sequence[Law | None], decayed: Sequence[bool]) -> list[Any]:
    """Return what laws of the left side make of the parameters; None for those that follow none."""
    return [
        None if law is None else law.update(u.parameter, u.gradient, decayed=on)
        for u, law, on in zip(updates, laws, decayed, strict=True)
    ]


def _of_each(updates: Sequence[Update], known: _Known) -> Told | None:
    """Each parameter follows a law, with constants of its own as in groups of parameters, and the laws of the
    two sides differ for one reason."""
    norm = _norm(updates)
    told = [u for u in updates if u.gradient.size >= _ENOUGH and np.any(u.gradient)]
    laws = [_laws_of([u]) for u in told]
    if None in laws:
        return None
    rows = [(u, pair) for u, pair in zip(told, laws, strict=True) if pair is not None]
    if known.limited and any(a.name == "gradient" for _, (a, _) in rows):
        return None  # a rate of its own may be a gradient that is clipped by itself
    found = [
        (u, p, cause_of_laws(*p, known.numbers, norm) or cause_of_rates(*p, known.numbers)) for u, p in rows
    ]
    unlike = [(u, p, reason) for u, p, reason in found if reason is not None]
    if not unlike or len({reason[0] for *_, reason in unlike}) > 1:
        return None
    (first, pair, (code, sentence, sure)), count = unlike[0], len(unlike)
    of = {u.name: a for u, (a, _) in rows}
    own = [of.get(u.name) for u in updates]
    made = _by_law(updates, own, [law is not None and law.decayed[0] for law in own]) if sure else None
    if code == "decay_coupling" and any(a.decay and b.decay for _, (a, b) in rows if (a, b) != pair):
        one_sided = [a.decay == 0 or b.decay == 0 for _, (a, b), _ in unlike]
        code = "decay_excluded" if all(one_sided) else code
    if count == len(rows):
        return Told(code, sentence, _both(pair), made)
    if code in _OF_ALL:
        code, sentence, _ = cause_of_rates(*pair, known.numbers) or Found(code, sentence)
    sentence = f"for {count} of {len(rows)} parameters, such as {first.name}, {sentence}"
    return Told(code, sentence, _both(pair), made)


def _standstill(updates: Sequence[Update], unlike: Sequence[Update]) -> Told | None:
    """One side does not move at all, as with a schedule that begins with a rate of 0."""
    for side in ("left", "right"):
        if unlike and not any(np.any(getattr(u, side)) for u in unlike):
            made = [0.0 * u.right for u in updates] if side == "left" else None
            sentence = f"the {side} side does not move in this step."
            return Told("schedule_offset", sentence, "All its updates are exactly 0.", made)
    return None


def _each(updates: Sequence[Update], unlike: Sequence[Update], changed: Sequence[Any]) -> list[Any]:
    """Return the changes of the updates that differ, and None for the others."""
    known = dict(zip(map(id, unlike), changed, strict=True))
    return [known.get(id(u)) for u in updates]


def _laws_of(updates: Sequence[Update]) -> tuple[Law, Law] | None:
    """Return the law of each side; None if one of them follows none that is known."""
    parameters, gradients = [u.parameter for u in updates], [u.gradient for u in updates]
    left = law_of(parameters, gradients, [u.left for u in updates])
    right = None if left is None else law_of(parameters, gradients, [u.right for u in updates])
    return None if left is None or right is None else (left, right)


def _both(laws: tuple[Law, Law]) -> str:
    return f"The left side follows {laws[0]}; the right side {laws[1]}."


def _each_clipped(updates: Sequence[Update], unlike: Sequence[Update], known: _Known) -> Told | None:
    """One side limits each gradient by itself: before an update that a factor of the gradient hardly changes,
    each tensor has an epsilon of its own, which is off by one limit over the norm of that tensor, or all have
    one that is off by a limit over the norm of all."""
    if min(known.clips) > 1 or max(known.clips) < 2:
        return None
    ratios, told, changed = [], [], list[Any]()
    for u in unlike:
        left, right = (law_of([u.parameter], [u.gradient], [made]) for made in (u.left, u.right))
        if u.gradient.size >= _FEWEST:
            if left is None or right is None or not left.epsilon or not right.epsilon:
                return None
            ratios.append(left.epsilon / right.epsilon)
            told.append(u)
        changed.append(
            None if left is None else left.update(u.parameter, u.gradient, decayed=left.decayed[0])
        )
    if not ratios:
        return None
    apart = max(ratios) > (1 + _ALIKE) * min(ratios)
    if not apart and not is_limit(ratios[0], _norm(unlike), known.every):
        return None
    return Told(
        "clip_per_tensor",
        "one side clips each tensor separately.",
        f"The gradients on the right are {min(ratios):.4g} to {max(ratios):.4g} times those on the left.",
        _each(updates, unlike, changed) if _one_limit(told, ratios, _norm(updates), known) else None,
    )


def _one_limit(updates: Sequence[Update], ratios: Sequence[float], norm: float, known: _Known) -> bool:
    """Return whether factors between single gradients are those of one limit, a number of the programs: one
    side limits the norm of each, and the other one that of all, or none."""
    norms = [_norm([u]) for u in updates]
    for limit in (n for n in known.every if n > 0):
        each = [min(1.0, limit / n) if n else 1.0 for n in norms]
        for whole in {1.0, min(1.0, limit / norm)} if norm else ():
            there = [e / whole for e in each]
            if any(all(map(_alike, ratios, x)) for x in (there, [1 / t if t else 0.0 for t in there])):
                return True
    return False


def _alike(a: float, b: float) -> bool:
    return near(a, b, _ALIKE)


def _by_value(updates: Sequence[Update], unlike: Sequence[Update], known: _Known) -> Told | None:
    """One side clips each entry of the gradients to a number of the program, before an update that is linear
    in them. Gradients that one factor scales would fit any limit that is far below them."""
    if all(multiple_of(u.left - u.right, u.gradient) is not None for u in unlike):
        return None
    largest = max((float(np.abs(u.gradient).max()) for u in unlike if u.gradient.size), default=0.0)
    for limit in sorted(n for n in known.every if 0.0 < n < largest) if known.clip_named else ():
        cut = [np.clip(u.gradient, -limit, limit) - u.gradient for u in unlike]
        factors = [multiple_of(u.left - u.right, c) for u, c in zip(unlike, cut, strict=True)]
        told = [f for f in factors if f is not None]
        if len(told) == len(factors) and max(told) - min(told) <= SAME_UPDATE * max(map(abs, told)):
            side = "left" if told[0] < 0 else "right"
            return Told(
                "clip_missing",
                f"only the {side} side clips each entry of the gradients, to {limit:.6g}.",
                "The two updates differ by a multiple of what that cuts off.",
                _each(updates, unlike, [u.right + f * c for u, f, c in zip(unlike, told, cut, strict=True)]),
            )
    return None


def _equal(a: Any, b: Any) -> bool:
    # Differences below 1e-308 have no digits in float64.
    scale = max(float(np.abs(a).max()), float(np.abs(b).max()), 1e-300) if a.size else 1.0
    return bool((np.abs(a - b) <= SAME_ENTRIES * scale).all())


def _decay(updates: Sequence[Update], unlike: Sequence[Update]) -> Told | None:
    """The difference is a multiple of the parameters: weight decay."""
    fits = [multiple_of(u.left - u.right, u.parameter) for u in unlike]
    if not fits or any(f is None and u.differs for u, f in zip(unlike, fits, strict=True)):
        return None
    changed = [u.right + (f or 0.0) * u.parameter for u, f in zip(unlike, fits, strict=True)]
    made = _each(updates, unlike, changed)
    rates = [f for f in fits if f is not None]
    unlike = [u for u, f in zip(unlike, fits, strict=True) if f is not None]
    if not rates:
        return None
    if min(rates) < 0 < max(rates):
        return _decay_of_both(unlike, rates)._replace(made=made)
    rate = float(np.median(rates))
    evidence = f"The updates differ by {rate:.6g} times the parameter, element by element."
    side = "left" if rate < 0 else "right"  # the one whose update takes a part of the parameter away
    which, such, code = "the weights", "", "decay_coupling"
    if len(unlike) < sum(bool(np.any(u.parameter)) for u in updates):  # one that is zero shows no decay
        names = _named(unlike)
        which, such = f"{len(unlike)} of the {len(updates)} parameters", f", such as {names}" if names else ""
        code = "decay_excluded"
    laws = _laws_of(unlike)
    if laws is None:
        which = f"{which}{such}{',' if such else ''}"
        sentence = f"the two sides decay {which} by different amounts, or only the {side} side does."
        return Told(code, sentence, evidence, made)
    if all(law.decay for law in laws):
        sentence = f"the two sides decay {which} by different amounts{such}."
        return Told("decay_coupling", sentence, _both(laws), made)
    return Told(code, f"only the {side} side decays {which}{such}.", evidence, made)


def _decay_of_both(unlike: Sequence[Update], rates: Sequence[float]) -> Told:
    """Each side decays some parameters more than the other one does, or alone."""
    told = []
    for side, sign in (("left", -1), ("right", 1)):  # the one whose update takes a part of the parameter away
        more = [u for u, rate in zip(unlike, rates, strict=True) if rate * sign > 0]
        laws = _laws_of(more)
        alone = laws is not None and not all(law.decay for law in laws)
        said = f"only the {side} side decays" if alone else f"the {side} side takes away more of"
        told.append(f"{said} {_named(more) or f'{len(more)} parameters'}")
    evidence = (
        f"The updates differ by {min(rates):.6g} to {max(rates):.6g} times the parameter, element by element."
    )
    return Told("decay_excluded", ", and ".join(told) + ".", evidence)


def _named(updates: Sequence[Update]) -> str:
    return ", ".join(u.name for u in updates[:_MOST_NAMED] if u.name)


def _factor(updates: Sequence[Update], unlike: Sequence[Update], known: _Known) -> Told | None:
    """The update of one side is a multiple of the other side's. What the factor is made of is certain only
    where the programs' own numbers give it, as a limit over a norm."""
    added = [multiple_of(u.left - u.right, u.gradient) for u in unlike]
    if known.clip_named and all(f is not None for f in added):
        evidence = "The updates differ by a multiple of the gradient."
        own = [f for f in added if f is not None]
        held = [_of_gradient(u) for u in unlike]
        made = _each(updates, unlike, [u.right + f * u.gradient for u, f in zip(unlike, own, strict=True)])
        # Of the right side's gradients to the left's.
        ratios = [(h - f) / h if h else 0.0 for h, f in zip(held, own, strict=True)]
        if all(abs(f) < _CLIP_EPSILON * abs(h) for h, f in zip(held, own, strict=True)):
            sure = _is_epsilon(ratios, _norm(updates), known)
            return _CLIP_EPSILONS._replace(evidence=evidence, made=made if sure else None)
        if max(own) - min(own) <= _ALIKE * max(abs(f) for f in own):
            sure = is_limit(ratios[0], _norm(updates), known.every)
            return _CLIPPED._replace(evidence=evidence, made=made if sure else None)
        sure = _one_limit(unlike, ratios, _norm(updates), known)
        return _EACH_CLIPPED._replace(evidence=evidence, made=made if sure else None)
    fits = [multiple_of(u.left, u.right) for u in unlike]
    if any(f is None for f in fits):
        return None
    factors = [f for f in fits if f is not None]
    made = _each(updates, unlike, [f * u.right for u, f in zip(unlike, factors, strict=True)])
    spread = max(factors) / min(factors) - 1 if min(factors) > 0 else math.inf
    if spread > SAME_UPDATE:
        sure = known.limited and _one_limit(unlike, factors, _norm(updates), known)
        return Told(
            "clip_per_tensor" if known.limited else "scale",
            f"each update differs by a factor of its own, from {min(factors):.4g} to {max(factors):.4g}.",
            "Within each tensor the factor is the same.",
            made if sure or not known.limited else None,
        )
    factor = factors[0]
    evidence = f"Every update on the left is {factor:.9g} times that on the right."
    power = math.log2(factor)
    if known.clip_named and abs(factor - 1) < _CLIP_EPSILON:
        sure = _is_epsilon(factors, _norm(updates), known)
        return _CLIP_EPSILONS._replace(evidence=evidence, made=made if sure else None)
    limited = is_limit(factor, _norm(updates), known.every)
    if known.clip_named or limited:
        return _CLIPPED._replace(evidence=evidence, made=made if limited else None)
    if abs(power) >= LEAST_POWER and abs(power - round(power)) < SAME_ENTRIES:
        return Told("loss_scale_left_in", f"a factor of 2^{round(power)} is left in the gradients.", evidence)
    return Told("scale", ONE_FACTOR, evidence)


_CLIP_EPSILONS = Told("clip_epsilon", "the two sides clip with different epsilons.", "")
_CLIPPED = Told("clip_missing", "only one side clips the gradients, or the norms differ.", "")
_EACH_CLIPPED = Told("clip_per_tensor", "one side clips each tensor separately.", "")


def _is_epsilon(factors: Sequence[float], norm: float, known: _Known) -> bool:
    """Return whether a factor is that of an epsilon which is added to a norm: PyTorch's, or a number of the
    programs."""
    added = {abs(f - 1) * norm for f in factors}
    return all(any(near(x, n, _ROUGH) for n in {_OF_TORCH, *known.every}) for x in added)


def _of_gradient(update: Update) -> float:
    """Return how much of the gradient the left update holds, besides a multiple of the parameter."""
    columns = np.stack([np.ravel(update.gradient), np.ravel(update.parameter)], axis=1)
    held, *_ = np.linalg.lstsq(columns, np.ravel(update.left), rcond=None)
    return float(held[0])


def _norm(updates: Sequence[Update]) -> float:
    """Return the norm of all gradients."""
    return math.sqrt(sum(float((u.gradient**2).sum()) for u in updates))


def epsilon_like(updates: Sequence[Update]) -> Told | None:
    """Return code, sentence and evidence if the updates differ most where the gradient is small, as they do
    with another epsilon; None if they do not."""
    ratios, sizes = [], []
    for u in (u for u in updates if not _equal(u.left, u.right)):
        kept = (np.abs(u.right) > 0) & (np.abs(u.gradient) > 0)
        ratios.append(np.abs(u.left[kept] / u.right[kept] - 1).reshape(-1))
        sizes.append(np.abs(u.gradient[kept]).reshape(-1))
    ratio, size = np.concatenate(ratios or [np.zeros(0)]), np.concatenate(sizes or [np.zeros(0)])
    if ratio.size < _ENOUGH:
        return None
    order = np.argsort(size)
    quarter = max(ratio.size // 4, 1)
    small, large = float(ratio[order[:quarter]].mean()), float(ratio[order[-quarter:]].mean())
    rises = np.diff(ratio[order]) > SAME_ENTRIES * float(ratio.max())
    if small < _MUCH_MORE * large or rises.mean() > _SOME_RISES:
        return None
    return Told(
        "adam_epsilon_placement",
        "the updates differ most where the gradients are small, as with different epsilons.",
        f"For the smallest quarter of the gradients by {small:.2g}, for the largest by {large:.2g}.",
    )


def multiple_of(a: Any, b: Any) -> float | None:
    """Return c if a is c times b, element by element."""
    norm = float((b * b).sum())
    if not norm:
        return None
    c = float((a * b).sum()) / norm
    scale = float(np.abs(a).max())
    return c if scale and float(np.abs(a - c * b).max()) <= SAME_UPDATE * scale else None
