"""``diff``: compare two programs, and find the first operation at which they part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any, TypeAlias

from stablenum.diagnosis.diff.causes.misgiven import misgiven, other_numbers
from stablenum.diagnosis.diff.causes.stops.frozen import OneSided, one_sided
from stablenum.diagnosis.diff.differences import Difference
from stablenum.diagnosis.diff.named_arrays import compared_with_dump
from stablenum.diagnosis.diff.places.arguments import other_arguments
from stablenum.diagnosis.diff.places.comparison import Comparison
from stablenum.diagnosis.diff.places.doubts import doubts_of, unsure
from stablenum.diagnosis.diff.places.locations import off_of, share_of
from stablenum.diagnosis.diff.places.precision import precision_of
from stablenum.diagnosis.diff.places.results import Group
from stablenum.diagnosis.diff.places.tables import with_common_tables
from stablenum.diagnosis.diff.recordings import check_updates, sides_of
from stablenum.diagnosis.diff.report.nonfinite import not_finite
from stablenum.diagnosis.diff.report.omissions import (
    beside_the_loss,
    kept_as_buffers,
    left_out,
    one_optimizer,
    untaken,
    untied,
)
from stablenum.diagnosis.diff.report.report import DiffReport
from stablenum.diagnosis.diff.report.repro import Repro
from stablenum.diagnosis.diff.report.reproduction import reproduction, reproduction_of
from stablenum.diagnosis.diff.report.rows import rows_of
from stablenum.diagnosis.diff.search import Found, Stuck, differences_of, untold
from stablenum.diagnosis.diff.sides.compiled import compiled_errors, too_far
from stablenum.diagnosis.diff.sides.dump import Dump
from stablenum.diagnosis.diff.sides.play import Program, if_recorded
from stablenum.diagnosis.diff.sides.recorded import RecordedProgram
from stablenum.diagnosis.diff.sides.recording import recorded, undisturbed
from stablenum.diagnosis.diff.sides.rounding import rounding_of
from stablenum.diagnosis.diff.sides.sides import measured
from stablenum.diagnosis.diff.weights.carrying import carried
from stablenum.diagnosis.diff.weights.exchanges import by_flow_only, note_on, out_of_order
from stablenum.diagnosis.diff.weights.given import Weights, entries_of
from stablenum.diagnosis.diff.weights.optimizer_states import continued
from stablenum.diagnosis.diff.weights.origins import Said
from stablenum.errors import ProgramError, bad_field, bad_type

__all__ = ["STAGES", "Progress", "compared", "diff", "examined", "reported"]

# Called with what is being done, one of the stages, as soon as it begins.
Progress: TypeAlias = Callable[[str], None]

STAGES = (
    "recording the left program",
    "recording the right program",
    "evaluating the left program in float64",
    "matching the weights",
    "evaluating the right program in float64",
    "matching the values",
    "trying causes",
)


def _quiet(stage: str) -> None: ...


def diff(left: Any, right: Any, *, weights: Weights = "match", steps: int | None = None) -> DiffReport:
    """Compare two programs, of one framework or two, and name the first operation at which they part.

    Both programs are recorded once and evaluated again in float64, where rounding errors are about 1e-12 of
    a value and a difference of the programs stands far above them. Values are matched by their contents,
    independently of layout, names and order. Nothing of the programs' own objects is changed.

    Either side may be a recording from :func:`load_program`. It is the reference, and stands on the left of
    the report. Then the live program is also compared as it is: what rounds more than the recording allows on
    any machine is a difference. A recording of named arrays alone is compared at what both sides have.

    Experimental: the names of causes and the JSON may change in a minor version.

    Args:
        left, right: made by ``stablenum_torch.program``, ``stablenum_jax.program`` or
            ``stablenum.load_program``. The left one is the reference: the right one is evaluated with its
            parameters. A recording whose weights are not at hand leaves it its own.
        weights: "match" finds out which parameter corresponds to which. ``("match", {right name: left
            name})`` does, too, but for these, where None leaves a right parameter its own values.
            ``{right name: left name}``, such as the ``weights`` of a report, gives all; a function from the
            left arrays to the right ones, both by name, gives the arrays. What these two leave out keeps its
            own values, which a note says. "as they are" leaves both sides alone. If a left parameter is
            given to several right ones, as to the table and the head of a port that does not tie them, the
            sum of their gradients is compared with its gradient, and their updates are not compared.
        steps: how many training steps follow one another, with the same arguments. None for as many as a
            recording has, and for one if there is none.

    Returns:
        The report. Its ``verdict`` is "the same in exact arithmetic" if at most rounding distinguishes the
        programs, "the same but for constants in float32" if one of them holds a table that is rounded at
        another stage, and "different" otherwise.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: parameters that do not correspond; a function given as ``weights`` that fails; results
            that do not correspond; ``steps`` below 1, or not those of a recording; names given as ``weights``
            with a recording on the right alone, or with one of named arrays.
        ProgramError: one of the programs fails. Its line is named, and all objects are as they were. Or
            nothing differs, but a result is NaN or infinite in both programs.
    """
    for name, given in (("left", left), ("right", right)):
        if not isinstance(given, Dump) and not (hasattr(given, "play") and hasattr(given, "parameters")):
            raise bad_type(
                name,
                "a program made by stablenum_torch.program, stablenum_jax.program or stablenum.load_program",
                given,
            )
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int)):
        raise bad_type("steps", "a whole number or None", steps)
    if steps is not None and steps < 1:
        raise bad_field("steps", "at least 1", steps)
    return reported(left, right, weights, steps)


def reported(
    left: Program | Dump,
    right: Program | Dump,
    weights: Weights = "match",
    steps: int | None = None,
    *,
    progress: Progress = _quiet,
) -> DiffReport:
    """Compare two programs, and say through ``progress`` what is being done; see ``diff``."""
    if not isinstance(left, Dump) and not isinstance(right, Dump):
        return examined(left, right, weights, steps, progress=progress)[0]
    if not isinstance(weights, str):
        raise bad_field(
            "weights", "left out with a recording of named arrays, which has no parameters", weights
        )
    return undisturbed(lambda: compared_with_dump(left, right, 1 if steps is None else steps))


def examined(
    left: Program,
    right: Program,
    weights: Weights = "match",
    steps: int | None = None,
    *,
    progress: Progress = _quiet,
) -> tuple[DiffReport, Comparison]:
    """Compare two programs as ``reported`` does, and return also what the report is made from."""

    def body() -> tuple[DiffReport, Comparison]:
        sides = sides_of(left, right, weights)
        comparison = compared(sides.left, sides.right, sides.weights, steps, progress=progress)
        comparison.notes = (*sides.notes, *comparison.notes)
        progress(STAGES[-1])
        found, stuck = differences_of(comparison)
        return _report(comparison, found, stuck, sides.weights), comparison

    return undisturbed(body)


def compared(
    left: Program,
    right: Program,
    weights: Weights = "match",
    steps: int | None = None,
    *,
    progress: Progress = _quiet,
) -> Comparison:
    """Return the comparison from which the report is made."""
    check_updates(left, right)
    if steps is None:
        steps = next((p.steps for p in (left, right) if isinstance(p, RecordedProgram)), 1)
    for side, program in (("left", left), ("right", right)):
        progress(f"recording the {side} program")
        recorded(program, side, steps)
    left.numbers, right.numbers = right.written(steps), left.written(steps)
    progress("evaluating the left program in float64")
    a = measured(left, steps=steps)
    progress("matching the weights")
    mapped, arrays = carried(a, right, weights)
    right, notes = (
        (right, ())
        if weights == "as they are"
        else continued(left, right, mapped, lambda p: recorded(p, "right", steps))
    )
    progress("evaluating the right program in float64")
    b = measured(right, weights=arrays, steps=steps)
    progress("matching the values")
    if arrays is not None and not isinstance(weights, str):
        alone = {name for name, source in entries_of(weights).items() if source is None}
        notes = (*notes, *left_out(b, arrays, only=alone if isinstance(weights, tuple) else None))
    notes = (*notes, *untied(mapped, steps))
    return with_common_tables(Comparison(a, b, mapped, notes))


def _report(comparison: Comparison, found: list[Found], stuck: Stuck | None, weights: Weights) -> DiffReport:
    left, right, shared = comparison.left, comparison.right, comparison.found
    origins = comparison.weights.origins
    roundings = [rounding_of(side) for side in (left, right)]
    sides = dict(zip(("left", "right"), zip((left, right), roundings, strict=True), strict=True))
    compiled = {name: None if found else compiled_errors(*pair) for name, pair in sides.items()}
    off = [None if found else off_of(r, side, compiled[name]) for name, (side, r) in sides.items()]
    astray = [n for n, e in compiled.items() if e is not None and too_far(*sides[n], e)]
    no_one: list[OneSided] = []
    alone, undefined = if_recorded(lambda: one_sided(comparison), no_one), not_finite(comparison)
    if undefined and not found and not alone:
        raise ProgramError(undefined)
    differing = (
        {s.index for f in found for s in f.place.region_left},
        {s.index for f in found for s in f.place.region_right},
    )
    matched = weights == "match" or isinstance(weights, tuple)
    exchangeable = by_flow_only(left, right, comparison.weights) if matched else ()
    exchangeable = tuple(name for name in exchangeable if name not in entries_of(weights))
    others = () if comparison.differing is None else _known(lambda: other_arguments(comparison))
    differences = _folded(_in_order(found, alone))
    lacking = untaken(left, comparison.weights) if found and weights != "as they are" else ()
    wrong = _known(lambda: misgiven(comparison)) if found and not isinstance(weights, str | tuple) else ()
    wrong += _known(lambda: other_numbers(comparison)) if found and weights == "as they are" else ()
    doubtful = note_on(exchangeable, comparison.weights)
    doubtful += out_of_order(comparison.weights) if matched else ()
    rows = rows_of(comparison, differing, (roundings[0].errors, roundings[1].errors), differences)
    precision = None if found or alone else precision_of(comparison, roundings[1])
    imprecise = None if precision is None else precision.difference()
    differences += () if imprecise is None else (imprecise,)
    precisely = None if precision is None else precision.sentence()
    return DiffReport(
        verdict="different"
        if differences
        else "the same but for constants in float32"
        if comparison.but_for_constants
        else "the same in exact arithmetic",
        differences=tuple(map(_without_guesses, differences)) if others else differences,
        weights={n: Said(origins[n]) for n in dict.fromkeys((*exchangeable, *origins))},
        carried_over=comparison.weights.carried,
        left_off=off[0],
        right_off=off[1],
        matched=(share_of(left, shared.left), share_of(right, shared.right)),
        notes=(
            *([precisely] if precisely else ()),
            *wrong,
            *_notes(comparison, astray, undefined, others),
            *_own(comparison, found),
            *lacking,
            *_hidden(differences, stuck),
            *doubtful,
        ),
        left_rows=rows[0],
        right_rows=rows[1],
        stages=stages_of(comparison.groups, differences),
        _repro=if_recorded(lambda: _repro(comparison, found, alone), None),
    )


def stages_of(groups: Sequence[Group], differences: Sequence[Difference]) -> dict[str, str]:
    """Return what has become of each stage that a port has to pass; see ``DiffReport.stages``."""
    found = dict.fromkeys(("outputs", "gradients", "training"), "not compared")
    rows = [(g.kind, g.step, bool(g.differing)) for g in groups]
    rows += [
        (_KINDS[p.phase], d.step, True) for d in differences for p in (d.left or d.right,) if p is not None
    ]
    for kind, step, differs in rows:
        stage = "training" if step > 1 or kind == "updated" else _STAGES.get(kind, "outputs")
        found[stage] = "differs" if differs or found[stage] == "differs" else "agrees"
    return found


_KINDS = {"forward": "output", "backward": "gradient", "update": "updated"}
_STAGES = {"gradient": "gradients"}


def _known(body: Callable[[], tuple[str, ...]]) -> tuple[str, ...]:
    """Return what a comparison has found, or nothing if that needs a run of a recorded program."""
    return if_recorded(body, ())


def _without_guesses(difference: Difference) -> Difference:
    """Leave out the causes that were not confirmed: other arguments explain all that they could."""
    return replace(difference, causes=tuple(c for c in difference.causes if c.confirmed))


def _notes(
    comparison: Comparison, astray: list[str], undefined: str | None, others: tuple[str, ...]
) -> tuple[str, ...]:
    doubts = () if comparison.differing is None else (*others, *_known(lambda: doubts_of(comparison)))
    tried = (_TRIED,) if comparison.weights.by_trial else ()
    compiled = tuple(_ASTRAY.format(side) for side in astray)
    nan = (undefined[0].upper() + undefined[1:],) if undefined else ()
    lacking = one_optimizer(comparison.left, comparison.right)
    lacking += beside_the_loss(comparison.left, comparison.right)
    lacking += kept_as_buffers(comparison.left, comparison.right, comparison.weights)
    far = _known(lambda: unsure(comparison))
    return (*compiled, *nan, *tried, *comparison.notes, *lacking, *far, *doubts)


def _own(comparison: Comparison, found: Sequence[Found]) -> tuple[str, ...]:
    return (_OWN,) if any(untold(comparison, g, found) for g in comparison.groups) else ()


def _hidden(differences: Sequence[Difference], stuck: Stuck | None) -> tuple[str, ...]:
    """Name the difference after which no value of the left side makes the results agree."""
    if stuck is None:
        return ()
    place = stuck.found.difference.left, stuck.found.difference.right
    places = ({(d.left, d.right), *d.also} for d in differences)
    number = next(i for i, some in enumerate(places, 1) if place in some)
    step = f" of step {stuck.group.step}" if stuck.group.step > 1 else ""
    name = "The first difference" if number == 1 else f"Difference {number}"
    forward = stuck.group.kind == "gradient" and stuck.found.patch is not None
    could = "could be set right in the forward pass, but not in" if forward else "could not be set right in"
    return (_REST.format(name, could, _RESULTS[stuck.group.kind] + step),)


def _in_order(found: Sequence[Found], alone: Sequence[OneSided]) -> tuple[Difference, ...]:
    """Return all differences in the order of training. What only one side trains comes after the stop that
    explains it."""
    rows = [(*_when(a.difference), _explained(a, found), a.difference) for a in alone]
    rows += [(*_when(f.difference), False, f.difference) for f in found]
    return tuple(row[-1] for row in sorted(rows, key=itemgetter(0, 1, 2)))


def _folded(differences: Sequence[Difference]) -> tuple[Difference, ...]:
    """Return the differences, those of one setting as one, such as an epsilon in several norms."""
    found = dict[object, Difference]()
    for number, difference in enumerate(differences):
        same: object = number
        if difference.causes and difference.causes[0].confirmed and difference.causes[0].code in _SETTINGS:
            cause, place = difference.causes[0], difference.left or difference.right
            same = cause.code, cause.sentence, place and place.phase, difference.step
        first = found.get(same)
        also = ((difference.left, difference.right),)
        found[same] = difference if first is None else replace(first, also=first.also + also)
    return tuple(found.values())


def _explained(alone: OneSided, found: Sequence[Found]) -> bool:
    """Return whether parameters that only one side trains are not trained either without what passes at a
    place at which only the other side ends the flow of gradients."""
    named = alone.difference.result
    stops = [f.without for f in found if f.without is not None]
    return any(named not in {o.difference.result for o in one_sided(c)} for c in stops)


def _when(difference: Difference) -> tuple[int, int]:
    place = difference.left or difference.right
    return difference.step, -1 if place is None else _PHASES.index(place.phase)


def _repro(comparison: Comparison, found: list[Found], alone: Sequence[OneSided]) -> Repro | None:
    """Return what reproduces the first difference."""
    leads = alone and (not found or _when(alone[0].difference) <= _when(found[0].difference))
    if leads and not _explained(alone[0], found):
        return reproduction_of(alone[0].difference, alone[0].trains, alone[0].array)
    if not found:
        return None
    first = found[0]
    return reproduction(comparison, first.place, first.patch, first.difference)


_PHASES = ("forward", "backward", "update")
# Of a layer, which a program has many of.
_SETTINGS = {
    "epsilon_placement", "epsilon_value", "flipped_kernel", "gelu_variant", "norm_axis", "padding",
    "pooling_count", "resize_mode", "silu_variant", "softmax_axis", "variance_correction",
}  # fmt: skip
_ASTRAY = (
    "What the compiler makes of the {} program is further off than the rounding of its operations explains: "
    "a fault of the compiler or of what it assumes."
)
_TRIED = (
    "Names and order do not tell which weights correspond: the map is the one with which the programs share "
    "most values. Check in it whether the order of the parts and the transpositions are what you mean."
)
_OWN = "Both programs keep their own weights, and the forward passes differ: the updates are not compared."
_REST = "{} {} {}, so that others may be hidden behind it."
_RESULTS = {
    "loss": "the loss", "output": "the outputs", "gradient": "the gradients", "updated": "the updates",
}  # fmt: skip
