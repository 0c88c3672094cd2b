"""The range report in JAX: one instrumented forward and backward pass in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import array_api_compat.numpy as numpy_namespace
import jax
import jax.numpy as jnp
import numpy as np
import optax

from stablenum._support.settings_checks import check_callable, check_flag
from stablenum.diagnosis.ranges import RangeCollector, RangeReport
from stablenum.diagnosis.ranges.rows import ACTIVATION, ACTIVATION_GRADIENT, GRADIENT, WEIGHT
from stablenum_jax._diagnosis.module_outputs import Walk
from stablenum_jax._diagnosis.module_scopes import with_module_names
from stablenum_jax._diagnosis.trained import Trained, is_floating_array
from stablenum_jax._step.training import step
from stablenum_jax._trees.leaves import check_state, check_transformation
from stablenum_jax._trees.state import loss_scale

__all__ = ["range_report"]

Array: TypeAlias = Any
PyTree: TypeAlias = Any


def range_report(
    fun: Callable[..., Any],
    params: PyTree,
    *args: Any,
    has_aux: bool = False,
    optimizer: optax.GradientTransformation | None = None,
    opt_state: PyTree = None,
    formats: Sequence[str] = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    **kwargs: Any,
) -> RangeReport:
    """Report what each number format would do to the values of one training step, module by module.

    The passes, one forward and one backward in float32, run on the jaxpr. The report covers the values that
    leave each module and their gradients, weights and their gradients and, with an optimizer, the updates.
    Modules are flax linen, flax.nnx and Equinox modules, and the scopes of ``jax.named_scope`` in any
    function; flax.nnx and Equinox modules are named by their paths in the tree. A module that returns its
    argument does not appear, and a plain scope that is entered twice in a row counts as one. Loops are
    unrolled; of a ``cond``, the branch that is taken is opened (the passes then run operation by operation).
    What could not be opened is listed in the report's ``notes``.

    Nothing is changed: a flax.nnx module is copied, and ``fun`` is traced without ``jax.jit``.

    Args:
        fun: ``fun(params, *args, **kwargs)`` returns the scalar loss, or ``(loss, aux)`` with ``has_aux``.
            There is no backward pass if the loss is not a floating-point scalar.
        params: a pytree, linen's whole dict of collections (of which ``"params"`` is trained), a flax.nnx
            module or state (of which ``nnx.Param`` is trained), or an Equinox module.
        *args: further arguments. Floating-point arrays narrower than float32 become float32 here and in
            ``params``.
        has_aux: as in ``jax.value_and_grad``.
        optimizer: an optax transformation, whose update is measured too. With a guard inside, the gradients
            are first multiplied by its loss scale, and the update is that of :func:`stablenum_jax.step`.
        opt_state: the optimizer's state; by default ``optimizer.init(params)``.
        formats: names of formats, or short names such as ``"bf16"``.
        **kwargs: further arguments.

    Returns:
        A :class:`stablenum.diagnosis.RangeReport`: ``verdict``, ``loss_scale("float16")``,
        ``table()``, ``plot(path)``, ``to_json()``. Elements that are not finite in float32 are counted
        separately.

    Raises:
        TypeError: ``fun``, ``optimizer`` or ``opt_state`` has a wrong type.
        ValueError: ``formats`` is empty or contains an unknown format.

    Example:
        >>> import stablenum_jax
        >>> def loss(params, x):
        ...     with jax.named_scope("first"):
        ...         h = jnp.tanh(x @ params["first"]["w"])
        ...     return jnp.square(h).mean()
        >>> params = {"first": {"w": jnp.eye(8)}}
        >>> report = stablenum_jax.range_report(loss, params, jnp.ones((4, 8)))
        >>> report.verdicts["bfloat16"].sentence
        'bfloat16 works without a loss scale.'
        >>> [row.kind for row in report.rows if row.module == "first"]
        ['activation', 'weight', 'activation gradient', 'gradient']
    """
    check_callable("fun", fun, "a function fun(params, *args) that returns the loss")
    check_flag("has_aux", has_aux)
    if optimizer is not None:
        check_transformation("optimizer", optimizer)
    if opt_state is not None:
        check_state("opt_state", opt_state)
    seen = RangeCollector(formats, xp=numpy_namespace, cast=_cast)
    trained = Trained.of(params, _widened)
    leaves, names = trained.leaves, trained.names
    for name, leaf in zip(names, leaves):
        seen.add(WEIGHT, _module_of(name), _plain(leaf))
    args, kwargs = jax.tree.map(_widened, (args, kwargs))

    while "jit" in type(fun).__name__.lower() and hasattr(fun, "__wrapped__"):
        fun = fun.__wrapped__

    def outputs(*leaves: Array) -> list[Array]:
        out = fun(trained.model(leaves), *args, **kwargs)
        return [x for x in jax.tree.leaves(out[0] if has_aux else out) if isinstance(x, (jax.Array, float))]

    # Run without jit, so that no trace is taken from a cache or left in one.
    closed, roots = with_module_names(lambda: jax.make_jaxpr(outputs)(*leaves))
    pass_ = _Pass(closed, frozenset(roots))
    outs, arrays = pass_.forward(leaves)
    for number, array in arrays.items():
        for module in pass_.modules[number]:
            seen.add(ACTIVATION, module, _plain(array))
    if pass_.closed:
        seen.note(f"Modules inside {', '.join(pass_.closed)} were not looked at one by one.")
    if len(outs) != 1 or jnp.size(outs[0]) != 1 or not jnp.issubdtype(outs[0].dtype, jnp.floating):
        seen.note("No gradients: the function returns no scalar loss.")
        return RangeReport(seen.rows, seen.formats, seen.notes)

    grads, of_values = pass_.backward(leaves, {n: jnp.zeros_like(array) for n, array in arrays.items()})
    for number, grad in reversed(of_values.items()):
        for module in pass_.modules[number]:
            seen.add(ACTIVATION_GRADIENT, module, _plain(grad))
    for name, grad in zip(names, grads):
        seen.add(GRADIENT, _module_of(name), _plain(grad))
    if not np.isfinite(_plain(outs[0])).all():
        seen.note("The loss is not finite in float32.")
    if optimizer is not None:
        before = trained.tree(leaves)
        updates = _updates(optimizer, opt_state, before, trained.tree(grads), seen)
        for name, leaf, update in zip(names, leaves, jax.tree.leaves(updates)):
            seen.add_update(_module_of(name), _plain(leaf), _plain(update))
    return RangeReport(seen.rows, seen.formats, seen.notes)


class _Pass:
    """The forward and the backward pass through a jaxpr.

    Attributes:
        modules: number of a value -> the modules that it leaves.
        closed: operations with modules inside that were not opened.
    """

    def __init__(self, closed: Any, roots: frozenset[str]) -> None:
        self.modules: dict[int, tuple[str, ...]] = {}
        self.closed: list[str] = []
        self._jaxpr, self._consts, self._roots = closed.jaxpr, closed.consts, roots
        self._compiled: Callable[..., Any] = jax.jit

    def forward(self, leaves: list[Array]) -> tuple[list[Array], dict[int, Array]]:
        """Return the outputs, and the values that leave modules."""
        try:
            return jax.jit(self._forward)(leaves)
        except (jax.errors.ConcretizationTypeError, jax.errors.TracerIntegerConversionError):
            # There is a cond, whose index must be a concrete number: run the passes operation by operation.
            self._compiled = _as_it_is
            return self._forward(leaves)

    def backward(self, leaves: list[Array], zeros: dict[int, Array]) -> tuple[list[Array], dict[int, Array]]:
        """Return the gradients of the leaves, and those of the values that leave modules."""

        def loss(leaves: list[Array], added: dict[int, Array]) -> Array:
            (out,) = Walk(self._roots, added).run(self._jaxpr, self._consts, leaves)
            return jnp.reshape(out, ())

        return self._compiled(jax.grad(loss, argnums=(0, 1)))(leaves, zeros)

    def _forward(self, leaves: list[Array]) -> tuple[list[Array], dict[int, Array]]:
        walk = Walk(self._roots)
        outs = walk.run(self._jaxpr, self._consts, leaves)
        self.modules = {number: value.modules for number, value in walk.leaving.items()}
        self.closed = walk.closed
        return outs, {number: value.array for number, value in walk.leaving.items()}


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _updates(tx: Any, opt_state: PyTree, params: PyTree, grads: PyTree, seen: RangeCollector) -> PyTree:
    opt_state = tx.init(params) if opt_state is None else opt_state
    try:
        scale = loss_scale(opt_state)
    except ValueError:  # no guard
        return tx.update(grads, opt_state, params)[0]
    scaled = jax.tree.map(lambda g: g * scale, grads)
    after, _ = step(tx, params, opt_state, scaled)
    return jax.tree.map(lambda new, old: new - old, after, params)


# --- arrays --------------------------------------------------------------------------------------


def _widened(leaf: Any) -> Any:
    """Cast floating-point arrays narrower than float32 to float32; leave other leaves unchanged."""
    if is_floating_array(leaf) and jnp.finfo(leaf.dtype).bits < 32:
        return leaf.astype(jnp.float32)
    return leaf


def _plain(x: Array) -> np.ndarray:
    """Return the array on the host, because XLA on a CPU would flush subnormals to zero."""
    array = np.asarray(x)
    return array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)


def _cast(x: np.ndarray, name: str) -> np.ndarray:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return x.astype(jnp.dtype(name)).astype(x.dtype)


def _module_of(parameter: str) -> str:
    return parameter.rpartition(".")[0]
