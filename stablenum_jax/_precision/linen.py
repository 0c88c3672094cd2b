"""Apply a policy to a flax linen model with an interceptor. This module is imported only for such a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import flax.linen as nn
import jax

from stablenum_jax._precision.casts import is_castable
from stablenum_jax._precision.escalate import current_policy
from stablenum_jax._precision.fp8 import fp8_dot, init_fp8
from stablenum_jax._precision.module_formats import cast_arguments, cast_result, check_rules, place_of
from stablenum_jax._precision.policy import Policy
from stablenum_jax._trees.leaves import FP8_STATISTICS

__all__ = ["LinenCall"]

PyTree: TypeAlias = Any

# The name of a product's state within its module.
_STATE = "fp8"


class LinenCall:
    """What :func:`stablenum_jax.precision` returns for a linen module.

    Attributes:
        model: the module.
        policy: the formats in which the module runs.
    """

    def __init__(self, model: nn.Module, policy: Policy) -> None:
        self.model, self.policy = model, policy

    def init(self, rngs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run ``model.init`` with parameters in the policy's format, and add the states of 8-bit products."""
        found: list[tuple[str, ...]] = []

        def note(next_fun: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
            path = context.module.path
            place = place_of(self.policy, ".".join(path), owns=True)
            if _is_product(context) and place.eight_bits and path not in found:
                found.append(path)
            return next_fun(*args, **kwargs)

        with nn.intercept_methods(note):
            variables = self.model.init(rngs, *args, **kwargs)
        made = {**variables, "params": self.policy.cast_to_param({"params": variables["params"]})["params"]}
        states: dict[str, Any] = {}
        for path in found:
            node = states
            for part in path:
                node = node.setdefault(part, {})
            node[_STATE] = init_fp8()
        return made | {FP8_STATISTICS: states} if found else made

    def apply(self, variables: Any, *args: Any, **kwargs: Any) -> Any:
        """Run ``model.apply`` in the policy's formats."""
        policy = current_policy(self.policy)
        params = variables.get("params", {})
        owners = dict(_modules(params))
        called: set[str] = set()
        multiplied: set[str] = set()
        method = kwargs.get("method")
        entry = method if isinstance(method, str) else getattr(method, "__name__", "__call__")

        def cast(next_fun: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
            path = ".".join(context.module.path)
            if context.method_name != "__call__" and (path or context.method_name != entry):
                return next_fun(*args, **kwargs)
            called.add(path)
            place = place_of(policy, path, owns=owners.get(path, False))
            args, kwargs = cast_arguments(place, args, kwargs)
            if place.eight_bits and _is_product(context):
                _check_first_use(path, multiplied)
                result = self._dense(context.module, *args)
            else:
                result = next_fun(*args, **kwargs)
            return cast_result(place, result)

        narrowed = policy.cast_to_compute({"params": params})
        with nn.intercept_methods(cast):
            result = self.model.apply({**variables, **narrowed}, *args, **kwargs)
        check_rules(policy, called | set(owners))
        return result

    __call__ = apply

    def _dense(self, module: nn.Module, inputs: Any) -> Any:
        if not module.has_variable(FP8_STATISTICS, _STATE):
            raise ValueError(
                f"variables must contain the states of 8-bit products, under {FP8_STATISTICS!r}; there is "
                f"none for {'.'.join(module.path)}. Make variables with precision(model, policy).init(...); "
                "a module inside nn.RNN or nn.scan, which see only their own collections, needs a rule "
                "that makes it compute in 16 bits."
            )
        kernel = module.get_variable("params", "kernel")
        state = module.get_variable(FP8_STATISTICS, _STATE)
        out = fp8_dot(inputs, kernel, state)
        return out + module.get_variable("params", "bias") if module.use_bias else out


def _check_first_use(path: str, multiplied: set[str]) -> None:
    """Raise if a module multiplies twice: its next state is a gradient, and gradients would be summed."""
    if path in multiplied:
        raise ValueError(
            f"each module may compute only one 8-bit product in a call; {path} computes two. Let it compute "
            f"in 16 bits with a rule: {{{path!r}: 'bf16'}}."
        )
    multiplied.add(path)


def _is_product(context: Any) -> bool:
    return type(context.module) is nn.Dense and context.method_name == "__call__"


def _modules(params: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, bool]]:
    """Return the path of each module with parameters in or below it, and whether some are its own."""
    inside = {name: part for name, part in params.items() if isinstance(part, Mapping)}
    own = [part for name, part in params.items() if name not in inside]
    yield path, any(map(is_castable, jax.tree.leaves(own)))
    for name, part in inside.items():
        yield from _modules(part, f"{path}.{name}" if path else name)
