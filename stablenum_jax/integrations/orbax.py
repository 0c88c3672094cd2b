"""Orbax: save a training with its guard so that other settings, meshes and frameworks can load it."""

from __future__ import annotations

import dataclasses
import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import optax

from stablenum._support.one_line import one_line
from stablenum._support.partners import imported
from stablenum._support.public_names import present
from stablenum_jax._step.readout import guard_state_dict, load_guard_state_dict
from stablenum_jax._trees.places import placed_like
from stablenum_jax._trees.state import find_guard, has_guard, is_guard

imported(__name__, {"orbax.checkpoint": "orbax-checkpoint"}, "0.12.8")
import orbax.checkpoint as ocp  # noqa: E402

__all__ = ["GuardedCheckpointHandler", "GuardedRestore", "GuardedSave"]

PyTree: TypeAlias = Any

_FILE = "guard.json"
# The keys of elements, in contrast to those of fields and dicts.
_POSITIONS = (jax.tree_util.SequenceKey, jax.tree_util.FlattenedIndexKey)


class GuardedCheckpointHandler(ocp.AsyncCheckpointHandler):
    """Saves a pytree with a guard in it: the guard as JSON, the rest as Orbax's standard handler does.

    The item's folder is a standard checkpoint without the guard, and beside it ``guard.json``, which holds
    what :func:`stablenum_jax.guard_state_dict` returns and ``load_guard_state_dict`` reads, here and in
    PyTorch. Orbax finds the handler from :class:`GuardedSave` and :class:`GuardedRestore`; name it only where
    handlers have to be listed.

    Example:
        >>> import orbax.checkpoint as ocp
        >>> checkpointer = ocp.Checkpointer(GuardedCheckpointHandler())
    """

    def __init__(self) -> None:
        self._rest = ocp.StandardCheckpointHandler()
        self._guard = ocp.JsonCheckpointHandler(filename=_FILE)

    async def async_save(self, directory: Any, args: GuardedSave) -> list[Any]:
        """Start saving; the guard is read at once, so that its buffers may be donated."""
        rest, plain = args.parts()
        futures = await self._rest.async_save(directory, args=rest)
        return [*(futures or ()), *(await self._guard.async_save(directory, args=plain) or ())]

    def save(self, directory: Any, args: GuardedSave) -> None:
        """Save, and return when everything is written."""
        rest, plain = args.parts()
        self._rest.save(directory, args=rest)
        self._guard.save(directory, args=plain)

    def restore(self, directory: Any, args: GuardedRestore) -> PyTree:
        """Return the saved state, in the structure and on the devices of ``args.item``.

        Raises:
            ValueError: no guard was saved there, or the saved one is damaged or does not fit; the message
                names the file.
        """
        guard = self._restored_guard(directory, args.item)
        rest = ocp.args.StandardRestore(_named(_without_guard(args.item)))
        restored = _with_guard(self._rest.restore(directory, args=rest), guard)
        return jax.tree.map(placed_like, restored, args.item)

    def _restored_guard(self, directory: Any, item: PyTree) -> PyTree:
        """Return ``item`` with the saved guard."""
        try:
            return _loaded(item, self._guard.restore(directory))
        except FileNotFoundError as error:
            raise ValueError(
                f"{directory} must be written by GuardedSave; it has no {_FILE}. Restore what StandardSave "
                "wrote with orbax.checkpoint.args.StandardRestore. If GuardedSave wrote it, the file was "
                "lost: restore another step."
            ) from error
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(
                f"{directory}/{_FILE} must be JSON, as GuardedSave writes it; got {error}. The checkpoint is "
                "damaged: restore another step."
            ) from error
        except ValueError as error:
            raise ValueError(f"{directory}/{_FILE}: {error}") from error

    def metadata(self, directory: Any) -> Any:
        """Return Orbax's description of the saved state without the guard."""
        return self._rest.metadata(directory)

    def finalize(self, directory: Any) -> None:
        """Complete the files, once all of them are written."""
        self._rest.finalize(directory)

    def close(self) -> None:
        """Release what the handler holds."""
        self._rest.close()


@ocp.args.register_with_handler(GuardedCheckpointHandler, for_save=True)
@dataclasses.dataclass
class GuardedSave(ocp.args.CheckpointArgs):
    """What to save, in place of ``ocp.args.StandardSave``, alone or in a ``Composite``.

    ``StandardSave`` saves the guard's arrays as they are: resumed with the same settings, the training is the
    same bit for bit. With other settings it cannot be loaded, or, if only ``loss_scale`` differs, the first
    step still has the old scale. ``GuardedSave`` is as exact, and loads with any settings.

    Args:
        item: a pytree of arrays with one guard's state in it: a ``TrainState``, ``{"params": params,
            "opt_state": opt_state}``, or of flax nnx the model and the optimizer themselves, as in
            ``{"model": model, "optimizer": optimizer}``.

    Raises:
        ValueError: ``item`` holds no guard or more than one.

    Example:
        >>> import jax.numpy as jnp, stablenum_jax
        >>> tx = optax.chain(stablenum_jax.guard(), optax.sgd(0.1))
        >>> state = {"opt_state": tx.init({"w": jnp.zeros(2)})}
        >>> args = ocp.args.Composite(state=GuardedSave(state), note=ocp.args.JsonSave({"epoch": 3}))
    """

    item: PyTree

    def __repr__(self) -> str:
        return one_line(self, arrays=len(jax.tree.leaves(self.item)))

    def __post_init__(self) -> None:
        _check_guard(self.item)

    def parts(self) -> tuple[Any, Any]:
        """Return Orbax's arguments for the rest and for the guard."""
        plain = guard_state_dict(self.item)
        return ocp.args.StandardSave(_named(_without_guard(self.item))), ocp.args.JsonSave(plain)


@ocp.args.register_with_handler(GuardedCheckpointHandler, for_restore=True)
@dataclasses.dataclass
class GuardedRestore(ocp.args.CheckpointArgs):
    """What to restore, in place of ``ocp.args.StandardRestore``.

    The guard is loaded as by :func:`stablenum_jax.load_guard_state_dict`: a rule that was added since starts
    from scratch, with a ``StatisticsNotLoadedWarning``, and parameters are matched by name.

    Args:
        item: a state of the training that goes on, such as its first one. It gives structure, shapes, dtypes
            and shardings; the arrays may be of another mesh than the saved ones. All but the guard's may be
            ``jax.ShapeDtypeStruct``.

    Raises:
        ValueError: ``item`` holds no guard or more than one, or the guard's arrays are abstract; on
            restoring, the saved guard is missing or damaged, or does not fit.

    Example:
        >>> import jax.numpy as jnp, stablenum_jax
        >>> tx = optax.chain(stablenum_jax.guard(clip=1.0), optax.sgd(0.1))
        >>> args = GuardedRestore({"opt_state": tx.init({"w": jnp.zeros(2)})})
    """

    item: PyTree

    def __repr__(self) -> str:
        return one_line(self, arrays=len(jax.tree.leaves(self.item)))

    def __post_init__(self) -> None:
        _check_guard(self.item)
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(find_guard(self.item))):
            raise ValueError(
                "item must hold the guard's own arrays, which tell how it is set up; got abstract ones. Make "
                "the rest abstract with jax.tree.map(f, state, is_leaf=lambda x: isinstance(x, "
                "stablenum_jax.typing.GuardOptState)), where f returns a GuardOptState unchanged."
            )


def _check_guard(item: PyTree) -> None:
    count = has_guard(item)
    if count != 1:
        raise ValueError(
            f"item must hold exactly one guard's state; got {count or 'none'}. Pass the state of the "
            "whole training, or that of the optimizer; of flax.nnx the modules themselves, not nnx.state of "
            "them."
        )


def _without_guard(item: PyTree) -> PyTree:
    """Return the tree with an empty node in place of the guard's state."""
    return jax.tree.map(lambda x: optax.EmptyState() if is_guard(x) else x, item, is_leaf=is_guard)


def _named(tree: PyTree) -> PyTree:
    """Return the tree with dicts in place of nodes that have both names and positions for keys, as the lists
    of flax nnx do: Orbax would save such a node, and could not restore it. The leaves keep their order."""
    keys, children, structure = _opened(tree)
    if keys == [()]:
        return tree
    new = [_named(child) for child in children]
    if len({isinstance(key, _POSITIONS) for (key,) in keys}) > 1:
        return OrderedDict(
            (jax.tree_util.keystr(key, simple=True), x) for key, x in zip(keys, new, strict=True)
        )
    same = all(a is b for a, b in zip(children, new, strict=True))
    return tree if same else jax.tree.unflatten(structure, new)


def _opened(node: PyTree) -> tuple[list[Any], list[PyTree], Any]:
    """Return the keys of a node, its children, and the structure that holds them; the key of a leaf is ()."""
    found, structure = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    return [key for key, _ in found], [child for _, child in found], structure


def _with_guard(rest: PyTree, guard: PyTree) -> PyTree:
    """Return the tree with the guard's state in its place again; ``guard`` is a whole tree with it."""
    structure = jax.tree.structure(guard, is_leaf=is_guard)
    leaves = iter(jax.tree.leaves(rest))
    found = [x if is_guard(x) else next(leaves) for x in jax.tree.leaves(guard, is_leaf=is_guard)]
    return jax.tree.unflatten(structure, found)


def _loaded(item: PyTree, plain: Mapping[str, Any]) -> PyTree:
    """Return ``item`` with the saved guard."""
    return load_guard_state_dict(item, plain)


__dir__ = present(globals())
