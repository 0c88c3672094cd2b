"""Compare what a script's own ``autograd.Function`` gives as its derivative with what it computes."""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import array_api_compat.torch as torch_namespace
import torch
from torch import Tensor
from torch.autograd.function import Function, _is_setup_context_defined, _SingleLevelFunction
from torch.utils.checkpoint import CheckpointFunction

from stablenum.diagnosis.checkup.custom_derivatives import (
    MOST_CALLS,
    MOST_ELEMENTS,
    CustomDerivative,
    compared,
)
from stablenum.diagnosis.replay.source_files import is_the_scripts, return_in
from stablenum.diagnosis.replay.values import Place
from stablenum.diagnosis.watch.frames import transparent
from stablenum.diagnosis.watch.session import FAILED
from stablenum_torch._devices.generators import rng_state, set_rng_state
from stablenum_torch._diagnosis.checkup.updates import wide
from stablenum_torch._diagnosis.replay.recorder import require_grad
from stablenum_torch._diagnosis.replay.source_lines import users_place
from stablenum_torch._diagnosis.watch.unseen import never_compiled

__all__ = ["Aside", "CustomFunctions"]

# A function that cannot be evaluated again at all, or only at a cost, raises one of many errors.
_Errors = Exception
# What a backward pass computes again, as reversible layers do, differs by less than this part. Chosen.
_COMPUTED_AGAIN = 1e-3
# Other arguments, such as modules and generators, have a state that a call may change.
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, tuple)


class Aside(Protocol):
    """Does something that is not recorded.

    Attributes:
        looking: whether something is being done.
    """

    @property
    def looking(self) -> bool:
        """Whether something is being done."""

    def look(self, action: Callable[..., Any], *args: Any) -> Any:
        """Return what ``action`` returns; FAILED if it fails."""


class CustomFunctions:
    """Watches the functions that a script applies, while a step is measured.

    Args:
        aside: runs the comparisons.

    Attributes:
        found: what was found, in the order of the calls.
        cut: where reentrant checkpoints were given nothing that needs a gradient, so that what is inside of
            them gets none.
        step: the number of the step that is measured.
        written_on: returns the line that wrote a tensor's present numbers, if it is known.
    """

    def __init__(self, aside: Aside) -> None:
        self._aside = aside
        self._seen: dict[type, int] = {}
        self.found: list[CustomDerivative] = []
        self.cut: list[Place] = []
        self._before: Any = None
        self.step = 0
        self.written_on: Callable[[Tensor], Place | None] = lambda tensor: None

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Watch in this context."""
        self.install()
        try:
            yield
        finally:
            self.uninstall()

    def install(self) -> None:
        """Watch from now on, also where the script has kept a bound ``apply``: all of them end here."""
        watched, look = self, self._aside.look

        @never_compiled
        @transparent
        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if issubclass(cls, CheckpointFunction) and torch.is_grad_enabled():
                look(watched.note_checkpoint, args)
            plain = super(_SingleLevelFunction, cls).apply  # type: ignore[misc]  # of torch's C base class
            if watched._aside.looking or kwargs or not watched.is_watched(cls):
                return plain(*args, **kwargs)
            kept = look(watched.before, cls, args)
            result = plain(*args)
            if kept is not FAILED and kept is not None:
                look(watched.after, kept, result)
            return result

        self._before = vars(_SingleLevelFunction).get("apply")
        _SingleLevelFunction.apply = classmethod(apply)

    def uninstall(self) -> None:
        """Watch no longer."""
        if self._before is None:
            del _SingleLevelFunction.apply
        else:
            _SingleLevelFunction.apply = self._before

    def is_watched(self, cls: type[Function]) -> bool:
        """Return whether a function is the user's, and has not been looked at often enough."""
        code = getattr(cls.forward, "__code__", None)
        mine = code is not None and is_the_scripts(code.co_filename)
        alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
        return mine and alone and self._seen.get(cls, 0) < MOST_CALLS and torch.is_grad_enabled()

    def note_checkpoint(self, args: tuple[Any, ...]) -> None:
        """Note a reentrant checkpoint, if none of its inputs needs a gradient."""
        place = None if require_grad(args, {}) else users_place()
        if place is not None and place not in self.cut:
            self.cut.append(place)

    def before(self, cls: type[Function], args: tuple[Any, ...]) -> _Call | None:
        """Keep what a function is given, which it may write to."""
        # A checkpoint and the script's own hooks count what is saved.
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return None
        if not all(isinstance(a, _PLAIN) for a in args if not isinstance(a, Tensor)):
            return None
        given = [a for a in args if isinstance(a, Tensor)]
        if torch._C._are_functorch_transforms_active() or not any(map(_is_differentiable, given)):
            return None
        if sum(t.numel() for t in given) > MOST_ELEMENTS:
            return None
        self._seen[cls] = self._seen.get(cls, 0) + 1
        return _Call(cls, args, users_place())

    def after(self, call: _Call, result: Any) -> None:
        """Compare the derivatives, and what the function has saved, once the backward pass comes to it."""
        node = next((t.grad_fn for t in _tensors(result) if t.grad_fn is not None), None)
        if node is None:
            return
        call.note_outputs(result)
        number, step = len(self.found), self.step
        self.found.append(
            CustomDerivative(call.cls.__name__, call.place, _return_of(call.cls.backward), step)
        )
        tensors = (t for t in getattr(node, "saved_tensors", ()) if isinstance(t, Tensor))
        kept = [t.detach() for t in tensors if t.layout is torch.strided and not _is_freed(t)]
        saved = kept if sum(t.numel() for t in kept) <= MOST_ELEMENTS else []
        copies = [t.clone() for t in saved]
        judged = False

        def compare(gradients: Sequence[Tensor | None]) -> None:
            nonlocal judged
            if step == self.step and not judged:
                judged = True
                self._aside.look(self._judge, number, call, gradients)
                self._aside.look(self._note_overwritten, number, saved, copies)

        node.register_prehook(compare)

    def _judge(self, number: int, call: _Call, gradients: Sequence[Tensor | None]) -> None:
        """Compare the derivatives of a call, whose outputs were given gradients."""
        call.note_cotangents(gradients)
        with contextlib.suppress(_Errors), warnings.catch_warnings(record=True):
            found, flat = call.compared()
            self.found[number] = replace(self.found[number], differences=found, flat=flat)

    def _note_overwritten(self, number: int, saved: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
        changed = tuple(i for i, pair in enumerate(zip(saved, copies, strict=True)) if _has_changed(*pair))
        if changed:
            writers = [self.written_on(saved[i]) for i in changed]
            known = tuple(dict.fromkeys(w for w in writers if w is not None))
            self.found[number] = replace(self.found[number], overwritten=changed, writers=known)


def _is_freed(t: Tensor) -> bool:
    """Return whether a tensor's memory was given back, as reversible layers do; reading it would crash."""
    return t.numel() > 0 and t.untyped_storage().size() == 0


def _has_changed(now: Tensor, then: Tensor) -> bool:
    """Return whether a tensor has other numbers; not if it was freed, or computed again but for rounding."""
    if _is_freed(now):
        return False
    now, then = (torch.nan_to_num(wide(t)) for t in (now, then))
    return float((now - then).norm()) > _COMPUTED_AGAIN * float(then.norm())


class _Call:
    """A call that can be evaluated again: see ``CustomCall``."""

    def __init__(self, cls: type[Function], args: tuple[Any, ...], place: Place | None) -> None:
        self.cls, self.place = cls, place
        self.args = [a.detach().clone() if isinstance(a, Tensor) else a for a in args]
        self.at = [i for i, a in enumerate(args) if isinstance(a, Tensor) and _is_differentiable(a)]
        self.inputs = [self.args[i].double() for i in self.at]
        self.outputs: list[Tensor] = []
        self.cotangents: list[Tensor] | None = None
        self._numeric: list[int] = []  # which outputs are floating-point tensors
        self._as_given = False  # whether the function takes its inputs in their own format only
        self._rng = rng_state()

    def note_outputs(self, result: Any) -> None:
        """Keep what the training was given."""
        items = result if isinstance(result, tuple) else (result,)
        self._numeric = [i for i, t in enumerate(items) if isinstance(t, Tensor) and t.is_floating_point()]
        self.outputs = self.wide(result)

    def note_cotangents(self, gradients: Sequence[Tensor | None]) -> None:
        """Keep what the backward pass gives, with zeros for outputs that the loss does not use."""
        own = [gradients[i] for i in self._numeric]
        self.cotangents = [
            torch.zeros_like(y) if g is None else g.detach().double()
            for g, y in zip(own, self.outputs, strict=True)
        ]

    def compared(self) -> tuple[Any, Any]:
        """Return how the derivatives differ; the generators are left as they were, and nothing is printed."""
        before = rng_state()
        try:
            with torch.enable_grad(), _silence():
                functions = (self.cls.forward, self.cls.backward)
                return compared(functions, self._in, xp=torch_namespace)
        finally:
            set_rng_state(before)

    def _in(self, wide: bool) -> _Call:
        self._as_given = not wide
        return self

    def wide(self, result: Any) -> list[Tensor]:
        """Return the differentiable outputs in float64."""
        return [t.detach().double() for t in _tensors(result) if t.is_floating_point()]

    def value(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the outputs for these inputs."""
        with torch.no_grad():
            return self.wide(self._plain(self._given(inputs)))

    def written(self, cotangents: Sequence[Tensor]) -> list[Tensor]:
        """Return what the function's own derivative gives."""
        leaves = self._leaves()
        set_rng_state(self._rng)
        return self._gradients(self.cls.apply(*self._with(leaves)), leaves, cotangents)

    def ordinary(self, cotangents: Sequence[Tensor]) -> list[Tensor] | None:
        """Return what autograd gives for the operations of the function's forward pass."""
        leaves = self._leaves()
        try:
            return self._gradients(self._plain(self._with([x.clone() for x in leaves])), leaves, cotangents)
        except _Errors:  # it leaves torch, or writes into what it is given
            return None

    def _plain(self, args: Sequence[Any]) -> Any:
        set_rng_state(self._rng)
        if _is_setup_context_defined(self.cls.setup_context):
            return self.cls.forward(*args)
        return self.cls.forward(_Context([isinstance(a, Tensor) for a in args]), *args)

    def _given(self, inputs: Sequence[Tensor]) -> list[Any]:
        own = [self.args[i].dtype for i in self.at]
        return self._with(
            [x.to(dtype) if self._as_given else x.clone() for x, dtype in zip(inputs, own, strict=True)]
        )

    def _with(self, inputs: Sequence[Tensor]) -> list[Any]:
        args = [a.clone() if isinstance(a, Tensor) else a for a in self.args]
        for i, x in zip(self.at, inputs, strict=True):
            args[i] = x
        if not self._as_given:  # what is not differentiable goes with the rest
            args = [a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
        return args

    def _leaves(self) -> list[Tensor]:
        own = [self.args[i] for i in self.at]
        return [(x.clone() if self._as_given else x.double().clone()).requires_grad_() for x in own]

    def _gradients(self, result: Any, leaves: Sequence[Tensor], cotangents: Sequence[Tensor]) -> list[Tensor]:
        made = [t for t in _tensors(result) if t.is_floating_point()]
        pairs = [(t, v.to(t.dtype)) for t, v in zip(made, cotangents, strict=True) if t.requires_grad]
        if not pairs:
            raise ValueError("no output has a gradient")
        roots, given = zip(*pairs, strict=True)
        found = torch.autograd.grad(roots, leaves, given, allow_unused=True)
        return [
            torch.zeros_like(x, dtype=torch.float64) if g is None else g.detach().double()
            for g, x in zip(found, leaves, strict=True)
        ]


class _Context:
    """What a forward pass is given in place of its context; it keeps what the function notes there."""

    def __init__(self, needs: Sequence[bool]) -> None:
        self.needs_input_grad = tuple(needs)
        self.saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    save_for_forward = save_for_backward

    def mark_dirty(self, *tensors: Any) -> None:
        """Note nothing."""

    mark_non_differentiable = mark_dirty

    def set_materialize_grads(self, value: bool) -> None:
        """Note nothing."""


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Print nothing that this thread writes."""
    with (
        contextlib.redirect_stdout(_OtherThreads(sys.stdout)),
        contextlib.redirect_stderr(_OtherThreads(sys.stderr)),
    ):
        yield


class _OtherThreads:
    """A stream on which other threads write as before."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._thread = stream, threading.get_ident()

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self._thread else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _is_differentiable(t: Tensor) -> bool:
    return t.requires_grad and t.is_floating_point() and t.layout is torch.strided and not t.is_meta


def _tensors(result: Any) -> list[Tensor]:
    return [t for t in (result if isinstance(result, tuple) else (result,)) if isinstance(t, Tensor)]


def _return_of(function: Any) -> Place | None:
    """Return the last line of a function that returns something."""
    code = getattr(function, "__code__", None)
    if code is None or not is_the_scripts(code.co_filename):
        return None
    return return_in(code)
