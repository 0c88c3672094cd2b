"""The description of a planted failure.

Each file of ``failing`` plants one failure. ``in_torch`` and ``in_jax`` build the same program in both
frameworks and return it with its arguments; the guilty line ends with ``# BAD``. ``CASE`` says what a
diagnosis should answer. Each call builds everything again, so that one run cannot affect the next. Frameworks
are imported inside these functions, so that one of them is enough.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["CAUSES", "FRAMEWORKS", "Case", "Program", "bad_line", "build", "modules", "program"]

FRAMEWORKS = ("torch", "jax")
MARK = "# BAD"
FAILS = ("value", "norm", "stuck", "once")

# Why a step is not finite. A tool with other words for these maps them in its entry.
CAUSES = {
    "batch": "an input of the step, or a constant in the code, is not finite",
    "labels": "a label or an index is out of range, or no item has a valid label",
    "parameters": "parameters or buffers were not finite before the step",
    "exploded": "the parameters grew out of proportion in an earlier step",
    "transient": "the step went wrong once and is finite when it is run again",
    "low_precision_overflow": "a result overflows its 16-bit format and is finite in float32",
    "domain": "a function is called at or beyond the edge of its domain",
    "mask": "a whole row is masked, or a masked value is used",
    "where_trap": "a mask discards the value but not its derivative",
    "boundary_derivative": "the value is finite and its derivative is not",
    "loss_scale": "the gradients overflow because of the loss scale alone",
    "overflow": "a result exceeds the largest number of its format",
    "underflow": "values that matter are flushed to zero",
    "norm_overflow": "the gradients are finite, and the square in their norm overflows",
    "optimizer_state": "the update of the optimizer is not finite though the gradient is",
    "stale_second_moment": "the optimizer's second moment no longer fits the gradients",
    "stall": "updates are too small to change the parameters",
}

Accepted = str | tuple[str, ...] | Mapping[str, str | tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """The right answer.

    Attributes:
        cause: accepted keys of ``CAUSES``; by framework if they differ.
        operation: accepted names of the first bad operation; "" if there is no such operation (a step that is
            fine when it is run again, finite gradients whose norm overflows).
        primitive: the framework's own operation at fault where ``operation`` is the name of a function made
            of several; by framework if they differ. A tool that names it is right too.
        module: a part of the module path or name stack, in torch and in JAX.
        where: the iteration or branch in JAX, "" for none. There is never any in torch: a loop in Python has
            no iterations to count.
        fails: how it shows: "value" (loss, gradient or parameter is not finite), "norm" (finite gradients,
            the plain norm is inf), "stuck" (parameters no longer move), "once" (not reproduced).
        only: the one framework that can express it, if so.
        because: why the other cannot.
    """

    cause: Accepted
    operation: Accepted
    primitive: Accepted = ""
    module: str = ""
    where: str = ""
    fails: str = "value"
    only: str = ""
    because: str = ""

    def __post_init__(self) -> None:
        unknown = {cause for framework in FRAMEWORKS for cause in self.causes(framework)} - CAUSES.keys()
        if unknown:
            raise ValueError(f"cause: expected keys of CAUSES, got {sorted(unknown)}")
        if self.fails not in FAILS:
            raise ValueError(f"fails: expected one of {FAILS}, got {self.fails!r}")
        if bool(self.only) != bool(self.because):
            raise ValueError("a case for one framework alone says why, and only such a case")

    def causes(self, framework: str) -> tuple[str, ...]:
        """Accepted causes."""
        return _accepted(self.cause, framework)

    def operations(self, framework: str) -> tuple[str, ...]:
        """Accepted operations, none if no operation is to be named."""
        return _accepted(self.operation, framework)

    def primitives(self, framework: str) -> tuple[str, ...]:
        """Operations of the framework that are accepted besides."""
        return _accepted(self.primitive, framework)


def _accepted(value: Accepted, framework: str) -> tuple[str, ...]:
    if isinstance(value, Mapping):
        value = value.get(framework, ())
    return tuple(name for name in ((value,) if isinstance(value, str) else value) if name)


@dataclass(frozen=True)
class Program:
    """A step, its arguments, and what is known of it.

    ``step(*args)`` returns the loss, or in JAX also a whole training step's results. In torch a step of
    which ``optimizer`` is given runs the backward pass and the optimizer itself.

    Attributes:
        options: ``model`` and ``optimizer`` (torch); ``loss_scale``, by which the loss is multiplied before
            the backward pass; ``has_aux`` (JAX), if the step returns a loss and something else;
            ``gradients=False`` (JAX) if the loss is not to be differentiated; ``known_bad`` if the step has
            already failed once.
    """

    step: Callable[..., Any]
    args: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


def program(step: Callable[..., Any], *args: Any, **options: Any) -> Program:
    """The program ``step(*args)``."""
    return Program(step, args, options)


def modules(kind: str) -> list[ModuleType]:
    """The programs of ``failing`` or of ``healthy``, by name."""
    names = sorted(path.stem for path in (Path(__file__).parent / kind).glob("*.py"))
    return [importlib.import_module(f"corpus.{kind}.{name}") for name in names if name != "__init__"]


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
