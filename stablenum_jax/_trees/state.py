"""The guard's state inside an optimizer's state: what it is, how to find it and how to replace it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

import stablenum
from stablenum.guard.recorder import Recorder
from stablenum.rules.loss_scale import LossScaleState
from stablenum_jax._trees.scale_reads import note_scale_read

__all__ = [
    "GuardOptState",
    "find_guard",
    "guard_leaves",
    "guard_state",
    "guards_in",
    "has_guard",
    "injects_hyperparams",
    "is_guard",
    "is_inside_multisteps",
    "listen",
    "loss_scale",
    "multisteps_around_guard",
    "numbered_guards",
    "places_in_windows",
    "plain_arrays",
    "replace_guard",
    "told_of_another_state",
]

PyTree: TypeAlias = Any


class _Fields(NamedTuple):
    ints: jax.Array
    floats: jax.Array
    scale: jax.Array
    rules: tuple[Any, ...]
    bad_at_init: jax.Array


class GuardOptState(_Fields):
    """The state that :func:`stablenum_jax.guard` keeps in the optimizer's state. All leaves are arrays.

    All whole numbers are in one array: each array that a compiled step takes and returns costs a microsecond
    or more, however small it is.

    JAX builds what a compiled program returns on the host, so each new state passes through here, and a
    listener sees it though nothing is added to the program.

    Attributes:
        ints: (130, 4) int32. The first two rows are ``step``, ``skipped_total``, ``skipped_in_a_row``,
            ``nonfinite_in_a_row`` and ``halted`` of the core's state, ``good_steps`` and ``hysteresis_left``
            of its loss scale, and ``names_id``; the others are the recorder's.
        floats: (128, 4) float32, the recorder's.
        scale: () float32, the loss scale.
        rules: the statistics of the loss scale, and the states of the clip rules, the spike rule and the
            escalation.
        bad_at_init: (n,) bool, which parameters were not finite from the beginning, as a mask of -inf is: no
            step is at fault for them.
    """

    __slots__ = ()

    def __new__(
        cls,
        ints: jax.Array,
        floats: jax.Array,
        scale: jax.Array,
        rules: tuple[Any, ...],
        bad_at_init: jax.Array,
    ) -> GuardOptState:
        """Build a state, and let the listener see it."""
        made = tuple.__new__(cls, (ints, floats, scale, rules, bad_at_init))
        if _listener is not None:
            _listener(made)
        return made

    @classmethod
    def of(cls, guard: stablenum.GuardState, names_id: jax.Array, bad_at_init: jax.Array) -> GuardOptState:
        """Pack the core's state, the number of the names, and what was not finite from the beginning."""
        counts = *(getattr(guard, name) for name in _COUNTS), *guard.loss_scale[1:3], names_id
        rows = jnp.stack(counts, axis=-1).reshape(*jnp.shape(names_id), 2, 4)
        return cls(
            ints=jnp.concatenate([rows, guard.recorder.ints], axis=-2),
            floats=guard.recorder.floats,
            scale=guard.loss_scale.scale,
            rules=(guard.loss_scale.statistics, guard.clip, guard.spike, guard.escalation),
            bad_at_init=bad_at_init,
        )

    @property
    def guard(self) -> stablenum.GuardState:
        """The core's state."""
        *counts, good_steps, hysteresis_left, _, rows = _unpacked(self.ints)
        statistics, clip, spike, escalation = self.rules
        return stablenum.GuardState(
            **dict(zip(_COUNTS, counts, strict=True)),
            loss_scale=LossScaleState(self.scale, good_steps, hysteresis_left, statistics),
            clip=clip,
            recorder=Recorder(self.floats, rows),
            spike=spike,
            escalation=escalation,
        )

    @property
    def recorder(self) -> Recorder:
        """The last 128 steps."""
        return Recorder(self.floats, _unpacked(self.ints)[-1])

    @property
    def names_id(self) -> jax.Array:
        """The number under which this process keeps the parameters' names: () int32, a checksum of them; its
        complement for a guard that does not log its skips."""
        return _unpacked(self.ints)[_NUMBERS - 1]

    @property
    def runs(self) -> tuple[int, ...]:
        """The shape in which states of several runs are stacked; () for the state of one run."""
        return tuple(getattr(self.ints, "shape", ())[:-2])

    def with_guard(self, guard: stablenum.GuardState) -> GuardOptState:
        """Return this state with another state of the core's."""
        return GuardOptState.of(guard, self.names_id, self.bad_at_init)


_COUNTS = ("step", "skipped_total", "skipped_in_a_row", "nonfinite_in_a_row", "halted")
_NUMBERS = len(_COUNTS) + 3  # in two rows of four


def _unpacked(ints: Any) -> tuple[Any, ...]:
    """Return the numbers in front of a state's whole numbers, and the recorder's: arrays, or shapes where
    this is one."""
    if isinstance(ints, jax.ShapeDtypeStruct):
        return tuple(jax.eval_shape(_each, ints))
    return _divided(ints) if isinstance(ints, jax.Array) else _each(ints)


def _each(ints: Any) -> tuple[Any, ...]:
    return *(ints[..., i // 4, i % 4] for i in range(_NUMBERS)), ints[..., _NUMBERS // 4 :, :]


_divided = jax.jit(_each, inline=True)  # one dispatch where it is called outside of a trace


_listener: Callable[[GuardOptState], None] | None = None


def listen(listener: Callable[[GuardOptState], None]) -> None:
    """Have ``listener`` called with each state that is built from now on, of arrays or of anything else."""
    global _listener  # a fact about the process
    _listener = listener


def is_guard(node: object) -> bool:
    """Return whether a node of a pytree is a guard's state."""
    return isinstance(node, GuardOptState)


def has_guard(tree: PyTree) -> int:
    """Return how many guards' states ``tree`` holds."""
    return sum(map(is_guard, jax.tree.leaves(tree, is_leaf=is_guard)))


def find_guard(opt_state: PyTree) -> GuardOptState:
    """Return the one guard's state in a pytree.

    Raises:
        ValueError: there is none, or more than one.
    """
    found = guards_in(opt_state)
    if len(found) != 1:
        raise ValueError(
            f"opt_state must hold exactly one guard's state; got {len(found) or 'none'}. "
            "Put one guard into the optimizer, as in optax.chain(stablenum_jax.guard(), optax.adamw(1e-3)), "
            "and make opt_state with that optimizer's init."
        )
    return found[0]


def guards_in(tree: PyTree) -> list[GuardOptState]:
    """Return the guards' states in a pytree, as nested tuples of bare arrays."""
    return [plain_arrays(node) for node in _nodes(tree, is_guard)]


def numbered_guards(tree: PyTree) -> list[GuardOptState]:
    """Return the guards' states in a pytree, with the positions among its leaves in place of the arrays; also
    those in what ``nnx.jit`` passes on."""
    found, at = [], 0
    for node in jax.tree.leaves(tree, is_leaf=lambda x: is_guard(x) or _is_split(x)):
        leaves, structure = jax.tree.flatten(node)
        if is_guard(node) or _is_split(node):
            numbered = jax.tree.unflatten(structure, range(at, at + len(leaves)))
            found += guards_in(_merged(numbered) if _is_split(node) else numbered)
        at += len(leaves)
    return found


def guard_leaves(tree: PyTree) -> frozenset[int]:
    """Return the positions of the leaves that guards' states hold."""
    return frozenset(i for guard in numbered_guards(tree) for i in jax.tree.leaves(guard))


def _is_split(node: object) -> bool:
    """Return whether a node is an object of flax.nnx that ``nnx.jit`` has split into structure and arrays. No
    public name says so."""
    return type(node).__name__ == "NodeStates" and type(node).__module__ == "flax.nnx.extract"


def _merged(node: Any) -> Any:
    """Return the object that was split; nothing for one that cannot be put together without the call's other
    arguments, with which it shares arrays."""
    try:
        return sys.modules["flax.nnx"].merge(node.graphdef, *node.states)
    except (ValueError, KeyError, TypeError):
        return ()


def replace_guard(opt_state: PyTree, guard: GuardOptState) -> PyTree:
    """Return ``opt_state`` with ``guard`` in place of its own guard's state."""

    def put(node: Any) -> Any:
        if not is_guard(node):
            return node
        structure = jax.tree.structure(node)
        return jax.tree.unflatten(structure, jax.tree.leaves(guard))

    return jax.tree.map(put, opt_state, is_leaf=is_guard)


def is_inside_multisteps(opt_state: PyTree) -> bool:
    """Return whether the guard is inside a ``MultiSteps``, which calls it once in several steps."""
    return bool(multisteps_around_guard(opt_state))


def multisteps_around_guard(opt_state: PyTree) -> list[Any]:
    """Return the states of ``MultiSteps`` that the guard is inside of, the outermost first."""

    def around(node: object) -> bool:
        return isinstance(node, optax.MultiStepsState) and has_guard(node) == 1

    found = _nodes(opt_state, around)
    return [part for node in found for part in (node, *multisteps_around_guard(node.inner_opt_state))]


def places_in_windows(opt_state: PyTree) -> tuple[jax.Array, ...]:
    """Return how many gradients each ``MultiSteps`` holds of its window, 0 at its end; () without one."""

    def accumulates(node: object) -> bool:
        return isinstance(node, optax.MultiStepsState)

    return tuple(jax.tree.leaves([node.mini_step for node in _nodes(opt_state, accumulates)]))


def injects_hyperparams(node: object) -> bool:
    """Return whether a node is the state of ``optax.inject_hyperparams``, in either of optax's forms."""
    return isinstance(getattr(node, "hyperparams", None), Mapping) and hasattr(node, "inner_state")


def _nodes(tree: PyTree, wanted: Callable[[Any], bool]) -> list[Any]:
    """Return the outermost nodes of a kind."""
    return [node for node in jax.tree.leaves(tree, is_leaf=wanted) if wanted(node)]


def plain_arrays(node: Any) -> Any:
    """Return nested tuples of bare arrays: flax.nnx wraps each array in a Variable, a node."""
    if isinstance(node, tuple):
        parts = [plain_arrays(part) for part in node]
        return type(node)(*parts) if hasattr(node, "_fields") else tuple(parts)
    (array,) = jax.tree.leaves(node)
    return array


def guard_state(opt_state: PyTree) -> stablenum.GuardState:
    """Return the guard's state, wherever it is in ``opt_state``.

    The search looks through optax chains and wrappers (``MultiSteps``, ``masked``, ``inject_hyperparams``,
    ``partition``...), a whole flax ``TrainState`` and a whole ``nnx.Optimizer``.

    Outside of a trace, its arrays are computed from those in ``opt_state``; if these are on the devices of
    several processes, all of them have to call it. :func:`stablenum_jax.metrics` may be called by one.

    Raises:
        ValueError: there is no guard in ``opt_state``, or more than one.

    Example:
        >>> import jax.numpy as jnp, optax, stablenum_jax
        >>> tx = optax.chain(stablenum_jax.guard(), optax.sgd(0.1))
        >>> guard_state(tx.init({"w": jnp.zeros(2)})).step
        Array(0, dtype=int32)
    """
    found = find_guard(opt_state).guard
    note_scale_read()
    return found


def loss_scale(opt_state: PyTree) -> jax.Array:
    """Return the factor on the next step's loss: () float32, 1.0 without loss scaling.

    Raises:
        ValueError: there is no guard in ``opt_state``, or more than one.

    Example:
        >>> import jax.numpy as jnp, optax, stablenum_jax
        >>> tx = optax.chain(stablenum_jax.guard(loss_scale="dynamic"), optax.sgd(0.1))
        >>> loss_scale(tx.init({"w": jnp.zeros(2)}))
        Array(65536., dtype=float32)
    """
    found = find_guard(opt_state).scale
    note_scale_read()
    return found


@contextmanager
def told_of_another_state(
    tx: optax.GradientTransformation, params: PyTree, opt_state: PyTree
) -> Iterator[None]:
    """Say so if an update fails inside because the state is that of another optimizer: optax does not.

    Raises:
        ValueError: the update failed, and ``opt_state`` is not made of the parts that ``tx.init`` gives.
    """
    try:
        yield
    except (AttributeError, TypeError, ValueError) as error:
        if params is None:
            raise
        own, given = _kinds(jax.eval_shape(tx.init, params)), _kinds(opt_state)
        if own == given:
            raise
        raise ValueError(
            f"opt_state must be that of this optimizer, {own}; got {given}. Where a clip or another part of "
            "the optimizer was replaced by the guard, move over the states of the parts that stay, as in "
            "(tx.init(params)[0], old[1])."
        ) from error


def _kinds(node: object) -> str:
    """Return the names of the states in a chain's state."""
    if isinstance(node, tuple) and not hasattr(node, "_fields"):
        return f"({', '.join(map(_kinds, node))})"
    return type(node).__name__ if isinstance(node, (dict, list, tuple)) else "array"
