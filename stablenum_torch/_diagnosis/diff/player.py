"""Play a tape: evaluate the recorded calls again, in float64 or as they were."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from stablenum.diagnosis.diff.sides.equality import SAME_ENTRIES
from stablenum.diagnosis.diff.sides.exact_constants import exact_constants
from stablenum.diagnosis.diff.sides.noise import Noise
from stablenum.diagnosis.diff.sides.play import Play, ReplacedError, Result, Visit
from stablenum.diagnosis.diff.sides.sides import host
from stablenum.diagnosis.replay.operations import EXACT, MOVING
from stablenum.diagnosis.replay.trace import Step, Trace
from stablenum_torch._diagnosis.diff.axis_roles import roles_of
from stablenum_torch._diagnosis.diff.decompositions import FORMULAS, decomposition_of
from stablenum_torch._diagnosis.diff.tape import Entry, Mark, Place, Tape, last_uses, places_in
from stablenum_torch._diagnosis.diff.writing import code_of
from stablenum_torch._diagnosis.replay.naming import operation_name
from stablenum_torch._diagnosis.replay.schemas import (
    Operation,
    defaults_in,
    describe,
    numbers_in,
    options_in,
    tensors_in,
    written_by,
)
from stablenum_torch._diagnosis.replay.tensor_memory import Storage
from stablenum_torch._diagnosis.replay.tensor_values import TensorValues

__all__ = ["Player", "evaluating", "play"]

_WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}
_OF_FLOAT32 = 2.0**-23  # its spacing, relative to a power of two
_STILL = (*MOVING, "full", "cast", "copy", "to", "where", "masked_fill")


def play(
    tape: Tape,
    *,
    wide: bool,
    weights: Mapping[str, Any],
    noise: float,
    visit: Visit,
    replace: Mapping[int, Any],
    everywhere: bool = False,
    code: Collection[int] = (),
) -> Play:
    """Evaluate a tape; see ``stablenum.diagnosis.diff.sides.play``."""
    with evaluating(torch.float64 if wide else torch.get_default_dtype()):
        player = Player(tape, wide, weights, noise, visit, replace)
        player.wanted, player.noisy_constants = frozenset(code), everywhere
        player.run()
    return Play(player.trace, tuple(player.results), player.keys, player.code, frozenset(player.stops))


@contextmanager
def evaluating(dtype: torch.dtype) -> Iterator[None]:
    """Evaluate without gradients; what is made lies on the host, and in a format where none is named."""
    elsewhere = torch.get_default_device().type != "cpu"
    # Within such a context, each look at a tensor takes 2 us longer.
    with torch.no_grad(), _default(dtype), torch.device("cpu") if elsewhere else nullcontext():
        yield


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    """Give calls that name no format, such as ``torch.ones(3)`` or a quotient of whole numbers, this one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class _Nothing:
    """A snapshot that keeps nothing: what is written here is a copy."""

    def keep_memory(self, tensor: Tensor) -> None: ...

    def keep_tensor(self, tensor: Tensor) -> None: ...


class Player(TorchDispatchMode):
    """Evaluates a tape in a width, with noise and with other values, and shows each value."""

    def __init__(
        self,
        tape: Tape,
        wide: bool,
        weights: Mapping[str, Any],
        noise: float,
        visit: Visit,
        replace: Mapping[int, Any],
    ) -> None:
        super().__init__()
        self.trace = Trace()
        self.results: list[Result] = []
        self.keys: dict[int, tuple[int, int]] = {}
        self.code: dict[int, str] = {}
        self.stops: set[int] = set()
        self._detached: dict[int, int] = {}  # value -> the value without gradients in the same memory
        self._dead: set[int] = set()  # arguments of the call of which no gradients are wanted
        self.wanted: frozenset[int] = frozenset()
        self.noisy_constants = False
        self._tape, self._wide, self._weights = tape, wide, weights
        self._noise, self._visit, self._replace = Noise(noise), visit, replace
        self._names: dict[int, tuple[str, str]] = {}
        nothing: Any = _Nothing()
        self._values = TensorValues(self.trace, nothing, self._names, with_outliers=False)
        self._bases: dict[int, Tensor] = {}
        self._kept: dict[int, Tensor] = {}  # the results that only a backward pass reads, by storage
        self._seen = 0  # values that have been shown
        self._context: Step
        self._opened = ""
        self._steps: dict[int, int] = {}  # recorded step -> the step here
        self._moving: set[int] = set()
        self._rounds_on_host = False  # numbers of the program may come from one that was read as float32

    def run(self) -> None:
        """Play all entries."""
        last = last_uses(self._tape.entries)
        for index in range(len(self._tape.entries)):
            self._entry(index)
            self._forget(last.get(index, ()))

    def _entry(self, index: int) -> None:
        entry = self._tape.entries[index]
        if isinstance(entry, Mark):
            tensor = self._tensor(entry.place)
            self.results.append(Result(entry.kind, entry.name, self._known(tensor), entry.step))
            return
        self._context = entry.step
        self._played(entry)
        for number, result in enumerate((*entry.written, *entry.results)):
            self.keys.setdefault(self._known(self._tensor(result.place)), (index, number))
        self._steps[entry.step.index] = len(self.trace.steps) - 1

    def _forget(self, storages: Iterable[int]) -> None:
        for storage in storages:
            self._bases.pop(storage, None)
            self._kept.pop(storage, None)

    # --- entries ---

    def _played(self, entry: Entry) -> None:
        """Evaluate an entry. Where gradients end, the steps are noted, and values without gradients are told
        from those in the same memory: which of both is read depends on whether gradients are wanted."""
        first = len(self.trace.steps)
        storages = self._without_gradients(entry)
        before = [(storage, dict(storage.views)) for storage in storages]
        self._evaluate(entry)
        for storage, views in before:
            for key, (value, epoch) in views.items():
                made = storage.views.get(key)
                if made is not None and made[0] != value and made[1] == epoch:
                    self._detached[value] = made[0]
                    storage.views[key] = (value, epoch)
        if entry.stops:
            steps = self.trace.steps[first:]
            self.stops.update(step.index for step in steps)
            for step in steps if entry.operation.name == "detach" else ():
                step.operation = "detach"

    def _without_gradients(self, entry: Entry) -> list[Storage]:
        """Return the storages of which an entry reads without gradients what is read with gradients too."""
        if self._context.phase != "forward" or not (entry.stops or self._detached):
            return []
        ends = entry.stops and entry.operation.name == "detach"
        places = [p for p in places_in((entry.args, entry.kwargs)) if ends or not p.live]
        found = (self._values.memory.find(self._tensor(p)) for p in places)
        return list({id(s): s for s in found if s is not None}.values())

    def _evaluate(self, entry: Entry) -> None:
        try:
            self._evaluate_once(entry)
        except (RuntimeError, IndexError) as error:
            if not self._replace:
                raise
            raise ReplacedError(f"{entry.operation.full}: {error}") from error

    def _evaluate_once(self, entry: Entry) -> None:
        self._dead.clear()
        args, kwargs = self._given(entry.args), self._given(entry.kwargs)
        if any(r.drawn is not None for r in (*entry.results, *entry.written)):
            self._draw(entry, args)
            return
        try:
            if self._wide and entry.operation.name in FORMULAS:
                out = self._by_formula(entry, args, kwargs)
            else:
                with self:
                    out = entry.func(*args, **kwargs)
        except (RuntimeError, NotImplementedError):
            if not self._wide or entry.written:
                raise
            out = self._as_recorded(entry)
        if entry.operation.name == "_local_scalar_dense" and isinstance(out, float):
            self._rounds_on_host |= not out.is_integer()
        for result, tensor in zip(entry.results, _made(out, entry, args, kwargs)):
            if result.place.storage in self._bases:
                continue  # memory of an argument, such as the weights of a recurrent layer
            if result.kept:
                self._kept[result.place.storage] = tensor
            else:
                self._bases[result.place.storage] = self._laid_out(tensor, result.place)

    def _draw(self, entry: Entry, args: Sequence[Any]) -> None:
        """Give the results of a call that drew random numbers what was drawn."""
        inputs = [self._known(t) for t in tensors_in(args)]
        outputs, written = [], set()
        for result in (*entry.written, *entry.results):
            if result.drawn is None:
                continue
            if result.shared:
                tensor = self._tensor(result.place)
                tensor.copy_(result.drawn)
                written.add(id(tensor))
            else:
                drawn = result.drawn.to(self._dtype(result.drawn.dtype))
                if entry.operation.name == "native_dropout" and drawn.is_floating_point():
                    drawn = args[0] * entry.results[1].drawn / (1 - args[1])
                self._bases[result.place.storage] = self._laid_out(drawn, result.place)
                tensor = self._tensor(result.place)
            outputs.append(tensor)
        self._step(entry.operation, "dropout", inputs, outputs, written, ((), {}))

    def _by_formula(self, entry: Entry, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """Evaluate a kernel that has no float64 as its formula."""
        self._opened = operation_name(entry.operation.name, "")
        try:
            with self:
                made = FORMULAS[entry.operation.name](*args, **kwargs)
        finally:
            self._opened = ""
        kept = [r.place for r in entry.results[len(made) :]]
        rest = [torch.zeros(p.shape, dtype=self._dtype(p.dtype), device=p.device) for p in kept]
        for tensor in rest:
            self._values.note(tensor, self._known(made[0]), written=False, uninitialised=False)
        return [*made, *rest]

    def _as_recorded(self, entry: Entry) -> Any:
        """Evaluate an operation that has no float64 kernel in its own format."""
        args, kwargs = self._given(entry.args, narrow=True), self._given(entry.kwargs, narrow=True)
        out = entry.func(*args, **kwargs)
        wide = [t.to(self._dtype(t.dtype)) for t in tensors_in(out)]
        inputs = [self._known(t) for t in tensors_in((self._given(entry.args), self._given(entry.kwargs)))]
        self._step(entry.operation, "", inputs, wide, set(), (args, kwargs))
        return wide

    # --- tensors ---

    def _dtype(self, dtype: torch.dtype) -> torch.dtype:
        return _WIDE.get(dtype, dtype) if self._wide else dtype

    def _given(self, tree: Any, *, narrow: bool = False) -> Any:
        if isinstance(tree, Place):
            tensor = self._tensor(tree)
            if not tree.live and self._context.phase == "forward":
                self._dead.add(id(tensor))
            return tensor.to(tree.dtype) if narrow else tensor
        if isinstance(tree, torch.dtype):
            return tree if narrow else self._dtype(tree)
        if isinstance(tree, float) and self._noise and self._rounds_on_host and not _is_short(tree):
            return tree * (1 + _OF_FLOAT32 * self._noise.sign())
        if isinstance(tree, tuple | list):
            return type(tree)(self._given(x, narrow=narrow) for x in tree)
        if isinstance(tree, dict):
            return {k: self._given(x, narrow=narrow) for k, x in tree.items()}
        return tree

    def _tensor(self, place: Place) -> Tensor:
        if place.storage in self._kept:
            return self._kept[place.storage]
        base = self._bases.get(place.storage)
        new = base is None
        if base is None:
            base = self._bases[place.storage] = self._from_outside(place.storage)
        tensor = torch.as_strided(_typed(base, place), place.shape, place.strides, place.offset)
        tensor = torch._conj(tensor) if place.conjugated else tensor
        if new or place.storage in self._tape.outside:
            name = self._tape.names.get(place)
            if name is not None:
                self._names[id(tensor)] = name
                self._known(tensor)  # before what is computed from it, since values are shown in order
                del self._names[id(tensor)]
        return tensor

    def _from_outside(self, storage: int) -> Tensor:
        tensor = self._tape.outside[storage]
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        whole = torch.as_strided(tensor, (size,), (1,), 0)
        base = whole.to(self._dtype(whole.dtype), copy=True)
        roles = {role for place, (role, _) in self._tape.names.items() if place.storage == storage}
        written = roles <= ({"buffer", "input"} if storage in self._tape.closed else {"buffer"})
        if self._wide and whole.dtype == torch.float32 and written:
            base.copy_(torch.as_tensor(exact_constants(base.cpu().numpy(), whole=bool(roles))))
        for place, (_, name) in self._tape.names.items():
            if place.storage == storage and name in self._weights:
                target = torch.as_strided(base, place.shape, place.strides, place.offset)
                target.copy_(_as_tensor(self._weights[name]).reshape(place.shape))
        return base

    def _laid_out(self, tensor: Tensor, place: Place) -> Tensor:
        """Return a tensor of a storage in which the result lies where it was recorded."""
        if (tensor.storage_offset(), tuple(tensor.shape), tensor.stride()) == (
            place.offset, place.shape, place.strides,
        ):  # fmt: skip
            return tensor
        size = place.offset + 1 + sum((n - 1) * s for n, s in zip(place.shape, place.strides))
        base = tensor.new_zeros(max(size, 0))
        there = torch.as_strided(base, place.shape, place.strides, place.offset)
        # embedding_bag keeps no offsets of its bags in float32, and does in float64.
        if there.numel() or not tensor.numel():
            there.copy_(tensor.reshape(place.shape))
        self._values.note(there, self._known(tensor), written=False, uninitialised=False)
        return base

    def _known(self, tensor: Tensor) -> int:
        found = self._values.of(tensor).id
        if found in self._replace and found >= self._seen:
            tensor.copy_(_as_tensor(self._replace[found]).reshape(tensor.shape))
        self._show(found, tensor)
        return self._detached.get(found, found) if id(tensor) in self._dead else found

    def _show(self, value: int, tensor: Tensor) -> None:
        if value >= self._seen:
            self._seen = value + 1
            # A look at a conjugated view makes calls of its own.
            with _disable_current_modes() if tensor.is_conj() or tensor.is_neg() else nullcontext():
                self._visit(value, tensor)

    def _depends(self, value: int) -> bool:
        """Return whether a value depends on a parameter or an input: constants are given no noise."""
        found = self.trace.values[value]
        return value in self._moving or (found.producer is None and found.role not in ("constant", ""))

    # --- operations ---

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        operation = describe(func)
        if self._wide and operation.name in ("_softmax", "_log_softmax"):
            args = (*args[:2], False)
        parts = decomposition_of(func, operation.name, args) if self._wide else None
        if parts is not None:
            opened = self._open(parts, func, operation, args, kwargs)
            if opened is not None:
                return opened
        given = [] if operation.shapes_only else list(tensors_in((args, kwargs)))
        written = written_by(operation, args, kwargs)
        skipped = {id(t) for t in written} if operation.overwrites else set()
        inputs = [self._known(t) for t in given if id(t) not in skipped]
        for tensor in written:
            self._values.before_write(tensor)
        fused = self._wide and operation.name.startswith("_fused_ada")
        out = _with_float32_counts(func, args, kwargs) if fused else func(*args, **kwargs)
        if operation.empty:  # whatever lies there would differ from run to run
            for tensor in tensors_in(out):
                tensor.zero_()
        ids = {id(t) for t in written}
        kept = list(tensors_in(operation.kept(out)))
        ids |= {id(t) for t in kept}
        outputs = written + [t for t in tensors_in(out) if id(t) not in ids]
        names = {id(t): v for t, v in zip((t for t in given if id(t) not in skipped), inputs)}
        code = code_of(func, args, kwargs, names, out) if len(self.trace.steps) in self.wanted else None
        self._step(operation, "", inputs, outputs, ids, (args, kwargs))
        for tensor in kept:
            self._values.note(tensor, self.trace.steps[-1].outputs[0], written=False, uninitialised=False)
        if code is not None:
            made = self.trace.steps[-1]
            self.code[made.index] = code({id(t): v for t, v in zip(outputs, made.outputs)})
        return out

    def _open(
        self,
        parts: Callable[..., Any],
        func: Callable[..., Any],
        operation: Operation,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Evaluate an operation as a function of simpler ones; None if that gives something else."""
        outer, self._opened = self._opened, self._opened or operation_name(operation.name, "")
        first = len(self.trace.values)
        try:
            with self:
                made = parts(*args, **kwargs)
        except ReplacedError:
            raise
        except (RuntimeError, NotImplementedError, TypeError, AttributeError):
            made = None
        finally:
            self._opened = outer
        if written_by(operation, args, kwargs):
            return made
        whole = func(*args, **kwargs)
        ours, theirs = list(tensors_in(made)), list(tensors_in(whole))
        for i, tensor in enumerate(theirs):
            same = i < len(ours) and ours[i].shape == tensor.shape
            if same and self._is_opened((self._wide, first, i), ours[i], tensor):
                if self._noise or self._replace:
                    tensor.copy_(ours[i])
                self._values.note(tensor, self._known(ours[i]), written=False, uninitialised=False)
            else:
                inputs = [self._known(t) for t in tensors_in((args, kwargs))]
                self._step(operation, "", inputs, [tensor], set(), (args, kwargs))
        return whole

    def _is_opened(self, which: tuple[bool, int, int], ours: Tensor, theirs: Tensor) -> bool:
        """Return whether a result is that of the parts, as in the first play: values keep their numbers,
        though other values may make a result differ, such as a sum that cancels."""
        if which not in self._tape.opened:
            self._tape.opened[which] = _close(ours, theirs)
        return self._tape.opened[which]

    def _step(
        self,
        operation: Operation,
        name: str,
        inputs: Sequence[int],
        outputs: Sequence[Tensor],
        written: set[int],
        call: tuple[tuple[Any, ...], dict[str, Any]],
    ) -> None:
        own = operation_name(operation.name, "")
        computes = own not in _STILL and own not in EXACT
        computed = [t for t in outputs if t.is_floating_point()] if computes else []
        moves = any(self._depends(i) for i in inputs)
        for tensor in computed if self._noise and (moves or self.noisy_constants) else ():
            self._add_noise(tensor)
        ids = [self.trace.add_value() for _ in outputs]
        self._moving.update(ids if moves else ())
        for tensor, value in zip(outputs, ids):
            if value in self._replace:
                _fill(tensor, self._replace[value])
            self._values.note(tensor, value, written=id(tensor) in written, uninitialised=operation.empty)
        self._add_step(operation, name, inputs, ids, call)
        for tensor, value in zip(outputs, ids):
            self._show(value, tensor)

    def _add_noise(self, tensor: Tensor) -> None:
        """Add noise to a tensor: in its own memory if NumPy can look at that."""
        moved = host(tensor.contiguous())
        self._noise.add_to(moved)
        if moved.ctypes.data != tensor.data_ptr():
            tensor.copy_(_as_tensor(moved))

    def _add_step(
        self,
        operation: Operation,
        name: str,
        inputs: Sequence[int],
        outputs: Sequence[int],
        call: tuple[tuple[Any, ...], dict[str, Any]],
    ) -> None:
        of, own = self._context, operation_name(operation.name, "")
        forward = None if of.forward is None else self._steps.get(of.forward)
        self.trace.add_step(
            name or self._opened or (of.operation if own not in MOVING else own),
            inputs=inputs,
            outputs=outputs,
            primitive=f"{own}" if own in _STILL or self._opened else operation.full,
            phase=of.phase,
            scalars=[*numbers_in(call), *defaults_in(operation, *call)],
            module=of.module,
            place=of.place,
            frames=of.frames,
            forward=forward,
            library=of.library,
            options=of.options or options_in(operation, *call),
        ).roles = roles_of(operation.name, call[0])


def _typed(base: Tensor, place: Place) -> Tensor:
    """Return a tensor of the storage whose elements are complex or real as those of the place are."""
    if base.is_complex() == place.dtype.is_complex:
        return base
    size = base.untyped_storage().nbytes() // base.element_size()
    whole = torch.as_strided(base, (size,), (1,), 0)
    return torch.view_as_real(whole).reshape(-1) if base.is_complex() else whole.view(base.dtype.to_complex())


def _is_short(number: float) -> bool:
    """Return whether a number has few digits, as one that somebody wrote."""
    return float(f"{number:.6g}") == number  # float32 holds any decimal number of six digits


def _as_tensor(array: Any) -> Tensor:
    """Return an array of NumPy as a tensor, also one whose entries lie in another order."""
    return torch.as_tensor(np.asarray(array, order="C"))


def _fill(tensor: Tensor, array: Any) -> None:
    """Write an array into a tensor; one whose entries share memory cannot hold others."""
    new = _as_tensor(array)
    if new.numel() != tensor.numel() or any(n > 1 and k == 0 for n, k in zip(tensor.shape, tensor.stride())):
        raise ReplacedError(f"{list(new.shape)} does not fit {list(tensor.shape)}")
    tensor.copy_(new.reshape(tensor.shape))


def _with_float32_counts(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a fused optimizer in float64: its kernel reads counts of steps and loss scales as float32."""
    at = [argument.name for argument in func._schema.arguments].index("state_steps")
    counts = [t.float() for t in args[at]]
    scales = {k: v.float() for k, v in kwargs.items() if isinstance(v, Tensor)}
    rate = {"lr": float(kwargs["lr"])}  # a float32 tensor could not hold the float64 that was given
    out = func.overloadpacket.default(*args[:at], counts, *args[at + 1 :], **{**kwargs, **scales, **rate})
    for count, changed in zip(args[at], counts):
        count.copy_(changed)  # Adagrad's kernel counts
    return out


def _made(out: Any, entry: Entry, args: Any, kwargs: Any) -> list[Tensor]:
    written = {id(t) for t in written_by(entry.operation, args, kwargs)}
    return [t for t in tensors_in(out) if id(t) not in written]


def _close(a: Tensor, b: Tensor) -> bool:
    if not a.is_floating_point():
        return bool((a == b).all())
    scale = b.abs().nan_to_num(0, 0, 0).max() if b.numel() else 0.0
    return bool(((a - b).abs().nan_to_num(0, 0, 0) <= SAME_ENTRIES * scale + 1e-300).all())
