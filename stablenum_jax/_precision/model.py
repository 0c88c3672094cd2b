"""``precision``: the call of a model with a policy applied module by module."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from stablenum_jax._precision.casts import cast_leaves
from stablenum_jax._precision.escalate import current_policy
from stablenum_jax._precision.module_formats import check_rules
from stablenum_jax._precision.policy import Policy, as_policy

__all__ = ["precision"]


def precision(model: Any, policy: Any) -> Callable[..., Any]:
    """Return a function that calls a model in the formats of a policy, as ``stablenum_torch.precision`` does.

    - While a module computes, its parameters are in its compute format, and the arguments of a module with
      parameters of its own are cast to that format. Gradients have the formats in which the parameters are
      stored.
    - The policy's output format applies to the result of the whole model, a rule's output format to the
      results of the modules it matches. In between, values stay in the compute format.
    - Running statistics and other collections that are not parameters are unchanged, and so are integers,
      keys and everything that is not an array.
    - Functions called between modules (a softmax) compute in the dtype of their arguments.

    Call the result like the model:

    - flax linen: ``call(variables, *args, **kwargs)``, as ``model.apply``; ``call.init(rngs, *args)`` makes
      variables with the parameters in the policy's format. With an 8-bit compute format ``nn.Dense`` uses
      :func:`stablenum_jax.fp8_dot`, and ``call.init`` adds the states of its products under
      ``_overwrite_with_gradient``.
    - flax nnx: ``call(*args, **kwargs)`` on a copy of the modules, made at the call; variables that are not
      parameters (running statistics, counts of random streams) are written back.
    - equinox: ``call(*args, **kwargs)`` on a copy.
    - any other callable: its arguments are cast to the compute format, with rules for the paths in each
      argument, and its results to the output format.

    Only ``__call__`` of a module is intercepted (linen: also the ``method`` given to ``apply``). A module
    with a ``dtype`` of its own computes in that dtype. Functions under ``jax.jit`` inside the model compute
    in the dtypes of their arguments.

    Args:
        model: a flax linen or nnx module, an equinox module, or a function.
        policy: words, a :class:`stablenum_jax.policy.Policy`, a ``stablenum.Policy`` or jmp's. Inside
            :func:`stablenum_jax.value_and_grad` with an escalation, no module computes in a format narrower
            than the level's.

    Raises:
        TypeError: ``model`` is not callable; ``policy`` is none of the above.
        ValueError: when the result is called: a rule's pattern matches no module, or no path in a function's
            arguments; or the policy computes in 8 bits in nnx or equinox.

    Example:
        >>> import jax.numpy as jnp
        >>> call = precision(lambda params, x: x @ params["w"], "c=bf16,o=f32")
        >>> call({"w": jnp.full((2, 2), 1.001)}, jnp.ones((1, 2)))
        Array([[2., 2.]], dtype=float32)
    """
    wanted = as_policy(policy)
    linen, nnx, equinox = (sys.modules.get(name) for name in ("flax.linen", "flax.nnx", "equinox"))
    if linen is not None and isinstance(model, linen.Module):
        from stablenum_jax._precision.linen import LinenCall

        return LinenCall(model, wanted)
    if nnx is not None and isinstance(model, nnx.Module):
        from stablenum_jax._precision.nnx_equinox import call_nnx

        return functools.partial(call_nnx, model, wanted)
    if equinox is not None and isinstance(model, equinox.Module):
        from stablenum_jax._precision.nnx_equinox import call_equinox

        return functools.partial(call_equinox, model, wanted)
    if not callable(model):
        raise TypeError(f"model must be a flax or equinox module or a function; got {type(model).__name__}.")
    return functools.wraps(model)(functools.partial(_call_function, model, wanted))


def _call_function(fun: Callable[..., Any], policy: Policy, /, *args: Any, **kwargs: Any) -> Any:
    now = current_policy(policy)
    met: set[str] = set()

    def dtype_of(path: str) -> Any:
        met.add(path)
        return jnp.dtype(now.core.at(path).carrier)

    cast = [cast_leaves(arg, dtype_of) for arg in args]
    named = cast_leaves(kwargs, dtype_of)
    check_rules(now, met)
    return now.cast_to_output(fun(*cast, **named))
