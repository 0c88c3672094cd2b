"""The description of a planted failure, and how it is run.

Each file of ``failing`` plants one failure. ``in_torch`` and ``in_jax`` build the same program in both
frameworks and return it with its arguments; the guilty line ends with ``# BAD``. ``CASE`` says what a
diagnosis should answer. Each call builds everything again, so that one run cannot affect the next.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from stablenum.diagnosis import Cause

__all__ = ["FRAMEWORKS", "Case", "Program", "bad_line", "build", "modules", "program"]

FRAMEWORKS = ("torch", "jax")
MARK = "# BAD"
Accepted = str | tuple[str, ...] | Mapping[str, str | tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """The right answer.

    Attributes:
        cause: accepted values of :class:`stablenum.diagnosis.Cause`; by framework if they differ.
        operation: accepted names of the first bad operation; "" if there is no such operation (a step that is
            fine when it is run again, finite gradients whose norm overflows).
        module: a part of the module path or name stack, in torch and in JAX.
        where: a part of ``Finding.where`` in JAX, "" for none. There is never any in torch: a loop in Python
            has no iterations to count.
        fails: how it shows: "value" (loss, gradient or parameter is not finite), "norm" (finite gradients,
            the plain norm is inf), "stuck" (parameters no longer move), "once" (not reproduced).
        only: the one framework that can express it, if so.
        because: why the other cannot.
    """

    cause: Accepted
    operation: Accepted
    module: str = ""
    where: str = ""
    fails: str = "value"
    only: str = ""
    because: str = ""

    def __post_init__(self) -> None:
        for framework in FRAMEWORKS:
            for cause in self.causes(framework):
                Cause(cause)
        if bool(self.only) != bool(self.because):
            raise ValueError("a case for one framework alone says why, and only such a case")

    def causes(self, framework: str) -> tuple[str, ...]:
        """Accepted causes."""
        return _accepted(self.cause, framework)

    def operations(self, framework: str) -> tuple[str, ...]:
        """Accepted operations, none if no operation is to be named."""
        return tuple(name for name in _accepted(self.operation, framework) if name)


def _accepted(value: Accepted, framework: str) -> tuple[str, ...]:
    if isinstance(value, Mapping):
        value = value.get(framework, ())
    return (value,) if isinstance(value, str) else tuple(value)


@dataclass(frozen=True)
class Program:
    """A step, its arguments, and the options of ``replay``."""

    step: Callable[..., Any]
    args: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


def program(step: Callable[..., Any], *args: Any, **options: Any) -> Program:
    """``replay(step, *args, **options)`` diagnoses it."""
    return Program(step, args, options)


def modules(kind: str) -> list[ModuleType]:
    """The programs of ``failing`` or of ``healthy``, by name."""
    names = sorted(path.stem for path in (Path(__file__).parent / kind).glob("*.py"))
    return [importlib.import_module(f"tests.corpus.{kind}.{name}") for name in names if name != "__init__"]


def build(module: ModuleType, framework: str) -> Callable[[], Program] | None:
    """The function that builds the program, None if this framework cannot express it."""
    return getattr(module, f"in_{framework}", None)


def bad_line(module: ModuleType, framework: str) -> tuple[str, int]:
    """File name and number of the guilty line."""
    lines, start = inspect.getsourcelines(getattr(module, f"in_{framework}"))
    found = [start + i for i, line in enumerate(lines) if line.rstrip().endswith(MARK)]
    if len(found) != 1:
        raise ValueError(f"{module.__name__}: expected one line marked {MARK} in in_{framework}, got {found}")
    return Path(str(module.__file__)).name, found[0]
