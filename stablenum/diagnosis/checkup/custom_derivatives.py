"""Derivatives that a script has written itself, beside those of the function that it computes."""

from __future__ import annotations

import dis
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import isfunction
from itertools import pairwise
from types import CodeType
from typing import Any, NamedTuple, Protocol

from stablenum.diagnosis.replay.values import Place

__all__ = ["MOST_CALLS", "MOST_ELEMENTS", "CustomCall", "CustomDerivative", "Difference", "compared"]

Array = Any

# Larger inputs are not evaluated again: each takes about ten evaluations in float64. Chosen, not measured.
MOST_ELEMENTS = 1_000_000
# A function is compared so many times, since its derivative may depend on what it is given. Chosen.
MOST_CALLS = 2
# Central differences with steps of these parts of the input's size: of float64, and of a function that
# computes in float32, the error of both is below _AGREE. Chosen, not measured.
_STEPS = (1e-3, 2.5e-4)
# Both differences, and the slope that ordinary differentiation gives, are the same within this part.
_AGREE = 0.02
# A slope below this part of what the function gives is rounding.
_ROUNDING = 1e-6
# Where the training's cotangents are not known, these are tried too: a mean over as many numbers gives such.
_SMALL = 1e-6


class Difference(NamedTuple):
    """How the derivative of one input that a script has written differs from that of the function.

    Attributes:
        input: the position among the differentiable inputs.
        written, actual: the sizes (L2 norms) of both derivatives; of the written one only the elements for
            which the function's own is not 0, where these are known.
        apart: the size of their difference, relative to the larger one.
        along: the cosine of the angle between them; NaN if one is 0 or only slopes are known.
    """

    input: int
    written: float
    actual: float
    apart: float
    along: float


@dataclass(frozen=True, slots=True)
class CustomDerivative:
    """What was found of one function with a derivative of its own.

    Attributes:
        name: its name.
        place: where it was called.
        written: where its derivative is written, if that is known.
        step: in which optimizer step.
        differences: one for each input whose derivative is that of another function.
        flat: the inputs whose written derivative is exactly 0, and the function's too if it is known.
        overwritten: which of the tensors that it saved had other numbers when its derivative read them.
        writers: where they were written.
    """

    name: str
    place: Place | None
    written: Place | None
    step: int
    differences: tuple[Difference, ...] = ()
    flat: tuple[int, ...] = ()
    overwritten: tuple[int, ...] = ()
    writers: tuple[Place, ...] = ()


# Names in the code of a derivative that is clipped.
_CLIPS = frozenset({"clamp", "clamp_", "clip", "clip_"})
# Names in the code of a function whose derivative stands in for that of a step, or that keeps state.
_STANDS_IN = frozenset({
    "argmax", "argmin", "bernoulli", "bernoulli_", "ceil", "floor", "heaviside", "one_hot", "round", "sgn",
    "sign", "stop_gradient", "trunc",
})  # fmt: skip
_KEEPS_STATE = frozenset({"grad", "main_grad", "generator", "append", "update"})


class CustomCall(Protocol):
    """A call of such a function, which can be evaluated again, in float64 if the function can."""

    @property
    def inputs(self) -> Sequence[Array]:
        """The differentiable inputs."""

    @property
    def outputs(self) -> Sequence[Array]:
        """What it gave in the training."""

    @property
    def cotangents(self) -> Sequence[Array] | None:
        """What the training's backward pass gave for the outputs; None if that is not known."""

    def value(self, inputs: Sequence[Array]) -> Sequence[Array]:
        """Return the outputs for these inputs."""

    def written(self, cotangents: Sequence[Array]) -> Sequence[Array]:
        """Return the derivatives that the script has written, with zeros for those that it leaves out."""

    def ordinary(self, cotangents: Sequence[Array]) -> Sequence[Array] | None:
        """Return what differentiating the function's operations gives; None if they cannot be."""


def compared(
    functions: Sequence[Any], call: Callable[[bool], CustomCall], *, xp: Any
) -> tuple[tuple[Difference, ...], tuple[int, ...]]:
    """Compare the derivatives that a script has written with slopes of the function, if its code shows no
    effect beside its result.

    Of a function with a step in its code, or whose derivative is clipped, only derivatives that are exactly 0
    count: others stand in for one.

    Args:
        functions: the function, and its derivative.
        call: returns the call, in float64 (True) or in the format of its inputs (False).
        xp: the array namespace.

    Returns:
        A difference per input, and the inputs whose written derivative is exactly 0, as is the function's own
        if it is known.
    """
    codes = _codes_of(functions)
    if len(codes) < len(functions) or _keeps_state(codes):
        return (), ()
    try:
        found, flat = _differences(call(True), xp)
    except Exception:  # noqa: BLE001 (it takes its inputs in their own format only)
        found, flat = _differences(call(False), xp)
    return ((), flat) if _is_a_step(codes) or _clips(_codes_of(functions[1:])) else (found, flat)


def _codes_of(functions: Sequence[Any]) -> tuple[CodeType, ...]:
    """Return the code of functions, and of those that they have from outside and call."""
    found: list[CodeType] = []
    for function in functions:
        code = getattr(function, "__code__", None)
        if code is None:
            continue
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        named = [function.__globals__.get(name) for name in code.co_names]
        found += [code, *(one.__code__ for one in (*cells, *named) if isfunction(one))]
    return tuple(found)


def _keeps_state(codes: Sequence[CodeType]) -> bool:
    """Return whether functions have an effect beside their results, as far as their code shows it."""
    for code in codes:
        steps, own = list(dis.get_instructions(code)), code.co_varnames[:1]
        writes = [a for a, b in pairwise(steps) if b.opname == "STORE_ATTR" and a.argval not in own]
        if writes or _KEEPS_STATE & frozenset(code.co_names):
            return True
        if any(one.opname == "STORE_GLOBAL" for one in steps):
            return True
    return False


def _is_a_step(codes: Sequence[CodeType]) -> bool:
    """Return whether functions compute a step, such as a sign, for whose derivative another may stand in."""
    compared = any(one.opname == "COMPARE_OP" for code in codes for one in dis.get_instructions(code))
    return compared or any(_STANDS_IN & frozenset(code.co_names) for code in codes)


def _clips(codes: Sequence[CodeType]) -> bool:
    """Return whether a derivative is clipped, which makes it another one on purpose."""
    return any(_CLIPS & frozenset(code.co_names) for code in codes)


def _differences(call: CustomCall, xp: Any) -> tuple[tuple[Difference, ...], tuple[int, ...]]:
    """Compare the derivatives of one call.

    The reference is ordinary differentiation where central differences confirm it, and central differences
    along the written derivative elsewhere. Nothing is said of a function that gives other numbers when it is
    called again, that is not smooth enough for two step sizes to agree, that hands an input on as it is (it
    exists for its derivative: a reversal, a scale, a clip), or that does not depend on one of its inputs in
    small steps although its derivative does (a rounding, a sign, with a derivative that stands in for it).
    """
    outputs = call.value(call.inputs)
    if call.cotangents is None and len(outputs) != 1:  # a training may use some of them only
        return (), ()
    if not _same(outputs, call.outputs, xp) or any(_passed_on(y, call.inputs, xp) for y in outputs):
        return (), ()
    results = [_at(call, cotangents, xp) for cotangents in _cotangents(call, outputs, xp)]
    flat = set.intersection(*(set(flat) for _, flat in results))
    by_input = [{one.input: one for one in found} for found, _ in results]
    known = set.intersection(*map(set, by_input))
    nearest = (min((of[i] for of in by_input), key=lambda one: one.apart) for i in sorted(known))
    return tuple(nearest), tuple(sorted(flat))


def _cotangents(call: CustomCall, outputs: Sequence[Array], xp: Any) -> list[list[Array]]:
    """Return what the training gave for the outputs, or several that it may give.

    A derivative is wrong in the training if it is wrong for each of these: one that takes its cotangent for 1
    is right if the outputs are summed, and one that is clipped is right where the cotangents are small.
    """
    if call.cotangents is not None:
        return [list(call.cotangents)]
    ones = [xp.ones_like(y) for y in outputs]
    if all(math.prod(y.shape) == 1 for y in outputs):  # a loss: the training asks for its derivative
        return [ones]
    irregular = [_irregular(y, xp) for y in outputs]
    return [irregular, ones, [_SMALL * v for v in irregular]]


def _at(
    call: CustomCall, cotangents: Sequence[Array], xp: Any
) -> tuple[tuple[Difference, ...], tuple[int, ...]]:
    """Compare the derivatives for these cotangents."""
    written = call.written(cotangents)
    if not all(_finite(g, xp) for g in (*written, *cotangents)) or not any(_norm(v, xp) for v in cotangents):
        return (), ()

    def slope(directions: Sequence[Array]) -> float:
        return _slope(call, directions, cotangents, xp)

    ordinary = call.ordinary(cotangents)
    confirmed = ordinary is not None and _confirmed(call, ordinary, slope, xp)
    found, flat = [], []
    for i, own in enumerate(written):
        by_slope = None if confirmed else _by_slope(i, own, call, slope, xp)
        if by_slope is None and not confirmed:  # such as a step, across which differences do not agree
            return (), tuple(k for k, g in enumerate(written) if not _norm(g, xp))
        ways = [] if by_slope is None else [by_slope]
        if ordinary is not None:  # at a kink, which differences do not confirm, it is wrong if it is neither
            ways.append(_by_elements(i, own, ordinary[i], xp))
        one = min(ways, key=lambda way: way.apart)
        if one.written == one.actual == 0.0:
            flat.append(i)
        elif one.actual == 0.0:  # something else stands in for its derivative, perhaps for all of them
            return (), ()
        else:
            found.append(one)
    return tuple(found), tuple(flat)


def _by_elements(i: int, written: Array, actual: Array, xp: Any) -> Difference:
    """Compare element by element, where the function's own derivative is not 0."""
    own = xp.where(actual != 0, written, xp.zeros_like(written))
    sizes = _norm(own, xp), _norm(actual, xp)
    if sizes[1] == 0.0:
        return Difference(i, _norm(written, xp), 0.0, 1.0, math.nan)
    product = float(xp.sum(own * actual))
    along = product / (sizes[0] * sizes[1]) if sizes[0] else math.nan
    return Difference(i, *sizes, _norm(own - actual, xp) / max(sizes), along)


def _by_slope(i: int, written: Array, call: CustomCall, slope: Any, xp: Any) -> Difference | None:
    """Compare slopes along the written derivative; None if the slope is not known."""
    size = _norm(written, xp)
    along = written / size if size else _irregular(call.inputs[i], xp) / _norm(_irregular(written, xp), xp)
    directions = [along if k == i else xp.zeros_like(x) for k, x in enumerate(call.inputs)]
    actual = slope(directions)
    if math.isnan(actual):
        return None
    largest = max(size, abs(actual))
    return Difference(i, size, abs(actual), abs(size - actual) / largest if largest else 0.0, math.nan)


def _confirmed(call: CustomCall, ordinary: Sequence[Array], slope: Any, xp: Any) -> bool:
    """Return whether central differences along an irregular direction agree with ordinary differentiation."""
    if not all(_finite(g, xp) for g in ordinary):
        return False
    directions = [_irregular(x, xp) for x in call.inputs]
    expected = math.fsum(float(xp.sum(g * d)) for g, d in zip(ordinary, directions, strict=True))
    return _close(slope(directions), expected)


def _slope(call: CustomCall, directions: Sequence[Array], cotangents: Sequence[Array], xp: Any) -> float:
    """Return the change of the outputs along directions, times cotangents; NaN if it is not known."""
    sizes = [_rms(x, xp) or 1.0 for x in call.inputs]
    longest = max(_rms(d, xp) for d in directions)
    found = []
    for part in _STEPS:
        h = part * min(sizes) / longest
        ends = [
            call.value([x + sign * h * d for x, d in zip(call.inputs, directions, strict=True)])
            for sign in (1.0, -1.0)
        ]
        terms = [float(xp.sum((a - b) * v)) for a, b, v in zip(*ends, cotangents, strict=True)]
        scale = math.fsum(float(xp.sum(xp.abs(a * v))) for a, v in zip(ends[0], cotangents, strict=True))
        change = math.fsum(terms)
        found.append(0.0 if abs(change) <= _ROUNDING * part * scale else change / (2 * h))
    return found[1] if _close(*found) else math.nan


def _close(a: float, b: float) -> bool:
    return math.isfinite(a) and math.isfinite(b) and abs(a - b) <= _AGREE * max(abs(a), abs(b))


def _same(outputs: Sequence[Array], known: Sequence[Array], xp: Any) -> bool:
    """Return whether a call gives the outputs of the training, but for rounding."""
    return len(outputs) == len(known) and all(
        a.shape == b.shape and _finite(b, xp) and _norm(a - b, xp) <= _AGREE * (_norm(b, xp) or 1.0)
        for a, b in zip(outputs, known, strict=True)
    )


def _passed_on(output: Array, inputs: Sequence[Array], xp: Any) -> bool:
    n = math.prod(output.shape)
    alike = [x for x in inputs if math.prod(x.shape) == n]
    return any(bool(xp.all(xp.reshape(output, (n,)) == xp.reshape(x, (n,)))) for x in alike)


def _irregular(x: Array, xp: Any) -> Array:
    """Return numbers between -1 and 1 without a pattern that matters, the same in every framework."""
    n = math.prod(x.shape)
    # The angle of Weyl's sequence with the golden ratio, squared so that no shift maps it to itself.
    k = xp.astype(xp.arange(1, n + 1, dtype=xp.int64, **_device(x)), xp.float64)
    return xp.reshape(xp.cos(k * k * 0.6180339887498949 + k), x.shape)


def _device(x: Array) -> dict[str, Any]:
    return {"device": x.device} if hasattr(x, "device") else {}


def _finite(x: Array, xp: Any) -> bool:
    return bool(xp.all(xp.isfinite(x)))


def _norm(x: Array, xp: Any) -> float:
    return math.sqrt(float(xp.sum(x * x)))


def _rms(x: Array, xp: Any) -> float:
    n = math.prod(x.shape)
    return _norm(x, xp) / math.sqrt(n) if n else 0.0
