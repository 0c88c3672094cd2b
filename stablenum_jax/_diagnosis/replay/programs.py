"""The jaxpr of a step: a loss and its gradients, or any other function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import eval_shape, make_jaxpr, value_and_grad
from jax.extend import core

from stablenum_jax._diagnosis.replay.inputs import Call
from stablenum_jax._diagnosis.replay.jax_internals import sub_jaxpr, with_own_lines_in_backward
from stablenum_jax._step.scaled_loss import scaled_in_range
from stablenum_jax._trees.leaves import is_floating
from stablenum_jax._trees.state import guard_leaves

__all__ = ["Program", "program_of"]


@dataclass(frozen=True, slots=True)
class Program:
    """A closed jaxpr of the call's arrays, and the meaning of its results.

    Attributes:
        closed: the jaxpr, which takes the arrays, preceded by the loss scale if ``scaled``.
        names: the names of the results that are judged.
        judged: their positions among the outputs.
        loss: the positions of the loss and of the scaled loss.
        gradients: whether the judged results after the loss are gradients.
        scaled: whether the loss scale is an argument.
    """

    closed: Any
    names: tuple[str, ...]
    judged: tuple[int, ...]
    loss: tuple[int, ...] = ()
    gradients: bool = False
    scaled: bool = False


def program_of(call: Call, *, has_aux: bool, gradients: bool | None, scaled: bool) -> Program:
    """Trace the call."""
    data = [leaf.data for leaf in call.leaves]

    def trace() -> Program:
        if gradients is not False:
            shape = eval_shape(lambda *xs: _loss_of(call(xs), has_aux), *data)
            why = _why_no_gradient(shape, call)
            if not why:
                return _with_gradients(call, data, has_aux, scaled)
            if gradients:
                raise TypeError(f"replay(gradients=True): {why}.")
        return _as_it_is(call, data)

    return with_own_lines_in_backward(trace)


def _loss_of(result: Any, has_aux: bool) -> Any:
    loss = result[0] if has_aux and isinstance(result, tuple) and result else result
    return jnp.asarray(loss) if _is_array(loss) else None


def _is_array(x: Any) -> bool:
    return (
        isinstance(x, (jax.Array, float, int, complex)) or hasattr(x, "__jax_array__") or hasattr(x, "dtype")
    )


def _why_no_gradient(loss: Any, call: Call) -> str:
    if loss is None or loss.shape != () or not jnp.issubdtype(loss.dtype, jnp.floating):
        got = "something else" if loss is None else f"{loss.dtype}{list(loss.shape)}"
        return (
            "fun must return a floating-point scalar (or, with has_aux, a pair that begins with one); "
            f"got {got}"
        )
    if not any(leaf.differentiated for leaf in call.leaves):
        return "no argument among argnums holds a floating-point array"
    return ""


def _with_gradients(call: Call, data: list[Any], has_aux: bool, scaled: bool) -> Program:
    chosen = [i for i, leaf in enumerate(call.leaves) if leaf.differentiated]

    def run(scale: Any, *arrays: Any) -> Any:
        def loss_of(parts: list[Any]) -> tuple[Any, Any]:
            given = list(arrays)
            for i, part in zip(chosen, parts, strict=True):
                given[i] = part
            loss = _loss_of(call(given), has_aux)
            if not scaled:
                return loss, loss
            return scaled_in_range(loss, scale), loss

        (scaled_loss, loss), grads = value_and_grad(loss_of, has_aux=True)([arrays[i] for i in chosen])
        return (loss, scaled_loss, *grads)

    if scaled:
        closed = make_jaxpr(run)(jnp.float32(1.0), *data)
    else:
        closed = make_jaxpr(lambda *xs: run(None, *xs))(*data)
    names = tuple(call.leaves[i].name for i in chosen)
    return Program(
        closed=closed,
        names=("loss", *names),
        judged=(0, *range(2, 2 + len(names))),
        loss=(0, 1),
        gradients=True,
        scaled=scaled,
    )


def _arrays(title: str, tree: Any) -> list[tuple[str, Any]]:
    """Return the named arrays of a tree, except those of guards, whose statistics contain intended
    infinities."""
    own = guard_leaves(tree)
    paths = [p for i, p in enumerate(jax.tree_util.tree_flatten_with_path(tree)[0]) if i not in own]
    names = [title + jax.tree_util.keystr(path).removesuffix(".value") for path, _ in paths]
    return [(name, x) for name, (_, x) in zip(names, paths, strict=True) if _is_array(x)]


def _unwritten(jaxpr: Any) -> dict[int, int]:
    """Map results that are unchanged arguments, even through jit, to those arguments."""
    source = {v: i for i, v in enumerate(jaxpr.invars)}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("jit", "pjit"):
            # What passes through the inner function unchanged passes through the call unchanged.
            inner, _ = sub_jaxpr(eqn.params["jaxpr"])
            for result, argument in _unwritten(inner).items():
                given = eqn.invars[argument]
                if not isinstance(given, core.Literal) and given in source:
                    source[eqn.outvars[result]] = source[given]
    return {
        i: source[v] for i, v in enumerate(jaxpr.outvars) if not isinstance(v, core.Literal) and v in source
    }


def _as_it_is(call: Call, data: list[Any]) -> Program:
    names: list[str] = []

    def run(*arrays: Any) -> list[Any]:
        args, kwargs = call.rebuild(arrays)
        # The arguments are included, because flax.nnx models and optimizers are changed in place.
        results = [*_arrays("result", call.fun(*args, **kwargs)), *_arrays("args", args)]
        names[:] = [name for name, _ in results]
        return [x for _, x in results]

    closed = make_jaxpr(run)(*data)
    unwritten = _unwritten(closed.jaxpr)
    judged = tuple(
        i
        for i, aval in enumerate(closed.out_avals)
        if is_floating(aval) and not (names[i].startswith("args") and i in unwritten)
    )
    return Program(closed=closed, names=tuple(names[i] for i in judged), judged=judged)
