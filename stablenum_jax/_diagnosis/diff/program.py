"""``program``: a training step of JAX, traced for ``stablenum.diff``."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import make_jaxpr, value_and_grad
from jax.extend.core import jaxpr_as_fun

from stablenum._support.one_line import kind_of, one_line
from stablenum._support.settings_checks import check_callable
from stablenum.diagnosis.diff.sides.call_sites import CallSite, argument_site
from stablenum.diagnosis.diff.sides.play import Moments, Play, Visit
from stablenum.diagnosis.diff.sides.resume_points import Given
from stablenum_jax._diagnosis.diff.optimizer_states import continued
from stablenum_jax._diagnosis.diff.player import Traced, numbers_of, play
from stablenum_jax._diagnosis.diff.showing import Showing
from stablenum_jax._diagnosis.diff.writing import DIALECT
from stablenum_jax._diagnosis.module_scopes import names_of, with_module_names
from stablenum_jax._diagnosis.replay.inputs import Call, Leaf, call_of
from stablenum_jax._diagnosis.replay.jax_internals import quietly, with_own_lines_in_backward
from stablenum_jax._trees.leaves import is_floating

__all__ = ["Program", "program"]


def program(
    loss_fn: Callable[..., Any],
    params: Any,
    *args: Any,
    optimizer: Any = None,
    compute: Any = None,
) -> Program:
    """Return a program for :func:`stablenum.diff`.

    Experimental: the names of causes and the JSON may change in a minor version.

    Args:
        loss_fn: called with ``(params, *args)``. If it returns a floating-point scalar, alone or first in
            a tuple, the gradients follow, and with ``optimizer`` one update. Anything else is compared as
            it is.
        params: a pytree of arrays, or a model of flax.nnx or equinox.
        *args: the batch, and whatever else ``loss_fn`` takes.
        optimizer: an optax transformation, whose update follows the gradients.
        compute: the format to which the floating-point parameters and arguments are cast; None for none.

    Returns:
        The program. Nothing runs before the comparison, and no object of the caller's is changed.

    Raises:
        TypeError: an argument has a wrong type.
    """
    check_callable("loss_fn", loss_fn, "a function that returns the loss")
    if optimizer is not None and not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise TypeError(
            f"program(optimizer=...) must be an optax transformation or None; got {type(optimizer).__name__}."
        )
    made_at = argument_site(sys._getframe(1), "optimizer") if optimizer is not None else None
    return Program(loss_fn, params, args, optimizer, compute, made_at)


_KEPT = ("parameter", "buffer")


class Program:
    """A training step of JAX, or any function of arrays. Made by :func:`program`."""

    framework = "jax"
    dialect = DIALECT

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        params: Any,
        args: tuple[Any, ...],
        optimizer: Any,
        compute: Any,
        optimizer_at: CallSite | None = None,
    ) -> None:
        self.optimizer_at = optimizer_at
        self._loss_fn, self._params, self._args = loss_fn, params, args
        self._optimizer, self._compute = optimizer, compute
        self.numbers: Collection[float] = ()
        self.aside: Collection[str] = ()
        self._traced: dict[int, Traced] = {}
        self._shown: dict[tuple[int, frozenset[float]], Showing] = {}
        self._makers: dict[int, list[str]] = {}
        self._moments: Moments | None = None

    def __repr__(self) -> str:
        return one_line(
            self,
            framework=self.framework,
            loss_fn=kind_of(self._loss_fn),
            params=kind_of(self._params),
            args=len(self._args),
            optimizer=kind_of(self._optimizer),
            compute=self._compute,
            recorded_steps=sorted(self._traced),
        )

    @property
    def has_optimizer(self) -> bool:
        """Whether a step of an optimizer follows."""
        return self._optimizer is not None

    def parameters(self) -> Mapping[str, Any]:
        """Return the parameters and buffers by name, as arrays of NumPy."""
        leaves = self._call().leaves
        return {
            leaf.name: np.asarray(leaf.data).astype(np.float64)
            for leaf in leaves
            if leaf.role in _KEPT and is_floating(leaf.data)
        }

    def record(self, steps: int) -> None:
        """Run the user's code, unless that has been done."""
        if steps not in self._traced:
            self._traced[steps] = quietly(lambda: with_own_lines_in_backward(lambda: self._named(steps)))

    def written(self, steps: int) -> Collection[float]:
        """Return the numbers that the recorded program computes with, as its author wrote them."""
        return numbers_of(self._traced[steps])

    def fresh(self) -> Program:
        """Return the same program, not recorded yet."""
        made = Program(
            self._loss_fn, self._params, self._args, self._optimizer, self._compute, self.optimizer_at
        )
        made._moments, made.numbers = self._moments, self.numbers
        return made

    def optimizer_state(self) -> Mapping[tuple[str, str], Any]:
        """Return nothing: the optimizer begins with the state of ``optimizer.init``."""
        return {}

    def with_optimizer_state(self, moments: Moments | None) -> Program:
        """Return the same program with another state of the optimizer; see the core's ``Program``."""
        made = self.fresh()
        made._moments = moments
        return made

    def play(
        self,
        visit: Visit,
        *,
        wide: bool = True,
        weights: Mapping[str, Any] | None = None,
        noise: float = 0.0,
        everywhere: bool = False,
        replace: Mapping[int, Any] | None = None,
        steps: int = 1,
        code: Collection[int] = (),
    ) -> Play:
        """Evaluate the program once; see ``stablenum.diagnosis.diff.sides.play.Program``."""
        self.record(steps)
        traced = self._traced[steps]
        played = quietly(
            lambda: play(
                traced,
                numbers=self.numbers,
                wide=wide,
                weights=weights or {},
                noise=noise,
                everywhere=everywhere,
                visit=visit,
                replace=replace or {},
                code=code,
            )
        )
        if not (noise or replace):
            self._makers[steps] = _makers(played)
        return played

    def show(
        self,
        visit: Visit,
        *,
        weights: Mapping[str, Any] | None,
        replace: Mapping[int, Any],
        steps: int,
        since: int = 0,
        keep: bool = False,
    ) -> None:
        """Show the values of one more evaluation; see ``stablenum.diagnosis.diff.sides.play.Program``."""
        self.record(steps)
        key = steps, frozenset(self.numbers)
        showing = self._shown.setdefault(key, Showing(self._traced[steps], self.numbers))
        showing.makers = self._makers.get(steps)
        quietly(lambda: showing.show(visit, Given(weights, replace), since=since, keep=keep))

    def compiled(self, weights: Mapping[str, Any] | None = None) -> Mapping[tuple[str, str], Any] | None:
        """Return the results of one step compiled as a whole, by kind and name; None if ``loss_fn`` is not
        jitted."""
        if not hasattr(self._loss_fn, "lower"):
            return None
        traced = self._traced[1] if 1 in self._traced else self._trace(1)
        data = [_given(leaf, weights or {}) for leaf in traced.leaves]
        outputs = quietly(lambda: jax.jit(jaxpr_as_fun(traced.closed))(*data))
        return {m[:2]: np.asarray(x) for m, x in zip(traced.results, outputs, strict=True)}

    # --- tracing ---

    def _loss_with_names(self, params: Any, *args: Any) -> Any:
        with names_of(params):
            return self._loss_fn(params, *args)

    def _call(self) -> Call:
        call = call_of(self._loss_with_names, (self._params, *self._args), {}, (0,))
        names = [_plain_name(leaf.name) if leaf.role in _KEPT else leaf.name for leaf in call.leaves]
        if len(set(names)) < len(names):  # keys that hold dots themselves
            return call
        leaves = tuple(replace(leaf, name=name) for leaf, name in zip(call.leaves, names, strict=True))
        return replace(call, leaves=leaves)

    def _named(self, steps: int) -> Traced:
        return with_module_names(lambda: self._trace(steps), jit=True)[0]

    def _trace(self, steps: int) -> Traced:
        call = self._call()
        data = [leaf.data for leaf in call.leaves]
        meaning: list[tuple[str, str, int]] = []

        def run(*arrays: Any) -> list[Any]:
            found = self._steps(call, list(arrays), steps)
            meaning[:] = [(kind, name, step) for kind, name, step, _ in found]
            return [x for *_, x in found]

        closed = make_jaxpr(run)(*data)
        return Traced(closed, call.leaves, tuple(meaning))

    def _steps(self, call: Call, arrays: list[Any], steps: int) -> list[tuple[str, str, int, Any]]:
        """Return kind, name, step and array of all results."""
        out = jax.eval_shape(lambda *xs: jax.tree.map(jnp.asarray, call(self._cast(xs))), *arrays)
        if not _is_loss(out):
            return [("output", name, 1, x) for name, x in _named(call(self._cast(arrays)))]
        self.aside = [name for name, x in _paths(out)[1:] if jnp.issubdtype(x.dtype, jnp.floating)]
        chosen = [i for i, leaf in enumerate(call.leaves) if leaf.differentiated]
        names = [call.leaves[i].name for i in chosen]
        found: list[tuple[str, str, int, Any]] = []
        state: Any = None
        for step in range(1, steps + 1):
            loss, gradients, kept = self._differentiated(call, chosen, arrays)
            found.append(("loss", "loss", step, loss))
            found += [("gradient", n, step, g) for n, g in zip(names, gradients, strict=True)]
            for i, x in kept.items():
                arrays[i] = x
            if self._optimizer is None:
                continue
            own = [arrays[i] for i in chosen]
            updated, state = self._update(call, chosen, gradients, own, state)
            found += [("updated", n, step, p) for n, p in zip(names, updated, strict=True)]
            for i, p in zip(chosen, updated, strict=True):
                arrays[i] = p
        return found

    def _cast(self, arrays: Any) -> list[Any]:
        if self._compute is None:
            return list(arrays)
        return [x.astype(self._compute) if is_floating(x) else x for x in arrays]

    def _differentiated(
        self, call: Call, chosen: list[int], arrays: Any
    ) -> tuple[Any, list[Any], dict[int, Any]]:
        """Return loss, gradients and, by position, what the call has changed of the model's buffers."""

        def loss_of(parts: list[Any]) -> Any:
            given = list(arrays)
            for i, part in zip(chosen, parts, strict=True):
                given[i] = part
            given = self._cast(given)
            args, kwargs = call.rebuild(given)
            return _first(call.fun(*args, **kwargs)), _changed(call, given, args, kwargs)

        (loss, kept), gradients = value_and_grad(loss_of, has_aux=True)([arrays[i] for i in chosen])
        return (
            loss,
            gradients,
            {i: x.astype(arrays[i].dtype) if is_floating(x) else x for i, x in kept.items()},
        )

    def _update(
        self, call: Call, chosen: list[int], gradients: list[Any], own: list[Any], state: Any
    ) -> tuple[list[Any], Any]:
        import optax

        def tree(parts: list[Any]) -> Any:
            given = [leaf.data for leaf in call.leaves]
            for i, part in zip(chosen, parts, strict=True):
                given[i] = part
            return _trained(call.rebuild(given)[0][0])

        params = tree(own)
        state = self._first_state(call, chosen, params) if state is None else state
        updates, state = self._optimizer.update(tree(gradients), state, params)
        new = optax.apply_updates(params, updates)
        return [x for x in jax.tree.leaves(new) if is_floating(x)], state

    def _first_state(self, call: Call, chosen: list[int], params: Any) -> Any:
        state = self._optimizer.init(params)
        if self._moments is None:
            return state
        return continued(state, params, [call.leaves[i].name for i in chosen], self._moments)


def _makers(played: Play) -> list[str]:
    """Return the primitive that makes each value; "" for what comes from outside."""
    steps = played.trace.steps
    return ["" if v.producer is None else steps[v.producer].primitive for v in played.trace.values]


def _given(leaf: Leaf, weights: Mapping[str, Any]) -> Any:
    """Return the array of a leaf, or the one that takes its place."""
    if leaf.role not in _KEPT or leaf.name not in weights:
        return leaf.data
    return jnp.asarray(np.reshape(weights[leaf.name], leaf.data.shape), leaf.data.dtype)


def _changed(
    call: Call, given: list[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[int, Any]:
    """Return the buffers that a call has changed, by position: a model of flax.nnx is changed in place."""
    if not any(leaf.role == "buffer" for leaf in call.leaves):
        return {}
    after = call_of(call.fun, args, kwargs, (0,)).leaves
    if len(after) != len(call.leaves):  # the call has added variables
        return {}
    return {
        i: new.data
        for i, (old, new) in enumerate(zip(call.leaves, after, strict=True))
        if old.role == new.role == "buffer" and old.data.shape == new.data.shape and new.data is not given[i]
    }


def _trained(model: Any) -> Any:
    """Return the pytree that an optimizer works on."""
    nnx, equinox = sys.modules.get("flax.nnx"), sys.modules.get("equinox")
    if nnx is not None and isinstance(model, nnx.Module):
        return nnx.state(model, nnx.Param)
    if equinox is not None and isinstance(model, equinox.Module):
        return equinox.filter(model, equinox.is_inexact_array)
    return model


def _first(out: Any) -> Any:
    return out[0] if isinstance(out, tuple) and out else out


def _is_loss(out: Any) -> bool:
    first = _first(out)
    return getattr(first, "shape", None) == () and jnp.issubdtype(first.dtype, jnp.floating)


def _named(out: Any) -> list[tuple[str, Any]]:
    return [(name, jnp.asarray(x)) for name, x in _paths(out)]


def _paths(out: Any) -> list[tuple[str, Any]]:
    paths, _ = jax.tree_util.tree_flatten_with_path(out)
    return [(f"output{jax.tree_util.keystr(path)}", x) for path, x in paths]


def _plain_name(path: str) -> str:
    """Return "layers.0.attn.q" for "['layers'][0].attn['q']": the way in which PyTorch names parameters."""
    return re.sub(r"\[['\"]?(.*?)['\"]?\]", r".\1", path).removeprefix(".")
