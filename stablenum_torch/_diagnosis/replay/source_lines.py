"""Find where in the user's source an operation was called, from Python's stack.

The stack also shows the running modules, the public function, whether an optimizer is stepping, and whether
activation checkpointing is running the forward pass again, so no hooks are needed.
"""

from __future__ import annotations

import functools
import linecache
import os
import sys
from dataclasses import dataclass, field
from enum import Enum, auto
from types import CodeType, FrameType

from torch import nn

from stablenum.diagnosis.replay.source_files import is_outside, span_of, users_frame
from stablenum.diagnosis.replay.values import Place
from stablenum_torch._diagnosis.replay.naming import PUBLIC

__all__ = ["Survey", "is_user_file", "place_of", "survey", "users_place", "users_places"]

_FOREIGN = (
    "accelerate", "equinox", "flax", "jax", "jaxlib", "numpy", "optax", "stablenum", "stablenum_jax",
    "stablenum_torch", "torch",
)  # fmt: skip


class _Kind(Enum):
    OTHER = auto()
    USER = auto()
    MODULE = auto()
    PUBLIC = auto()
    ENGINE = auto()  # frames outside it called the backward pass, frames inside belong to it
    CHECKPOINT = auto()
    FUNCTION = auto()  # a custom autograd.Function
    UPDATE = auto()
    LIBRARY = auto()  # a function made of many operations, none of which is the user's
    STOP = auto()


@dataclass(slots=True)
class Survey:
    """What the stack shows about the running operation.

    Attributes:
        frames: the user's frames, outermost first; only those inside the backward pass if ``engine`` is True.
        outer: the user's frames that called the backward pass.
        modules: the running modules, outermost first.
        public: a public function of torch that calls the operation.
        engine: whether the operation runs in the autograd engine.
        checkpoint: whether activation checkpointing runs the forward pass again.
        function: whether a custom ``autograd.Function`` is running.
        update: whether an optimizer is stepping.
        library: the function of torch that the user's line called, if it consists of many operations.
    """

    frames: tuple[Place, ...] = ()
    outer: tuple[Place, ...] = ()
    modules: tuple[nn.Module, ...] = ()
    public: str = ""
    engine: bool = False
    checkpoint: bool = False
    function: bool = False
    update: bool = False
    library: str = ""
    _lists: tuple[list[Place], list[Place]] = field(default_factory=lambda: ([], []))


def survey(stop: CodeType) -> Survey:
    """Read the stack from the caller out to the frame that runs ``stop``."""
    found, modules = Survey(), []
    inner, outer = found._lists
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        kind = _STOP if code is stop else _kind(code)
        if kind is _Kind.STOP:
            break
        if kind is _Kind.USER:
            (outer if found.engine else inner).append(place_of(code, frame.f_lineno, frame.f_lasti))
        elif kind is _Kind.UPDATE:
            found.update = True
            if not inner:
                found.library = _optimizer(frame)
        elif found.engine or kind is _Kind.OTHER:
            pass
        elif kind is _Kind.LIBRARY:
            if not inner:
                found.library = _library(code)
        elif kind is _Kind.MODULE:
            modules.append(frame.f_locals["self"])
        elif kind is _Kind.PUBLIC and not inner and not modules:
            found.public = _public(code, frame.f_lineno) or found.public
        elif kind is _Kind.ENGINE:
            found.engine = True
        elif kind is _Kind.CHECKPOINT:
            # The checkpoint's bookkeeping (detaching inputs) does not belong to the forward pass.
            found.checkpoint = found.checkpoint or bool(inner or modules)
        elif kind is _Kind.FUNCTION:
            found.function = True
        frame = frame.f_back
    found.frames, found.outer = tuple(reversed(inner)), tuple(reversed(outer))
    found.modules = tuple(reversed(modules))
    return found


_STOP = _Kind.STOP
# Cached by id, because hashing a code object is slow. The object is kept, so that its id is not reused.
_kinds: dict[int, tuple[_Kind, CodeType]] = {}
_places: dict[tuple[int, int], Place] = {}


def _kind(code: CodeType) -> _Kind:
    known = _kinds.get(id(code))
    if known is None:
        known = _kinds[id(code)] = (_classified(code), code)
    return known[0]


def _classified(code: CodeType) -> _Kind:
    file, name = code.co_filename.replace(os.sep, "/"), code.co_name
    if file.endswith("torch/nn/modules/module.py"):
        return _Kind.MODULE if name == "_call_impl" else _Kind.OTHER
    if file.endswith(("torch/nn/functional.py", "torch/functional.py", "torch/_tensor.py")):
        return _Kind.PUBLIC if name in PUBLIC or name == "multi_head_attention_forward" else _Kind.OTHER
    if "/torch/distributions/" in file or file.endswith(_WEIGHTS):
        return _Kind.LIBRARY
    if file.endswith("torch/autograd/graph.py"):
        return _Kind.ENGINE if name == "_engine_run_backward" else _Kind.OTHER
    if file.endswith("torch/utils/checkpoint.py"):
        return _Kind.CHECKPOINT
    if file.endswith("torch/autograd/function.py"):
        return _Kind.FUNCTION if name == "apply" else _Kind.OTHER
    if file.endswith("torch/optim/optimizer.py"):
        return _Kind.UPDATE if code.co_qualname.startswith("Optimizer.profile_hook_step") else _Kind.OTHER
    if "/torch/optim/" in file and name == "step" and not file.endswith(("lr_scheduler.py", "swa_utils.py")):
        return _Kind.UPDATE  # torch notes only the step of the class that was made, not the one it calls
    return _Kind.USER if is_user_file(code.co_filename) else _Kind.OTHER


@functools.lru_cache(maxsize=4096)
def is_user_file(file: str) -> bool:
    """Return whether a file belongs neither to a framework nor to the standard library."""
    if file.startswith(("<frozen", "<eval_with_key", "<__", "<string>")):
        return False
    return is_outside(file, _FOREIGN)  # packages that are not named count as the user's


def place_of(code: CodeType, line: int, offset: int | None = None) -> Place:
    """Return the place of a line; with the offset of an instruction, its expression is known too."""
    key = (id(code), line if offset is None else ~offset)
    place = _places.get(key)
    if place is None:
        source = linecache.getline(code.co_filename, line).strip()
        span = None if offset is None else span_of(code, offset)
        place = _places[key] = Place(code.co_filename, line, code.co_name, source, span)
    return place


# Files whose functions divide a weight by its length, before or in the forward pass.
_WEIGHTS = (
    "torch/nn/utils/parametrizations.py", "torch/nn/utils/spectral_norm.py", "torch/nn/utils/weight_norm.py",
)  # fmt: skip


def _library(code: CodeType) -> str:
    """Return the name of the library's function to which the code belongs."""
    if code.co_filename.replace(os.sep, "/").endswith(_WEIGHTS):
        kind = (
            "spectral_norm"
            if "spectral" in f"{code.co_filename}{code.co_qualname}".lower()
            else "weight_norm"
        )
        return f"torch.nn.utils.{kind}"
    return f"torch.distributions.{code.co_qualname}"


def _optimizer(frame: FrameType) -> str:
    """Return the name of the optimizer whose step a frame of torch runs."""
    if frame.f_code.co_name == "step":
        return f"torch.optim.{frame.f_code.co_qualname.partition('.')[0]}"
    given = frame.f_locals.get("args") or (frame.f_locals.get("self"),)
    return f"torch.optim.{type(given[0]).__name__}"


def _public(code: CodeType, line: int) -> str:
    if code.co_name != "multi_head_attention_forward":
        return code.co_name
    # torch's attention function is compiled and has no Python frame.
    called = linecache.getline(code.co_filename, line)
    return "scaled_dot_product_attention" if "scaled_dot_product_attention(" in called else ""


def users_place() -> Place | None:
    """Return the innermost line of the user's that is running."""
    frame = users_frame(is_user_file)
    return None if frame is None else place_of(frame.f_code, frame.f_lineno)


def users_places(most: int = 3) -> tuple[Place, ...]:
    """Return the innermost lines of the user's that are running, the innermost first."""
    frame, found = users_frame(is_user_file), list[Place]()
    while frame is not None and len(found) < most:
        if is_user_file(frame.f_code.co_filename):
            found.append(place_of(frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)
