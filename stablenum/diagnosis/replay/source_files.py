"""Tell a user's files from those of frameworks, wherever these are installed."""

from __future__ import annotations

import dis
import functools
import itertools
import linecache
import os
import re
import site
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from types import CodeType, FrameType

from stablenum.diagnosis.replay.values import Place

__all__ = [
    "folders_of",
    "is_outside",
    "is_the_scripts",
    "lines_around",
    "lines_with",
    "package_of",
    "place_in",
    "raised_by_us",
    "return_in",
    "span_of",
    "users_frame",
]

# The folders of the standard library, and of installed packages (which may lie inside them), those of an
# environment that this one extends included.
_STANDARD = tuple({sysconfig.get_paths()[key] + os.sep for key in ("stdlib", "platstdlib")})
_SITE = tuple({folder + os.sep for folder in site.getsitepackages([sys.prefix, sys.base_prefix])})


@functools.lru_cache(maxsize=4096)
def package_of(file: str) -> str:
    """Return the installed package to which a file belongs; "" for the user's own code.

    Example:
        >>> package_of("/usr/lib/python3/dist-packages/timm/layers/norm.py"), package_of("train.py")
        ('timm', '')
    """
    parts = os.path.abspath(file).split(os.sep)
    for i, part in enumerate(parts[:-1]):
        if part in ("site-packages", "dist-packages"):
            return parts[i + 1].removesuffix(".py")
    return ""


def lines_with(place: Place | None, pattern: str, most: int = 3) -> tuple[Place, ...]:
    """Return the first lines of a place's file in which a regular expression is found, apart from those
    that begin a comment or a docstring."""
    lines = [] if place is None else [line.strip() for line in linecache.getlines(place.file)]
    code = [(n, text) for n, text in enumerate(lines, 1) if not text.startswith(("#", '"""', "'''"))]
    found = [(n, text) for n, text in code if re.search(pattern, text)][:most]
    return tuple(Place(file=place.file, line=n, code=text) for n, text in found if place is not None)


def lines_around(place: Place) -> tuple[tuple[int, str], ...]:
    """Return the line of a place with the lines before and after it, numbered, as long as the file is still
    the one that ran; empty lines are left out."""
    if not place.code or linecache.getline(place.file, place.line).strip() != place.code:
        return ()
    numbers = range(max(1, place.line - 1), place.line + 2)
    lines = [(n, linecache.getline(place.file, n).rstrip()) for n in numbers]
    lines = [(n, line) for n, line in lines if line.strip()]
    texts = textwrap.dedent("\n".join(line for _, line in lines)).split("\n")
    return tuple((n, text) for (n, _), text in zip(lines, texts, strict=True))


def place_in(code: CodeType, line: int) -> Place:
    """Return a line of a function."""
    file = code.co_filename
    return Place(file, line, code.co_name, linecache.getline(file, line).strip())


def return_in(code: CodeType) -> Place:
    """Return the last line of a function that returns something."""
    returns = [i for i in dis.get_instructions(code) if i.opname.startswith("RETURN_") and i.positions]
    lines = [i.positions.lineno for i in returns if i.positions and i.positions.lineno is not None]
    return place_in(code, max(lines, default=code.co_firstlineno))


def span_of(code: CodeType, offset: int) -> tuple[int, int, int, int] | None:
    """Return where the expression of an instruction begins and ends: lines and columns; None if unknown.

    Args:
        code: the code object.
        offset: the instruction's offset in bytes, such as a frame's ``f_lasti``.

    Example:
        >>> code = compile("a = 1\\nb = a / 2\\n", "file.py", "exec")
        >>> import dis
        >>> span_of(code, next(i.offset for i in dis.get_instructions(code) if i.opname == "BINARY_OP"))
        (2, 2, 4, 9)
    """
    found = next(itertools.islice(code.co_positions(), offset // 2, None), None)
    if found is None:
        return None
    line, last, begin, end = found
    known = line is not None and last is not None and begin is not None and end is not None
    return (line, last, begin, end) if known else None  # type: ignore[return-value]  # none of them is None


def raised_by_us(error: BaseException) -> bool:
    """Return whether the code of a diagnosis raised an error by itself, and not what it called.

    Example:
        >>> raised_by_us(ValueError("never raised"))
        False
    """
    tb = error.__traceback__
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    if tb is None or tb.tb_frame.f_code.co_name in _PASSING_ON:
        return False
    file = os.path.abspath(tb.tb_frame.f_code.co_filename)
    ours = file.startswith(_folders(("stablenum", "stablenum_jax", "stablenum_torch")))
    return ours and not _OF_DIAGNOSIS.isdisjoint(file.split(os.sep))


_OF_DIAGNOSIS = {"diagnosis", "_diagnosis"}
# Functions that call the user's operation, whose own errors have no frame if they come from code in C.
_PASSING_ON = ("__torch_dispatch__", "__torch_function__", "bind")


def is_the_scripts(file: str) -> bool:
    """Return whether a file belongs to no installed package, not to this one, nor to the standard library."""
    return not package_of(file) and is_outside(file, ("stablenum", "stablenum_jax", "stablenum_torch"))


def is_outside(file: str, packages: tuple[str, ...]) -> bool:
    """Return whether a file belongs neither to these packages nor to the standard library."""
    path = os.path.abspath(file)
    if path.startswith(_folders(packages)):
        return False
    return path.startswith(_SITE) or not path.startswith(_STANDARD)


@functools.cache
def _folders(packages: tuple[str, ...]) -> tuple[str, ...]:
    return folders_of(packages)


def folders_of(packages: Iterable[str]) -> tuple[str, ...]:
    """Return the folders of those packages that are installed, each with a separator at the end.

    A package may be in an environment that this one extends, in a user's own folder, or on ``PYTHONPATH``.
    None of the packages is imported.

    Example:
        >>> import os, stablenum
        >>> folders_of(["stablenum", "no_such_package"]) == (os.path.dirname(stablenum.__file__) + os.sep,)
        True
    """
    return tuple(os.path.abspath(place) + os.sep for name in packages for place in _places(name))


def _places(package: str) -> Iterable[str]:
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):  # a stub in sys.modules, or an import hook that blocks the package
        return ()
    # Any folder of this name is found as a namespace package: it is the framework only if it was imported.
    if spec is None or (spec.origin is None and package not in sys.modules):
        return ()
    return spec.submodule_search_locations or ()


def users_frame(is_users: Callable[[str], bool]) -> FrameType | None:
    """Return the innermost running frame whose file is the user's; None if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame
