"""Print the decision as one Triton kernel: norms in, decision, next state and recorder out.

The kernel consists of the operations that the core's ``decide`` carries out (``recorded_operations.py``). A
single number is a variable. An array is a block whose length is rounded up to a power of two; what lies
behind its end may have any value and is left out of every reduction. All is read before anything is written.

Every operation is rounded as IEEE 754 and NumPy do: quotients and square roots to nearest, and no product is
merged with a sum (the launch forbids it, see ``launches.py``). Sums alone are added up in another order. What
has no such operation here, such as a logarithm, raises :class:`UnprintableError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import array_api_compat.numpy as np_namespace
import numpy as np

from stablenum.arrays import leaves, map_leaves
from stablenum.formats import FLOAT32_MAX
from stablenum.guard.config import GuardConfig
from stablenum.guard.decide import Observation, init_guard
from stablenum.guard.ranks import Ranks
from stablenum_torch._devices.device_law import decide_on_device
from stablenum_torch._devices.kernels.printed_elements import (
    ELEMENTWISE,
    MAXIMUM,
    MINIMUM,
    Template,
    UnprintableError,
    as_tensor,
    constant,
    operands,
    type_of,
)
from stablenum_torch._devices.recorded_operations import Operation, Recording, Value, sample_of

__all__ = ["APPLIED", "DIVISOR", "FACTOR", "SKIP", "Kinds", "printed_decide"]

# The places of a decision's numbers in the kernel's output: 1 / multiplier, 1.0 for a skipped step (the flag
# that fused kernels compare with 1), its opposite, and the multiplier itself.
DIVISOR, SKIP, APPLIED, FACTOR = range(4)
# Norms and rows of one program; beyond it a program holds too few of them in registers.
_MOST_VALUES = 2**14
# Sorting a block of 1024 takes 8 s to compile for sm_90 (Triton 3.9, one core), one of 8192 takes 48 s.
_MOST_SORTED = 2**11


class Kinds(NamedTuple):
    """What a kernel is printed for; each has a kernel of its own.

    Attributes:
        config: the settings.
        n: the number of parameters.
        still: whether the step moves nothing, see ``moves_nothing``.
        measured: which other measurements there are: ``"loss"``, ``"found_inf"``, ``"amax"``, ``"tiny"``.
        ranks: the number of ranks that decide together; 0 for a process alone.
    """

    config: GuardConfig
    n: int
    still: bool
    measured: frozenset[str]
    ranks: int = 0


def printed_decide(kinds: Kinds) -> str:
    """Return the source of the kernel ``decided``, Python with Triton's language.

    Its arguments: ``norms``, (n,) float64, if ``most`` is 0; otherwise ``squares``, float64, the sums of
    squares of the pieces, those of parameter ``i`` from ``first[i]`` on, ``count[i]`` of them, ``most`` at
    most; ``leaves``, int64, the addresses of the state's tensors; ``before``, those of tensors that get the
    values before the step; ``tag``, int32, which gets ``sequence``; the measurements; ``rows``, (ranks, 4)
    float64; ``out``, float32, see ``DIVISOR``; ``factors``, (n,) float32, the multipliers if each parameter
    has its own.

    Raises:
        UnprintableError: see above.
    """
    recording, state, inputs, results = _recorded(kinds)
    text = _Text(kinds, state, inputs)
    for operation in recording.needed(results):
        text.add(operation)
    return text.source(results[0], results[1], results[2:])


def _recorded(kinds: Kinds) -> tuple[Recording, list[Value], dict[str, Value], list[Any]]:
    """Return the recording, the state's leaves, the measurements, and what is wanted: whether the step is
    applied, the multiplier, the leaves of the next state."""
    if kinds.config.unit_rule is not None or max(kinds.n, kinds.ranks) > _MOST_VALUES:
        raise UnprintableError("norms of units, or too many norms")
    recording = Recording()
    example = init_guard(kinds.config, kinds.n, xp=np_namespace)
    state = map_leaves(lambda leaf: recording.input(leaf[()].copy()), example)
    one = np.float32(1.0)
    inputs = {"norms": recording.input(np.ones(kinds.n, np.float32))}
    for name in sorted(kinds.measured):
        inputs[name] = recording.input(np.bool_(True) if name == "found_inf" else one)
    ranks = None
    if kinds.ranks:
        columns = [recording.input(np.ones(kinds.ranks, np.float32)) for _ in _OF_RANKS]
        inputs |= dict(zip(_OF_RANKS, columns, strict=True))
        ranks = Ranks(*columns)
    given: dict[str, Any] = {name: inputs[name] for name in ("norms", *kinds.measured)}
    seen = Observation(**given, ranks=ranks)
    with np.errstate(all="ignore"):
        decision, after = decide_on_device(kinds.config, kinds.still, state, seen, xp=recording)
    return recording, leaves(state), inputs, [decision.apply, decision.multiplier, *leaves(after)]


_OF_RANKS = tuple(f"rank_{name}" for name in Ranks._fields[:4])


class _Block(NamedTuple):
    """An array in the kernel: the text of a block, and the length of the array."""

    text: str
    length: int


class _Lanes(NamedTuple):
    """A short array of which each element is a text of its own."""

    texts: list[str]


class _Tail(NamedTuple):
    """All rows but the first of an array: a block moved by one row, of which the last one has any value."""

    text: str
    length: int
    width: int


class _Text:
    """The lines of the kernel, one operation after the other."""

    def __init__(self, kinds: Kinds, state: list[Value], inputs: dict[str, Value]) -> None:
        self.kinds, self.state = kinds, state
        self.forms: dict[str, Any] = {}  # name of a value -> _Block, _Lanes or _Tail; a number has none
        self.operations: dict[str, Operation] = {}  # those so far, by the name of their result
        self.lines: list[str] = []
        self.lengths: dict[int, None] = {}
        self._load_measurements(inputs)
        for i, leaf in enumerate(state):
            self._load_leaf(i, leaf)

    # --- what is read --------------------------------------------------------------------------

    def _load_measurements(self, inputs: dict[str, Value]) -> None:
        n, name = self.kinds.n, inputs["norms"].name
        place = self._places(n)
        wide = max(1, min(16, _MOST_VALUES // _padded(n)))
        self.lines += [
            "if most == 0:",
            f"    wide = tl.load(norms + {place}, mask={place} < {n}, other=0.0)",
            "else:",
            f"    start = tl.load(first + {place}, mask={place} < {n}, other=0)",
            f"    many = tl.load(count + {place}, mask={place} < {n}, other=0)",
            f"    square = tl.zeros([{_padded(n)}], tl.float64)",
            f"    for begin in range(0, most, {wide}):",
            f"        k = begin + tl.arange(0, {wide})",
            "        inside = k[None, :] < many[:, None]",
            "        part = tl.load(squares + start[:, None] + k[None, :], mask=inside, other=0.0)",
            "        square += tl.sum(part, 1)",
            "    wide = tl.sqrt(square)",
        ]
        self._saturate(name, "wide")
        self.forms[name] = _Block(name, n)
        for measured in sorted(self.kinds.measured):
            own = inputs[measured].name
            if measured == "found_inf":
                self.lines.append(f"{own} = tl.load(found_inf) != 0")
                continue
            self.lines.append(f"wide = tl.cast(tl.load({measured}), tl.float64)")
            self._saturate(own, "wide")
        for column, of_ranks in enumerate(_OF_RANKS if self.kinds.ranks else ()):
            own, p = inputs[of_ranks].name, self.kinds.ranks
            place = self._places(p)
            self.lines.append(f"wide = tl.load(rows + 4 * {place} + {column}, mask={place} < {p}, other=0.0)")
            if column:
                self.lines.append(f"{own} = tl.cast(wide, tl.float32)")
            else:
                self._saturate(own, "wide")
            self.forms[own] = _Block(own, p)

    def _saturate(self, name: str, wide: str) -> None:
        """Add the conversion to float32 that leaves finite numbers finite."""
        top = repr(FLOAT32_MAX)
        self.lines.append(
            f"{name} = tl.cast(tl.where(tl.abs({wide}) < float('inf'), "
            f"tl.minimum(tl.maximum({wide}, -{top}), {top}), {wide}), tl.float32)"
        )

    def _load_leaf(self, i: int, leaf: Value) -> None:
        kind = type_of(leaf.sample)
        self.lines.append(f"p{i} = tl.cast(tl.load(leaves + {i}), tl.pointer_type({kind}))")
        if not leaf.shape:
            self.lines.append(f"{leaf.name} = tl.load(p{i})")
            return
        size = int(np.prod(leaf.shape))
        place = self._places(size)
        self.lines.append(f"{leaf.name} = tl.load(p{i} + {place}, mask={place} < {size}, other=0)")
        self.forms[leaf.name] = _Block(leaf.name, size)

    def _places(self, length: int) -> str:
        self.lengths[length] = None
        return f"at{length}"

    # --- operations ----------------------------------------------------------------------------

    def add(self, op: Operation) -> None:
        """Add an operation.

        Raises:
            UnprintableError: there is no text for it.
        """
        self.operations[op.result.name] = op
        form = self._form(op)
        if isinstance(form, str):
            self.lines.append(f"{op.result.name} = {form}")
        elif isinstance(form, _Block):
            self.lines.append(f"{op.result.name} = {form.text}")
            self.forms[op.result.name] = _Block(op.result.name, form.length)
        elif isinstance(form, _Lanes) and op.name != "getitem":
            names = [f"{op.result.name}_{i}" for i in range(len(form.texts))]
            self.lines += [f"{name} = {text}" for name, text in zip(names, form.texts, strict=True)]
            self.forms[op.result.name] = _Lanes(names)
        else:
            self.forms[op.result.name] = form

    def _form(self, op: Operation) -> Any:
        special = getattr(self, f"_of_{op.name}", None)
        if special is not None:
            return special(op)
        template = ELEMENTWISE.get(op.name)
        if template is None or op.kwargs:
            raise UnprintableError(op.name)
        return self._each(op, template)

    def _each(self, op: Operation, template: Template) -> Any:
        """Return the form of an operation on single elements."""
        forms = [self._form_of(arg) for arg in operands(op)]
        if any(isinstance(form, _Tail) for form in forms):
            raise UnprintableError(f"{op.name} of a part of an array")
        lanes = {len(form.texts) for form in forms if isinstance(form, _Lanes)}
        lengths = {form.length for form in forms if isinstance(form, _Block)}
        if (lanes and lengths) or len(lanes | lengths) > 1:
            raise UnprintableError(f"{op.name} of arrays of different shapes")
        if lanes:
            texts = []
            for i in range(lanes.pop()):
                args = [form.texts[i] if isinstance(form, _Lanes) else form for form in forms]
                texts.append(template(op, args))
            return _Lanes(texts)
        text = template(op, [form.text if isinstance(form, _Block) else form for form in forms])
        return _Block(text, lengths.pop()) if lengths else text

    def _form_of(self, arg: Any) -> Any:
        if isinstance(arg, Value):
            return self.forms.get(arg.name, arg.name)
        return constant(arg)

    # The rows of the recorder, and windows of the last values.

    def _of_getitem(self, op: Operation) -> Any:
        array, index = op.args
        form, shape = self._form_of(array), array.shape
        one = isinstance(index, Value) or (isinstance(index, int) and index >= 0)
        if one and isinstance(form, _Block) and len(shape) == 1:
            return self._picked(form, self._form_of(index))
        if isinstance(form, _Lanes):
            if isinstance(index, int):
                return form.texts[index]
            if index in ((None, slice(None)), slice(None)):
                return form
        if isinstance(form, _Block) and index == slice(1, None):
            width = form.length // shape[0]
            return _Tail(self._moved(array, width), form.length, width)
        leaf = self._leaf(array)
        if leaf is not None and len(shape) == 2 and index == (-1, slice(None)):
            rows, width = shape
            return _Lanes([f"tl.load(p{leaf} + {(rows - 1) * width + i})" for i in range(width)])
        raise UnprintableError(f"the part {index} of an array of shape {shape}")

    def _leaf(self, array: Value) -> int | None:
        return next((i for i, leaf in enumerate(self.state) if leaf is array), None)

    def _moved(self, array: Any, width: int) -> str:
        """Return the text of a block moved by ``width``: an array is read from another place, and the same is
        done to its elements."""
        form, leaf = self._form_of(array), self._leaf(array)
        if isinstance(form, str):
            return form
        if leaf is not None:
            place = self._places(form.length)
            mask = f"mask={place} < {form.length - width}"
            return f"tl.load(p{leaf} + {place} + {width}, {mask}, other=0)"
        op = self.operations.get(array.name)
        if op is None or op.name not in ELEMENTWISE or not isinstance(form, _Block):
            raise UnprintableError("all but the first of an array")
        return ELEMENTWISE[op.name](op, [self._moved(arg, width) for arg in operands(op)])

    def _picked(self, block: _Block, index: str) -> str:
        return f"tl.sum(tl.where({self._places(block.length)} == {index}, {block.text}, 0), 0)"

    def _of_take(self, op: Operation) -> Any:
        block, index = self._form_of(op.args[0]), self._form_of(op.args[1])
        if not isinstance(block, _Block) or not isinstance(index, _Lanes):
            raise UnprintableError("take")
        return _Lanes([self._picked(block, one) for one in index.texts])

    def _of_reshape(self, op: Operation) -> Any:
        form = self._form_of(op.args[0])
        if not isinstance(form, str) or op.args[1] != (1,):
            raise UnprintableError("reshape")
        return _Lanes([form])

    def _of_stack(self, op: Operation) -> Any:
        if op.kwargs or any(np.ndim(sample_of(part)) for part in op.args[0]):
            raise UnprintableError("stack")
        return _Lanes([self._form_of(part) for part in op.args[0]])

    def _of_concatenate(self, op: Operation) -> Any:
        forms = [self._form_of(part) for part in op.args[0]]
        tail, row = forms if len(forms) == 2 else (None, None)
        if op.kwargs or not isinstance(tail, _Tail) or not isinstance(row, _Lanes):
            raise UnprintableError("concatenate")
        if len(row.texts) != tail.width:
            raise UnprintableError("concatenate")
        place, kept = self._places(tail.length), tail.length - tail.width
        text = tail.text
        for i, value in enumerate(row.texts):
            text = f"tl.where({place} == {kept + i}, {value}, {text})"
        return _Block(text, tail.length)

    _of_concat = _of_concatenate

    # Reductions, from which what lies behind the end is left out.

    def _reduced(self, op: Operation, of_block: str, fill: str, of_two: str) -> str:
        form = self._form_of(op.args[0])
        if set(op.kwargs) - {"dtype"} or np.ndim(op.result.sample):
            raise UnprintableError(f"{op.name} along an axis")
        if isinstance(form, _Lanes):
            text = form.texts[0]
            for other in form.texts[1:]:
                text = of_two.format(text, other)
            return text
        if not isinstance(form, _Block):
            raise UnprintableError(op.name)
        inside = f"{self._places(form.length)} < {form.length}"
        kept = f"tl.where({inside}, {form.text}, {fill})"
        return of_block.format(kept=kept, x=form.text, inside=inside)

    def _of_sum(self, op: Operation) -> str:
        return self._reduced(op, "tl.sum({kept}, 0)", "0", "({} + {})")

    def _of_max(self, op: Operation) -> str:
        return self._extreme(op, "max", "-float('inf')", MAXIMUM)

    def _of_min(self, op: Operation) -> str:
        return self._extreme(op, "min", "float('inf')", MINIMUM)

    def _extreme(self, op: Operation, name: str, fill: str, of_two: str) -> str:
        if np.asarray(sample_of(op.args[0])).dtype != np.float32:
            raise UnprintableError(f"{name} of whole numbers")
        # Triton's own reductions leave NaN out.
        nan = "tl.max(tl.cast(({x} != {x}) & ({inside}), tl.int32), 0) > 0"
        text = f"tl.where({nan}, float('nan'), tl.{name}(tl.where({{x}} == {{x}}, {{kept}}, {fill}), 0))"
        return self._reduced(op, text, fill, of_two)

    def _of_argmax(self, op: Operation) -> str:
        return self._reduced(op, "tl.argmax({kept}, 0)", "-float('inf')", "")

    def _of_sort(self, op: Operation) -> Any:
        form = self._form_of(op.args[0])
        if op.kwargs or not isinstance(form, _Block) or len(op.args[0].shape) != 1:
            raise UnprintableError("sort along an axis")
        if form.length > _MOST_SORTED:
            raise UnprintableError("a sort of a long array")
        inside = f"{self._places(form.length)} < {form.length}"
        return _Block(f"tl.sort(tl.where({inside}, {form.text}, float('inf')))", form.length)

    # --- the whole -----------------------------------------------------------------------------

    def source(self, applied: Value, multiplier: Any, after: Sequence[Any]) -> str:
        """Return the whole kernel.

        Args:
            applied: whether the step is applied.
            multiplier: the factor on the gradients, or one for each parameter.
            after: the leaves of the next state.
        """
        stores = []
        for i, (leaf, new) in enumerate(zip(self.state, after, strict=True)):
            size = int(np.prod(leaf.shape)) if leaf.shape else 0
            place = f" + {self._places(size)}" if size else ""
            mask = f", mask={self._places(size)} < {size}" if size else ""
            address = f"tl.cast(tl.load(before + {i}), tl.pointer_type({type_of(leaf.sample)}))"
            stores.append(f"tl.store({address}{place}, {leaf.name}{mask})")
            if new is leaf:
                continue
            form = self._form_of(new)
            text = form.text if isinstance(form, _Block) else form
            if not isinstance(text, str) or isinstance(form, _Block) != bool(size):
                raise UnprintableError("a part of the next state")
            stores.append(f"tl.store(p{i}{place}, {text}{mask})")
        factor = self._form_of(multiplier)
        if isinstance(factor, _Block):
            place = self._places(self.kinds.n)
            stores.append(f"tl.store(factors + {place}, {factor.text}, mask={place} < {self.kinds.n})")
        else:
            stores += [
                f"tl.store(out + {FACTOR}, {as_tensor(factor)})",
                f"tl.store(out + {DIVISOR}, tl.div_rn({as_tensor('1.0')}, {as_tensor(factor)}))",
            ]
        stores += [
            f"tl.store(out + {SKIP}, tl.where({applied.name}, 0.0, 1.0))",
            f"tl.store(out + {APPLIED}, tl.where({applied.name}, 1.0, 0.0))",
            "tl.store(tag, sequence)",
        ]
        places = [f"at{length} = tl.arange(0, {_padded(length)})" for length in self.lengths]
        # Other threads may still read what is written now.
        lines = [*places, *self.lines, "tl.debug_barrier()", *stores]
        return _HEAD + "".join(f"    {line}\n" for line in lines)


_HEAD = """import triton
import triton.language as tl


@triton.jit(do_not_specialize=["sequence", "most"])
def decided(
    norms, squares, first, count, most, leaves, before, tag, sequence,
    loss, found_inf, amax, tiny, rows, out, factors,
):
"""


def _padded(length: int) -> int:
    """Return the length of a block: a power of two, as Triton demands; a few lanes fill no warp anyway."""
    return max(16, 1 << (length - 1).bit_length())
