"""A sample of the parameters' elements, before and after a step: how far the step moved them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from stablenum.runlog.lines import Update
from stablenum.runlog.updates import SAMPLE, update_of
from stablenum_jax._trees.leaves import guarded_leaves
from stablenum_jax._trees.models import parameters, watched_parameters
from stablenum_jax._trees.names import path_name

__all__ = ["Sample", "sample", "update_between"]

PyTree: TypeAlias = Any


class Sample(NamedTuple):
    """Some elements of each parameter.

    Attributes:
        elements: float32, those of all parameters, one parameter after the other.
        names: the parameters' names.
        counts: the number of elements of each parameter.
    """

    elements: jax.Array
    names: tuple[str, ...]
    counts: tuple[int, ...]


def sample(params: PyTree) -> Sample | None:
    """Return up to 256 elements of each parameter, evenly spaced, without a wait.

    None if there is no parameter, or if one is spread over several processes, which would all have to take
    part.
    """
    leaves = guarded_leaves(watched_parameters(parameters(params)), None)
    arrays = [jnp.asarray(leaf) for leaf in leaves.values()]
    if not arrays or not all(array.is_fully_addressable for array in arrays):
        return None
    names = tuple(path_name(path) for path in leaves)
    return Sample(_few(arrays), names, tuple(array.size for array in arrays))


def update_between(step: int, before: Sample, after: Sample) -> Update | None:
    """Return how far a step moved the parameters; None if they are others, or there is no finite size."""
    if (before.names, before.counts) != (after.names, after.counts):
        return None
    ends = np.cumsum([min(SAMPLE, count) for count in before.counts])[:-1]
    sizes = np.split(np.asarray(before.elements), ends)
    moved = np.split(np.asarray(after.elements) - np.asarray(before.elements), ends)
    rms = [[_root_mean_square(part) for part in parts] for parts in (moved, sizes)]
    return update_of(step, rms[0], rms[1], before.counts, before.names)


@jax.jit
def _few(arrays: list[jax.Array]) -> jax.Array:
    few = [a.reshape(-1)[:: max(1, a.size // SAMPLE)][:SAMPLE] for a in arrays]
    real = [jnp.abs(part) if jnp.iscomplexobj(part) else part for part in few]
    return jnp.concatenate([part.astype(jnp.float32) for part in real])


def _root_mean_square(elements: np.ndarray) -> float:
    return float(np.linalg.norm(elements)) / math.sqrt(max(1, elements.size))
