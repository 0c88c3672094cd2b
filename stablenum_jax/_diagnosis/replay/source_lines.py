"""Find where an equation was written: the user's line, and the library functions between it and JAX."""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

from stablenum.diagnosis import Place
from stablenum.diagnosis.replay.source_files import is_outside, package_of, span_of, users_frame
from stablenum_jax._diagnosis.replay.naming import function_name

__all__ = ["NOWHERE", "Source", "callers", "is_user_code", "place_in", "source_of", "users_place"]

_LIBRARIES = (
    "jax", "jaxlib", "flax", "equinox", "optax", "numpy", "chex", "jaxtyping", "stablenum", "stablenum_jax",
    "stablenum_torch", "torch", "haiku", "einops", "distrax", "orbax", "_pytest", "pluggy",
)  # fmt: skip
# Parts of JAX that are made of operations, as a library is.
_STATS = "/jax/_src/scipy/stats/"
_COMPOSED = (_STATS, "/jax/_src/random", "/jax/example_libraries/")
_REPLAY = os.path.dirname(os.path.abspath(__file__)) + os.sep
_OWN = os.path.dirname(os.path.dirname(_REPLAY[:-1])) + os.sep  # this package
_WATCH = os.path.join(os.path.dirname(_REPLAY[:-1]), "watch") + os.sep
# What flax's modules are wrapped in stands between the user's line and the layer.
_WRAPPERS = ("/flax/linen/module.py", "/flax/linen/transforms.py", "/flax/core/")
_NAMESPACES = ("/flax/linen/", "/flax/nnx/")
# Frames below these belong to the rule of a derivative, not to the differentiated call.
_DIFFERENTIATION = ("/interpreters/ad.py", "/interpreters/batching.py", "/interpreters/backward_pass.py")
# Frames of JAX itself between a call and what it calls.
_PLUMBING = (
    "/jax/_src/interpreters/", "/jax/_src/pjit.py", "/jax/_src/core.py", "/jax/_src/api",
    "/jax/_src/linear_util",
    "/jax/_src/custom_derivatives.py", "/jax/_src/traceback_util.py", "/jax/_src/source_info_util.py",
    "/jax/_src/profiler.py", "/jax/_src/util.py", "/jax/_src/tree_util.py", "/jax/_src/ad_checkpoint.py",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Source:
    """What a traceback contains.

    Attributes:
        place: the innermost frame of the user's code.
        frames: the frames of the user's code, outermost first.
        call: the bytecode instruction of the call, which differs for two operations on one line.
        functions: the library functions below it, outermost first.
        inner: their instructions, which the equations of a derivative share with those of the call.
        library: the function of another package than JAX that the user's line called.
    """

    place: Place | None = None
    frames: tuple[Place, ...] = ()
    call: Any = None
    functions: tuple[str, ...] = ()
    inner: tuple[Any, ...] = ()
    library: str = ""

    def within(self, outer: Source) -> Source:
        """Return where an equation without a frame of the user's was written, given its call."""
        return replace(
            outer,
            functions=outer.functions + self.functions,
            inner=outer.inner + self.inner,
            library=outer.library or self.library,
        )


NOWHERE = Source()


def source_of(traceback: Any) -> Source:
    """Read a traceback of jaxlib."""
    if traceback is None:
        return NOWHERE
    codes, offsets = _raw(traceback)
    frames: list[Place] = []
    call: Any = None
    below: list[tuple[CodeType, int]] = []
    for code, offset in zip(codes, offsets, strict=True):  # innermost first
        if code.co_filename.startswith(_REPLAY):
            break
        if is_user_code(code.co_filename):
            if not frames:
                call = (id(code), offset)
            frames.append(place_in(code, _line(traceback, code, offset), offset))
        elif not frames:
            below.append((code, offset))
    below.reverse()
    inner = tuple(_calls(below))
    return Source(
        place=frames[0] if frames else None,
        frames=tuple(reversed(frames)),
        call=call,
        functions=tuple(_name(code) for code, _ in inner),
        inner=tuple((id(code), offset) for code, offset in inner),
        library=_library([code for code, _ in inner]),
    )


def callers() -> tuple[Place, ...]:
    """Return the frames of the user's code that called the function which a watched script is replaying,
    outermost first; none if nothing is watched."""
    found: list[Place] = []
    frame: FrameType | None = sys._getframe(1)
    watched = False
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_WATCH):
            watched = True
        elif watched and is_user_code(code.co_filename):
            found.append(place_in(code, frame.f_lineno))
        frame = frame.f_back
    return tuple(reversed(found))


def _library(codes: Sequence[CodeType]) -> str:
    """Return the name of a library's function or layer that no function of ours replaces; "" for JAX's
    operations."""
    called = (c for c in codes if not c.co_filename.startswith(_OWN))  # not the watch's
    code = next((c for c in called if not any(part in c.co_filename for part in _WRAPPERS)), None)
    if code is None:
        return ""
    package = package_of(code.co_filename)
    if package == "optax" and (transformation := _transformation(codes)):
        return f"optax.{transformation}"
    elementary = package == "jax" and not any(part in code.co_filename for part in _COMPOSED)
    if package in ("", "jaxlib", "numpy", "stablenum_jax") or elementary or function_name([_name(code)]):
        return ""
    if _STATS in code.co_filename:
        return f"jax.scipy.stats.{os.path.basename(code.co_filename).removesuffix('.py')}.{_name(code)}"
    spaces = [part.strip("/").replace("/", ".") for part in _NAMESPACES if part in code.co_filename]
    return f"{next(iter(spaces), package)}.{_name(code).removesuffix('.__call__')}"


def _transformation(codes: Sequence[CodeType]) -> str:
    """Return the name of optax's innermost transformation whose update runs; "" if none does."""
    made = [_name(code).partition(".<locals>.") for code in codes if package_of(code.co_filename) == "optax"]
    known = [maker for maker, _, function in made if maker.startswith("scale_by_") or "update" in function]
    return next((m for m in known if m.startswith("scale_by_")), known[-1] if known else "")


def _calls(below: list[tuple[CodeType, int]]) -> list[tuple[CodeType, int]]:
    """Return the library's frames, without JAX's own, up to the first frame of a differentiation."""
    calls = []
    for code, offset in below:
        name = code.co_filename
        if name.endswith(_DIFFERENTIATION):
            break
        if not any(p in name for p in _PLUMBING):
            calls.append((code, offset))
    return calls


def _raw(traceback: Any) -> tuple[list[CodeType], list[int]]:
    try:
        codes, offsets = traceback.raw_frames()
    except AttributeError:
        return [], []
    return list(codes), list(offsets)


def _line(traceback: Any, code: CodeType, offset: int) -> int:
    try:
        return int(type(traceback).code_addr2line(code, offset))
    except AttributeError:
        return code.co_firstlineno


@lru_cache(maxsize=4096)
def is_user_code(file: str) -> bool:
    """Return whether a file is the user's: not part of the standard library or of a known library."""
    if file.startswith("<"):
        return not file.startswith(("<frozen", "<attrs"))  # a console, a notebook, a doctest
    return is_outside(file, _LIBRARIES)


def place_in(code: CodeType, line: int, offset: int | None = None) -> Place:
    """Return a line of a function; with the offset of an instruction, its expression is known too."""
    # The result is not cached by code object, because code objects of two files with the same text are equal.
    span = None if offset is None else span_of(code, offset)
    return _place(code.co_filename, _name(code), line, span)


def users_place() -> Place | None:
    """Return the innermost line of the user's that is running."""
    frame = users_frame(is_user_code)
    return None if frame is None else place_in(frame.f_code, frame.f_lineno)


@lru_cache(maxsize=4096)
def _place(file: str, name: str, line: int, span: tuple[int, int, int, int] | None) -> Place:
    return Place(file, line, name.rsplit(".", 1)[-1], linecache.getline(file, line).strip(), span)


def _name(code: CodeType) -> str:
    return str(getattr(code, "co_qualname", code.co_name))
