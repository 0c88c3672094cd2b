"""Methods that ``torch.compile`` has to leave as they are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

__all__ = ["uncompiled", "uncompiled_before_2_12"]

P = ParamSpec("P")
T = TypeVar("T")


def uncompiled(function: Callable[P, T]) -> Callable[P, T]:
    """Return ``function`` so that compiled code breaks its graph and calls it as it is.

    ``torch.compiler.disable`` does the same, but imports the compiler at once, which takes as long as
    importing torch. Here it is imported by the first call from compiled code.
    """
    outside_the_graph = torch._disable_dynamo(function)

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        run = outside_the_graph if torch.compiler.is_compiling() else function
        return run(*args, **kwargs)

    return called


def uncompiled_before_2_12(method: Callable[P, T]) -> Callable[P, T]:
    """Return ``method``, in earlier versions of torch as :func:`uncompiled` does.

    In some of them ``torch.compile`` fails on code that assigns an attribute of an optimizer.
    """
    return method if torch.__version__ >= (2, 12) else uncompiled(method)
