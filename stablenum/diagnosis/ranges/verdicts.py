"""What the counts mean: whether a format suffices, with which loss scale, and what to do if not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from stablenum.diagnosis.ranges.limits import per_tensor_exponent, upper_exponent
from stablenum.diagnosis.ranges.rows import ACTIVATION, BACKWARD, FORWARD, UPDATE, RangeRow, module_label
from stablenum.formats import FLOAT32_TINY, FORMATS, Format
from stablenum.rules.loss_scale.state import LARGEST_SCALE

__all__ = ["FLUSHED_LIMIT", "FormatVerdict", "Trouble", "judge", "scale_exponent"]

# A format works if a smaller fraction of the gradients than this becomes 0.
FLUSHED_LIMIT = 1e-3
# Flushing to 0 in an 8-bit format is reported from this fraction of a module's values on.
FLUSHED_LIMIT_8_BIT = 1e-2
# Small activations may become 0 (a softmax makes many). This is reported from this fraction of a module's
# values on.
FORWARD_LIMIT = 0.1
# If this fraction of the updates or more is lost, the weights should stay in float32.
LOST_LIMIT = 0.01
# The caps of Gemma 2 (arXiv 2408.00118) for attention logits and final logits.
SOFT_CAP, FINAL_SOFT_CAP = 50, 30
_FINAL = ("head", "logit")
_NAMED = 3
_LARGEST_EXPONENT = int(LARGEST_SCALE).bit_length() - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """What goes wrong in one module in one format.

    Attributes:
        format: the format.
        module: the module's path.
        kind: the kind of the module's tensors.
        what: ``"overflow"``, ``"flushed"`` (for gradients, at the recommended scale), ``"saved"``
            (flushed only without the scale) or ``"lost"``.
        fraction: the fraction of the row's finite elements that are affected.
        amax: the row's largest \\|x\\|.
        action: what to do about it.
    """

    format: str
    module: str
    kind: str
    what: str
    fraction: float
    amax: float
    action: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatVerdict:
    """The verdict on one format.

    Attributes:
        format: the name of the format.
        works: whether everything can be computed in the format, with the weights in float32 unless
            ``holds_weights``: nothing is NaN or overflows, and with ``loss_scale`` less than 1e-3 of the
            gradients become 0. For an 8-bit format, whether it can hold the tensors that it is meant for,
            with one scale per tensor.
        holds_weights: whether the weights can be kept in the format as well: less than 1 % of the updates are
            lost. None if no updates were measured.
        loss_scale: the recommended loss scale, a power of two; None if no gradients were measured, or all are
            0.
        flushed_before: the fraction of the gradients that become 0 without a scale, among those of
            activations or of parameters, whichever fraction is larger; None if no gradients were measured.
        flushed_after: the same fraction with ``loss_scale``.
        lost: the fraction of the updates that are lost if the weights are kept in the format; None if no
            updates were measured.
        troubles: what goes wrong in which module, the worst first.
        sentence: a summary.
    """

    format: str
    works: bool
    holds_weights: bool | None
    loss_scale: float | None
    flushed_before: float | None
    flushed_after: float | None
    lost: float | None
    troubles: tuple[Trouble, ...]
    sentence: str


def scale_exponent(fmt: Format, rows: Iterable[RangeRow]) -> int | None:
    """Return the exponent of the recommended loss scale: the largest k with ``amax * 2**k <= max / 2`` over
    all gradients.

    The margin of one bit leaves room for later steps. A format with the exponent range of float32 needs no
    scale, so the result is 0 unless gradients become 0 in that format nevertheless.

    Args:
        fmt: the format.
        rows: the rows of a report, of which only those of gradients count.

    Returns:
        k, from -100 to 100; None if there are no gradients other than 0.
    """
    gradients = [row for row in rows if row.kind in BACKWARD]
    amax = max((row.amax for row in gradients), default=0.0)
    if amax == 0:
        return None
    if fmt.smallest_normal <= FLOAT32_TINY and (_flushed(gradients, fmt.name, 0) or 0.0) < FLUSHED_LIMIT:
        return 0
    return max(-_LARGEST_EXPONENT, min(_LARGEST_EXPONENT, upper_exponent(fmt, amax, margin=1)))


def judge(name: str, rows: Sequence[RangeRow]) -> FormatVerdict:
    """Return the verdict on a format.

    Args:
        name: the format.
        rows: all rows of the report, in the order of execution.
    """
    fmt = FORMATS[name]
    k = scale_exponent(fmt, rows)
    before, after = _flushed(rows, name, 0), _flushed(rows, name, k or 0)
    troubles = (
        [*_eight_bit(fmt, rows)] if fmt.bits == 8 else [*_forward(name, rows), *_backward(name, rows, k)]
    )
    updates = [row for row in rows if row.kind == UPDATE and name in row.lost]
    lost = _share((row.lost[name], row.elements) for row in updates) if updates else None
    troubles += [_losing(name, row) for row in updates if row.fraction(row.lost[name]) >= LOST_LIMIT]
    works = not any(t.what == "overflow" or (t.what == "flushed" and fmt.bits == 8) for t in troubles)
    if fmt.bits != 8:
        works = works and (after is None or after < FLUSHED_LIMIT)
    broken = [row for row in rows if row.nan]
    works = works and not broken
    facts: dict[str, Any] = {
        "format": name,
        "works": works,
        "holds_weights": None if lost is None else lost < LOST_LIMIT,
        "loss_scale": None if k is None else 2.0**k,
        "flushed_before": before,
        "flushed_after": after,
        "lost": lost,
        "troubles": tuple(troubles),
    }
    if broken:
        verb = "holds" if len(_innermost(broken)) == 1 else "hold"
        sentence = (
            f"{_names(broken)} already {verb} NaN in float32: replay the step before choosing a format."
        )
    else:
        sentence = _sentence_8_bit(fmt, rows, facts) if fmt.bits == 8 else _sentence(fmt, rows, facts, k)
    return FormatVerdict(**facts, sentence=sentence)


def _share(counts: Iterable[tuple[int, int]]) -> float:
    pairs = list(counts)
    elements = sum(n for _, n in pairs)
    return sum(count for count, _ in pairs) / elements if elements else 0.0


def _flushed(rows: Iterable[RangeRow], name: str, exponent: int) -> float | None:
    """Return the flushed fraction of the gradients of activations or of parameters, whichever is larger."""
    by_kind = [[row for row in rows if row.kind == kind] for kind in BACKWARD]
    shares = [_share((row.flushed(name, exponent), row.elements) for row in some) for some in by_kind if some]
    return max(shares, default=None)


def _forward(name: str, rows: Sequence[RangeRow]) -> list[Trouble]:
    found = []
    for row in rows:
        if row.kind not in FORWARD:
            continue
        over, gone = row.overflow.get(name, 0), row.flushed(name)
        if over:
            found.append(_trouble(name, row, "overflow", over, _cure(name, row)))
        elif row.fraction(gone) >= FORWARD_LIMIT:
            action = f"compute it in bfloat16 or float32, or multiply by 2^{_lift(name, row)} beforehand"
            found.append(_trouble(name, row, "flushed", gone, action))
    return _worst_first(found)


def _lift(name: str, row: RangeRow) -> int:
    return upper_exponent(FORMATS[name], row.amax, margin=1)


def _backward(name: str, rows: Sequence[RangeRow], k: int | None) -> list[Trouble]:
    found = []
    for row in rows:
        if row.kind not in BACKWARD or k is None:
            continue
        before, after = row.flushed(name), row.flushed(name, k)
        if row.fraction(after) >= FLUSHED_LIMIT:
            action = "compute it in bfloat16 or float32: its gradients are too small next to the largest"
            found.append(_trouble(name, row, "flushed", after, action))
        elif row.fraction(before) >= FLUSHED_LIMIT:
            found.append(_trouble(name, row, "saved", before, f"a loss scale of 2^{k}"))
    return _worst_first(found)


def _eight_bit(fmt: Format, rows: Sequence[RangeRow]) -> list[Trouble]:
    """Return the troubles of an 8-bit format that has one scale per tensor, as in delayed scaling."""
    found = []
    for row in rows:
        if row.kind in _role(fmt)[1]:
            gone = row.flushed(fmt.name, per_tensor_exponent(fmt, row.amax))
            if row.fraction(gone) >= FLUSHED_LIMIT_8_BIT:
                found.append(_trouble(fmt.name, row, "flushed", gone, "keep it in bfloat16"))
    return _worst_first(found)


def _role(fmt: Format) -> tuple[str, tuple[str, ...]]:
    """Return the tensors that a format is meant for: e4m3 for the forward pass, e5m2 for gradients
    (Micikevicius et al. 2022, arXiv 2209.05433)."""
    forward = fmt.eps <= FORMATS["float8_e4m3fn"].eps
    return ("activations and weights", FORWARD) if forward else ("gradients", BACKWARD)


def _trouble(name: str, row: RangeRow, what: str, count: int, action: str) -> Trouble:
    return Trouble(
        format=name,
        module=row.module,
        kind=row.kind,
        what=what,
        fraction=row.fraction(count),
        amax=row.amax,
        action=action,
    )


def _losing(name: str, row: RangeRow) -> Trouble:
    action = "keep its weights in float32, or use a compensated or stochastically rounded update"
    return _trouble(name, row, "lost", row.lost[name], action)


def _cure(name: str, row: RangeRow) -> str:
    """Recommend bfloat16 if the values fit, otherwise float32; for activations, a soft cap as well."""
    wider = "bfloat16" if name != "bfloat16" and row.amax < FORMATS["bfloat16"].max else "float32"
    if row.kind != ACTIVATION:
        return f"use {wider} there"
    last = row.module.lower().rpartition(".")[2]
    cap = FINAL_SOFT_CAP if any(word in last for word in _FINAL) else SOFT_CAP
    return f"use {wider} there, or a soft cap of {cap}"


def _worst_first(troubles: list[Trouble]) -> list[Trouble]:
    order = ("overflow", "flushed", "saved", "lost")
    return sorted(troubles, key=lambda t: (order.index(t.what), -t.fraction))


def _innermost(troubles: Iterable[Trouble | RangeRow]) -> list[str]:
    """Return those of the modules that contain no other of the modules."""
    modules = list(dict.fromkeys(t.module for t in troubles))
    return [m for m in modules if not any(o != m and (not m or o.startswith(m + ".")) for o in modules)]


def _names(troubles: Iterable[Trouble | RangeRow]) -> str:
    """Return the innermost modules, at most three by name."""
    inner = _innermost(troubles)
    shown = ", ".join(module_label(m) for m in inner[:_NAMED])
    return shown + (f" and {len(inner) - _NAMED} more" if len(inner) > _NAMED else "")


def _percent(share: float) -> str:
    return f"{share:.1%}" if share == 0 or share >= 5e-4 else f"{share:.0e}"


def _sentence(fmt: Format, rows: Sequence[RangeRow], facts: dict[str, Any], k: int | None) -> str:
    after, troubles = facts["flushed_after"], facts["troubles"]
    parts = []
    works = f"{fmt.name} works{_only_with_wide_weights(facts)}"
    on_updates = []  # in the same clause
    if after is not None and after >= FLUSHED_LIMIT:
        other = "bfloat16" if fmt.name != "bfloat16" else "float32"
        where = _names(t for t in troubles if t.what == "flushed" and t.kind in BACKWARD)
        parts.append(
            f"{fmt.name} loses gradients: no loss scale brings the flushed fraction below {FLUSHED_LIMIT:g} "
            f"({_percent(after)} at 2^{k}, most in {where}); use {other}"
        )
        on_updates = _on_updates(facts)
    elif k is None:
        parts.append(f"{fmt.name} holds all measured values (no gradients)")
        on_updates = _on_updates(facts)
    elif k == 0 and FORMATS[fmt.name].smallest_normal <= FLOAT32_TINY:
        parts.append(f"{works} without a loss scale")
    else:
        parts.append(f"{works} with scale 2^{k}")
        saved = [t for t in troubles if t.what == "saved"]
        if saved:
            parts.append(
                f"without it {_percent(facts['flushed_before'])} of the gradients become 0 "
                f"(most in {_names(saved)}), with it {_percent(after)}"
            )
    over = [t for t in troubles if t.what == "overflow"]
    # The modules are sorted in the order of execution, because the trouble probably begins in the first one.
    over.sort(
        key=lambda t: next(i for i, row in enumerate(rows) if (row.kind, row.module) == (t.kind, t.module))
    )
    for action in dict.fromkeys(t.action for t in over):
        some = [t for t in over if t.action == action]
        largest = max(t.amax for t in some)
        verb = "overflows" if len(_innermost(some)) == 1 else "overflow"
        parts.append(f"{_names(some)} {verb} ({largest:.2g}); {action}")
    gone = [t for t in troubles if t.what == "flushed" and t.kind in FORWARD]
    if gone:
        parts.append(f"small activations or weights of {_names(gone)} become 0")
    return "; ".join(parts + on_updates) + "."


def _sentence_8_bit(fmt: Format, rows: Sequence[RangeRow], facts: dict[str, Any]) -> str:
    purpose, kinds = _role(fmt)
    if not any(row.kind in kinds for row in rows):
        return f"{fmt.name} is for {purpose}, which were not measured."
    flushed = [t for t in facts["troubles"] if t.what == "flushed"]
    sentence = f"{fmt.name} works for {purpose} with one scale per tensor (DelayedScaling)"
    if flushed:
        sentence += (
            f", except in {_names(flushed)}: {_percent(flushed[0].fraction)} still become 0; use bfloat16"
        )
    return sentence + "."


def _only_with_wide_weights(facts: dict[str, Any]) -> str:
    """Return what limits "works", where it is limited."""
    return f" only with the weights in float32 ({_losses(facts)})," if facts["holds_weights"] is False else ""


def _on_updates(facts: dict[str, Any]) -> list[str]:
    return [f"keep the weights in float32: {_losses(facts)}"] if facts["holds_weights"] is False else []


def _losses(facts: dict[str, Any]) -> str:
    return f"{_percent(facts['lost'])} of the updates are lost in {facts['format']}"
