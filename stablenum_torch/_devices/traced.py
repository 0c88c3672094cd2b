"""Trace a function of tensors once and compile the recorded operations, without Dynamo.

Code that ``torch.compile`` has made is found again in every call by looking at all that the function read:
settings, nested tuples, each tensor. For a decision this takes 30 us, and the wrapper around the compiled
graph another 20 (measured with ten tensors on a CPU). A decision depends on nothing but the formats and
places of its tensors and on which of them are missing, so that these are all that is looked at here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stablenum.arrays import leaves, map_leaves

__all__ = ["Traced"]

# torch traces and compiles one function at a time.
_COMPILING = threading.Lock()


class _Code(NamedTuple):
    """What was compiled for one kind of arguments.

    Attributes:
        call: takes the tensors of the arguments as a list, and returns those of the result.
        result: what the function returned, in which the tensors are replaced.
    """

    call: Callable[[list[Tensor]], Any]
    result: Any


class Traced:
    """A pure function of nested tuples of tensors and None, which returns such tuples.

    It is traced and compiled by inductor in the first call with arguments of a kind. The interfaces that do
    this are private to torch; an error of theirs is raised by that call.

    Args:
        function: no branch in it may depend on a number in a tensor. Settings of torch, such as the default
            format, are those of the first call.
        options: inductor's, for the code that is generated.
    """

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        self._function, self._options = function, dict(options)
        self._known: dict[tuple[Any, ...], _Code] = {}

    def __call__(self, *args: Any) -> Any:
        flat = leaves(args)
        kind = tuple([None if x is None else (x.dtype, x.shape, x.stride(), x.device) for x in flat])
        given = [x for x in flat if x is not None]
        code = self._known.get(kind)
        if code is None:
            with _COMPILING:
                code = self._known.get(kind) or self._compiled(args, given)
                self._known[kind] = code
        return _filled(code.result, code.call(given))

    def _compiled(self, args: tuple[Any, ...], given: list[Tensor]) -> _Code:
        # These take seconds to import, and are needed on a GPU only.
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx_inner
        from torch._inductor.decomposition import select_decomp_table
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.func import functionalize
        from torch.fx.experimental.proxy_tensor import make_fx

        found: list[Any] = []

        def flat(*tensors: Tensor) -> list[Tensor]:
            result = self._function(*_filled(args, tensors))
            found[:] = [map_leaves(lambda x: x if x is None else ..., result)]
            return [x for x in leaves(result) if x is not None]

        pure = functionalize(flat, remove="mutations")
        with torch.no_grad(), torch.autocast(given[0].device.type, enabled=False):
            table = select_decomp_table()
            graph = make_fx(pure, decomposition_table=table, tracing_mode="fake")(*given)
            fake = FakeTensorMode(allow_non_fake_inputs=True)
            with config.patch(self._options):
                call = compile_fx_inner(graph, [fake.from_tensor(x) for x in given])
        return _Code(call, *found)


def _filled(tree: Any, tensors: Any) -> Any:
    """Return nested tuples whose leaves are replaced by some tensors in their order, but for None."""
    rest = iter(tensors)
    return map_leaves(lambda x: x if x is None else next(rest), tree)
