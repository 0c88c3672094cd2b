"""Rules on updates: whether parameters move, and by how much."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from stablenum.diagnosis.checkup.course import (
    HALFWAY_DOWN,
    LARGE_CHANGE,
    NEARLY_DOWN,
    NOT_DOWN,
    PARTLY_DOWN,
    Course,
    ParameterSeen,
    Probe,
    median,
    relative_change,
)
from stablenum.diagnosis.checkup.reading import Reading
from stablenum.diagnosis.checkup.symptoms import Complaint, Level, Symptom
from stablenum.diagnosis.checkup.wording import joined, lines_naming, places_of

__all__ = ["BY_RATE", "RULES"]

# Of a parameter's elements that have a gradient, more than this part stands still.
_MOSTLY = 0.5
# Adam's relative steps are about 1e-3; above LARGE_CHANGE a parameter is another one after a few steps, and
# below _SMALL it takes ten thousand steps to change by a tenth.
_LARGE, _SMALL = LARGE_CHANGE, 1e-5
# The first step may be so many times as large, and the next ones count by themselves, not only by their
# median.
_FIRST, _NEXT = 10, 3
# In fewer steps weights need not move far: at Adam's usual rate, 1e-3, weights of 1 move by 1 % in ten steps.
_FEWEST = 20
# Weights that change by less than this part of their size in the whole training hardly move.
_HARDLY = 0.01
# Weights that change by less than this part in the whole training move little.
_LITTLE = 0.1
# A loss that is so many times its first value has jumped.
_JUMP = 3.0
# Adam's steps are a tenth of the rate and more; much smaller ones are suspect after a state was loaded.
_OF_THE_RATE, _LOADED = 0.02, 0.06
# Smaller changes, relative to the parameter, may be lost in float32.
_ULP = 1e-6
# Steps that are so many times shorter are no longer those of the rate.
_SHORTER = 100.0
# Scales of so many steps show a course; float16 gradients of any use need none above this.
_LEAST_SCALES, _BOUNDLESS = 10, 2.0**60
# No optimizer has a larger eps by default than this.
_USUAL_EPS = 1e-5
# A gradient is far below eps if it is less than this part of a usual one; an eps that was raised is suspect
# as soon as it matters. Gradients that many times above eps do not notice it.
_FAR_BELOW, _FAR_ABOVE = 0.1, 10
# A rate so far below its largest trains nothing more.
_NEXT_TO_NOTHING = 1e-3
# Of more than so many rates, this part is 0.
_RATES, _AT_ZERO = 3, 0.3
# Of more than so many rates, this part is next to nothing.
_MORE_RATES, _AT_NOTHING = 10, 0.5
# Steps with such a cosine between change and gradient go uphill; those of so many steps show a course.
_UPHILL, _LEAST_STEPS, _NEARLY_ALL = 0.02, 3, 0.9
# With rates of 1 and more, a weight decay up to this one is not what is wrong.
_USUAL_DECAY, _HUGE_RATE = 0.1, 1.0
# A weight has shrunk to less than this part of its size, of which it lost this much along itself; or it has
# grown so many times, by changes of which so many have at least this part along it.
_SHRUNK, _ALONG, _GROWN, _LEAST_ALONG = 0.5, 0.5, 2, 3
# Complex changes are so much nearer to a gradient than to its conjugate. Chosen: with the conjugate the
# difference is below 0 for plain steps, and momentum and Adam's denominators move it by less.
_MIRRORED = 0.3
# Weight decay must be able to do at least this part of the shrinking that is laid to it; weights of 0 would
# have shrunk without bound. Chosen, not measured: rates and momentum are known to a factor of two or so.
_ITS_PART, _TINY = 0.5, 1e-30
# Nearly all of more than so many steps are clipped, to norms so many times smaller.
_CLIPS, _CLIPPED, _SMALLER = 2, 0.95, 10
# The last measured steps that are looked at: a last stage counts.
_LAST = 3
# Where a state was loaded, one step fewer than these shows that it is stale.
_STALE, _STALE_AFTER_LOADING = 3, 2
# A scale is where it ends if it is there in the last quarter of the steps.
_QUARTERS = 4
_MOST_NAMED = 4  # entries of a bad state that are shown; chosen, not measured

# The cure of such a weight decay.
BY_RATE = "lower the learning rate: weight decay is multiplied by it, and is itself of a usual size"
_NOT_NARROW = (
    "the gradients are too small for this rate: do not scale the loss down, raise the rate, or use an "
    "optimizer whose steps do not depend on the gradient's size, such as Adam with a small eps"
)


def _rate(course: Course, readings: Sequence[Reading]) -> Iterator[Complaint]:
    rates = list(dict(course.rates).values())
    most = max(rates, default=0.0)
    nothing = [i for i, rate in enumerate(rates) if rate == 0.0]
    little = [i for i, rate in enumerate(rates) if rate < _NEXT_TO_NOTHING * most]
    common: dict[str, Any] = {
        "place": course.scheduled[0] if course.scheduled else course.optimizer_place,
        "places": places_of(course.optimizer_place),
    }
    if len(rates) > _RATES and len(nothing) > _AT_ZERO * len(rates):
        since = nothing[0] if len(nothing) < len(rates) else 0
        yield Complaint.of(
            Symptom.RATE_ZERO,
            Level.FAULT,
            f"the rate is 0 in {len(nothing)} of {len(rates)} steps, from step {since} on",
            since=since,
            **common,
        )
    elif len(rates) > _MORE_RATES and len(little) > _AT_NOTHING * len(rates) and course.fall() < HALFWAY_DOWN:
        yield Complaint.of(
            Symptom.RATE_ZERO,
            Level.WARNING,
            f"the rate is below {_NEXT_TO_NOTHING:g} times its largest, {most:.2g}, in {len(little)} of "
            f"{len(rates)} steps, from step {little[0]} on",
            since=little[0],
            what="the learning rate is next to 0, so almost nothing moves",
            **common,
        )


def _lost(course: Course, readings: Sequence[Reading]) -> Iterator[Complaint]:
    lost: dict[str, ParameterSeen] = {}
    # Where gradients are accumulated, nothing moves in most steps.
    moved = {probe.step for probe in course.probes if any(p.update > 0 for p in probe.parameters)}
    for name in course.names():
        history = [p for step, p in course.history(name) if step in moved]
        seen = [p for p in history if p.has_gradient and p.gradient > 0 and p.rate != 0.0]
        if len(seen) > 1 and median([p.still for p in seen[-_LAST:]]) > _MOSTLY:  # a last stage counts
            lost[name] = seen[-1]
    if not lost:
        return
    first = next(iter(lost.values()))
    narrow = any("16" in p.dtype or "8" in p.dtype for p in lost.values())
    if not narrow and _is_left_out(course, lost):
        yield _frozen(course, lost)
        return
    total = sum(p.size for p in lost.values())
    share = total / max(1, sum(course.history(n)[-1][1].size for n in course.names()))
    if not narrow and share < _MOSTLY:
        return
    yield Complaint.of(
        Symptom.LOST_UPDATES,
        Level.FAULT if narrow else Level.WARNING,
        f"{joined(list(lost))}: {first.still:.0%} of the elements of {first.dtype} that have a gradient "
        f"did not change (weights {first.weight:.2g}"
        + (")" if math.isnan(first.rate) else f", rate {first.rate:.2g})"),
        parameters=tuple(lost),
        place=course.optimizer_place,
        places=places_of(
            course.initialised.get(next(iter(lost))),
            *(lines_naming(first.dtype, course.step_place) if narrow else ()),
        ),
        **({} if narrow else {"cure": _NOT_NARROW}),
    )


def _is_left_out(course: Course, still: dict[str, ParameterSeen]) -> bool:
    """Return whether parameters never move although their gradients, relative to them, are large enough for
    the rate; or if the rate is not known, larger than those of others that do."""
    if any(p.update != 0 for name in still for _, p in course.history(name)[-_LAST:]):
        return False
    last = [course.history(name)[-1][1] for name in course.names() if name not in still]
    least = min((p.gradient / p.weight for p in last if p.update > 0 and p.weight > 0), default=0.0)
    pulls = [(p.gradient / p.weight, p.rate) for p in still.values() if p.weight > 0]
    return any(pull > least if math.isnan(rate) else rate * pull > _ULP for pull, rate in pulls)


def _frozen(course: Course, still: dict[str, ParameterSeen]) -> Complaint:
    """Return the complaint of parameters that have gradients and never move at all."""
    share = sum(p.size for p in still.values()) / sum(course.history(n)[-1][1].size for n in course.names())
    return Complaint.of(
        Symptom.NOT_IN_OPTIMIZER,
        Level.WARNING if share > _MOSTLY and course.fall() < HALFWAY_DOWN else Level.NOTE,
        f"{joined(list(still))}: gradients, but not one element changes any more",
        cure="check what the optimizer leaves out (a parameter group, a mask, the labels of "
        "optax.multi_transform); if it is on purpose, these gradients need not be computed",
        parameters=tuple(still),
        place=course.optimizer_place,
    )


def _sizes(course: Course, readings: Sequence[Reading]) -> Iterator[Complaint]:
    """Yield steps that are too large or too small for the loss to fall."""
    fall = course.fall()
    from_zero = course.began_at_zero()
    changes = {probe.step: _change(probe, from_zero) for probe in course.probes}
    changes = {step: change for step, change in changes.items() if not math.isnan(change)}
    per_step = list(changes.values())
    if not per_step or math.isnan(fall):
        return
    usual = median(per_step)
    # The first steps of Adam have the size of the rate, whatever the gradient.
    large = per_step[0] > _FIRST * _LARGE or max(*per_step[1 : _NEXT + 1], usual, 0.0) > _LARGE
    shown = f"the median weight changes by {usual:.2g} of its size per step{_at_rates(course, changes)}"
    came = f"the loss {'fell' if fall >= 0 else 'rose'} by {abs(fall):.1%} in {course.steps} steps"
    jumped = max(course.values) > _JUMP * abs(course.values[0]) and fall < HALFWAY_DOWN
    if large and (fall < NOT_DOWN or jumped):
        yield Complaint.of(
            Symptom.STEPS_TOO_LARGE,
            Level.FAULT,
            (shown, came),
            place=course.optimizer_place,
            places=course.scheduled,
        )
    elif (
        course.steps >= _FEWEST
        and fall > -NOT_DOWN
        and (  # a loss that rises has another reason
            ((usual < _SMALL or usual * course.steps < _LITTLE) and fall < NOT_DOWN / 2)
            or (usual * course.steps < _HARDLY and fall < HALFWAY_DOWN)
        )
    ):
        yield Complaint.of(
            Symptom.STEPS_TOO_SMALL,
            Level.NOTE if course.loaded else Level.WARNING,
            (shown, came),
            place=course.scheduled[0] if course.scheduled else course.optimizer_place,
            places=places_of(course.optimizer_place),
        )


def _uphill(course: Course, readings: Sequence[Reading]) -> Iterator[Complaint]:
    """Yield updates that have the sign of the gradients, while the loss rises."""
    cosines = [rise for probe in course.probes if not math.isnan(rise := probe.rise())]
    uphill = [rise for rise in cosines if rise > _UPHILL]
    if len(cosines) < _LEAST_STEPS or len(uphill) < _NEARLY_ALL * len(cosines) or not course.fall() < 0:
        return
    shown = (
        f"in {len(uphill)} of {len(cosines)} measured steps parameters move along their gradients, with a "
        f"cosine of {median(uphill):.2g} (without weight decay)"
    )
    values = course.values
    asked = any(settings.get("maximize") for _, settings in course.settings)
    yield Complaint.of(
        Symptom.UPHILL_UPDATES,
        # A likelihood, or what the script itself calls a maximum, may well rise.
        Level.NOTE if asked or min(values) <= 0 else Level.WARNING,
        (shown, f"the loss rose from {values[0]:.3g} to {values[-1]:.3g}"),
        place=course.optimizer_place,
        places=places_of(*course.made[1:], *course.scheduled),
    )


def _mirrored(course: Course, readings: Sequence[Reading]) -> Iterator[Complaint]:
    """Yield complex parameters that follow JAX's gradient and not its conjugate."""
    found: dict[str, list[float]] = {}
    for probe in course.probes:
        for p in probe.parameters:
            if not math.isnan(p.mirrored):
                found.setdefault(p.name, []).append(p.mirrored)
    names = [n for n, seen in found.items() if len(seen) >= _LEAST_STEPS and median(seen) > _MIRRORED]
    if not names or course.fall() > NEARLY_DOWN:
        return
    yield Complaint.of(
        Symptom.UPHILL_UPDATES,
        Level.FAULT if course.fall() < NOT_DOWN else Level.WARNING,
        f"{joined(names)}: the change is nearer to the gradient than to its conjugate, by a cosine of "
        f"{median(found[names[0]]):.2g}",
        parameters=tuple(names),
        place=course.step_place,
        places=places_of(course.optimizer_place),
        what="complex parameters follow the gradient as JAX returns it, so their imaginary parts move uphill",
        cure="conjugate the gradients before the optimizer reads them: grads = jax.tree.map(jnp.conj, grads)",
        expects="imaginary parts move downhill",
    )


def _change(probe: Probe, from_zero: Collection[str] = ()) -> float:
    """Return the median change of the weights that moved in a step, relative to their size."""
    moved = [p for p in probe.parameters if len(p.shape) > 1 and p.update > 0 and p.weight > 0]
    return median([relative_change(p, probe.step, from_zero) for p in moved])


def _at_rates(course: Course, steps: Collection[int]) -> str:
    """Return at which rates these steps were taken, in words; "" if that is not known."""
    rates = [rate for step, rate in course.rates if step in steps]
    if not rates:
        return ""
    least, most = f"{min(rates):.2g}", f"{max(rates):.2g}"
    return f", at a rate of {most}" if least == most else f", at rates from {least} to {most}"


def _eps(course: Course, readings: Sequence[Reading]) -> Iterator[Complaint]:
    for kind, settings in course.settings:
        eps = settings.get("eps")
        if eps is None or "ada" not in kind.lower():
            continue
        later = course.probes[-1].parameters if course.probes else ()
        far = _FAR_BELOW if eps <= _USUAL_EPS else 1.0
        small = [p for p in later if p.has_gradient and 0 < p.gradient < far * eps]
        if small and sum(p.size for p in small) > _MOSTLY * sum(p.size for p in later):
            worst = max(small, key=lambda p: p.size)
            yield Complaint.of(
                Symptom.EPS_DOMINATES,
                Level.FAULT if eps > _USUAL_EPS and not course.fall() > NEARLY_DOWN else Level.WARNING,
                f"eps is {eps:.2g}, the gradient of {worst.name} {worst.gradient:.2g} (RMS): its steps are "
                f"{worst.update / worst.rate if worst.rate else math.nan:.2g} of the learning rate",
                parameters=tuple(p.name for p in small),
                place=course.optimizer_place,
            )
            return


def _stale(course: Course, readings: Sequence[Reading]) -> Iterator[Complaint]:
    """Yield an optimizer of Adam's kind whose steps are far smaller than its rate although eps is not to
    blame: its second moments remember larger gradients."""
    eps = max((s.get("eps", 0.0) for kind, s in course.settings if "adam" in kind.lower()), default=None)
    if eps is None:
        return
    small: list[tuple[int, ParameterSeen, float]] = []
    for probe in course.probes[-_LAST:]:
        moving = [p for p in probe.parameters if p.update > 0 and p.rate > 0 and len(p.shape) > 1]
        seen = [p for p in moving if p.gradient > _FAR_ABOVE * eps and _is_adams(p, course)]
        ratios = [p.update / p.rate for p in seen]
        if seen and median(ratios) < (_OF_THE_RATE if course.loaded_state is None else _LOADED):
            small.append((probe.step, seen[0], median(ratios)))
    if len(small) == _STALE or (len(small) == _STALE_AFTER_LOADING and course.loaded_state is not None):
        step, worst, ratio = small[0]
        yield Complaint.of(
            Symptom.STALE_STATE,
            # At the end of a training that went well, gradients shrink faster than their averages.
            Level.FAULT
            if course.loaded_state
            else Level.NOTE
            if course.fall() > NEARLY_DOWN
            else Level.WARNING,
            f"steps are {ratio:.2g} times the learning rate (0.1 to 1 is usual), although the gradient of "
            f"{worst.name}, {worst.gradient:.2g} (RMS), is far above eps: the state is of larger gradients",
            since=step,
            place=course.loaded_state or course.optimizer_place,
            places=course.made,
        )


def _is_adams(p: ParameterSeen, course: Course) -> bool:
    """Return whether Adam, which has a second moment, moves a parameter.

    Where it is not known which optimizer does, all of the script must be of its kind.
    """
    moving = [kind for kind, settings in course.settings if "lr" in settings]
    return all("adam" in kind.lower() for kind in ([p.optimizer] if p.optimizer else moving))


def _decay(course: Course, readings: Sequence[Reading]) -> Iterator[Complaint]:
    shrunk: dict[str, float] = {}
    for name in course.names():
        seen = course.history(name)
        first, end = seen[0][1].weight, seen[-1][1].weight
        rates = [p.shrink for _, p in seen if not math.isnan(p.shrink)]
        known = len(seen) > 2 and len(seen[0][1].shape) > 1 and first > 0
        if not (known and end < _SHRUNK * first and median(rates) * (seen[-1][0] - seen[0][0]) > _ALONG):
            continue
        # Gradients may shrink weights, too, as where the best output is 0.
        if _reach_of_decay(course, first) > _ITS_PART * math.log(first / max(end, _TINY)):
            shrunk[name] = end / first
    matrices = [n for n in course.names() if len(course.history(n)[0][1].shape) > 1]
    decay = max((s.get("weight_decay", 0.0) for _, s in course.settings), default=0.0)
    rate = max((rate for _, rate in course.rates), default=0.0)
    grown = [name for name in matrices if decay and _grows(course.history(name))]
    if len(grown) > _MOSTLY * len(matrices):
        sizes = [p.weight for _, p in course.history(grown[0])]
        yield Complaint.of(
            Symptom.WEIGHT_DECAY,
            Level.FAULT,
            f"{grown[0]} has grown from {sizes[0]:.2g} to {sizes[-1]:.2g} along its own direction, and so "
            f"have {len(grown)} of {len(matrices)} weights",
            parameters=tuple(grown),
            place=course.optimizer_place,
            places=course.made,
            what="weight decay has the wrong sign or place, so weights grow by themselves",
            cure="put the weight decay in front of the factor -rate (optax.adamw, or add_decayed_weights "
            "before scale_by_learning_rate), with a positive sign",
        )
    if len(shrunk) > _MOSTLY * len(matrices) and not course.fall() > NEARLY_DOWN:
        name = min(shrunk, key=lambda n: shrunk[n])
        yield Complaint.of(
            Symptom.WEIGHT_DECAY,
            Level.FAULT,
            f"{name} has shrunk to {shrunk[name]:.0%} of its size (weight_decay {decay:g}), and so have "
            f"{len(shrunk)} of {len(matrices)} weights",
            parameters=tuple(shrunk),
            place=course.optimizer_place,
            **({"cure": BY_RATE} if 0 < decay <= _USUAL_DECAY and rate >= _HUGE_RATE else {}),
        )


def _reach_of_decay(course: Course, size: float) -> float:
    """Return the largest logarithm of the ratio by which weight decay can have shrunk a weight.

    Each step multiplies it by 1 - rate x decay, and momentum repeats that. Where the decay is a part of an
    adaptive gradient, a step is at most of the size of the rate. Without the rates there is no bound.

    Args:
        course: the training.
        size: the root mean square of the weight at first.
    """
    rates = [rate for _, rate in course.rates]
    total = course.steps * math.fsum(rates) / len(rates) if rates else math.inf
    kinds = [kind.lower() for kind, _ in course.settings]
    adaptive = any(kind.removeprefix("scale_by_").startswith(_ADAPTIVE) for kind in kinds)
    reach = 0.0
    for kind, settings in course.settings:
        decay = settings.get("weight_decay", 0.0)
        if not decay > 0:
            continue
        by_itself = course.steps if kind == "add_decayed_weights" else 0  # it may come after the rate
        reach = max(reach, max(total, by_itself) * decay / (1 - min(settings.get("momentum", 0.0), 0.99)))
        if adaptive and kind.lower() not in _DECOUPLED:
            reach = max(reach, total / size)
    return reach


# Optimizers that divide a gradient by its size, and those of them whose decay is no part of it.
_ADAPTIVE = ("ada", "nadam", "radam", "rms", "rprop", "yogi", "lion", "belief")
_DECOUPLED = ("adafactor", "adamw", "lion", "nadamw")


def _grows(seen: Sequence[tuple[int, ParameterSeen]]) -> bool:
    """Return whether a parameter has doubled by changes that mostly point where it points itself."""
    along = [-p.shrink / p.relative for _, p in seen if p.update > 0 and p.weight > 0]
    if len(along) < _LEAST_ALONG:
        return False
    return seen[-1][1].weight > _GROWN * seen[0][1].weight and median(along) > _ALONG


def _clipped(course: Course, readings: Sequence[Reading]) -> Iterator[Complaint]:
    clips = [c for c in course.clips if c.bound > 0 and math.isfinite(c.norm)]
    over = [c for c in clips if c.norm > c.bound]
    if len(clips) > _CLIPS and len(over) > _CLIPPED * len(clips):
        ratio = median([c.norm / c.bound for c in over])
        # Adam and its kind do not mind, but other optimizers take steps that are so many times shorter.
        adaptive = any("ada" in kind.lower() or "li" in kind.lower() for kind, _ in course.settings)
        bound = PARTLY_DOWN if adaptive or ratio < _SHORTER else NEARLY_DOWN
        if ratio > _SMALLER:
            yield Complaint.of(
                Symptom.CLIPPED_ALWAYS,
                Level.WARNING if course.fall() < bound else Level.NOTE,
                f"{len(over)} of {len(clips)} steps were clipped to {over[-1].bound:g}; the usual norm is "
                f"{ratio:.3g} times as large",
                place=over[-1].place or course.step_place,
            )


def _state(course: Course, readings: Sequence[Reading]) -> Iterator[Complaint]:
    if course.bad_state:
        yield Complaint.of(
            Symptom.BAD_STATE,
            Level.FAULT,
            course.bad_state[:_MOST_NAMED],
            since=course.steps if course.bad_state_since is None else course.bad_state_since,
            place=course.loaded_state or course.optimizer_place,
        )


def _scale(course: Course, readings: Sequence[Reading]) -> Iterator[Complaint]:
    scales = [scale for _, scale in course.scales]
    last = scales[-max(1, len(scales) // _QUARTERS) :]
    if len(scales) < _LEAST_SCALES or scales[0] == scales[-1]:
        return
    at_floor = max(last) <= 1.0
    if at_floor or last[-1] > _BOUNDLESS:
        since = next(
            step for step, scale in course.scales if (scale <= 1.0 if at_floor else scale > _BOUNDLESS)
        )
        yield Complaint.of(
            Symptom.LOSS_SCALE,
            Level.WARNING,
            f"it went from {scales[0]:g} to {scales[-1]:g} in {len(scales)} steps",
            since=since,
            place=course.step_place or next((loss.place for loss in course.losses), None),
        )


RULES = (_rate, _uphill, _mirrored, _lost, _sizes, _eps, _state, _stale, _decay, _clipped, _scale)
