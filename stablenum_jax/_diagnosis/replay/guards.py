"""A guard inside a replayed training step: what it measured, and its loss scale.

If a step returns only parameters and state, its results do not show the failure, because the guard skips the
step. What the guard measured is then judged in place of the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from stablenum.diagnosis.replay.trace import Trace
from stablenum_jax._diagnosis.replay.inputs import Leaf
from stablenum_jax._diagnosis.replay.interpreter import Written
from stablenum_jax._step.observe import judge, judge_finiteness

__all__ = ["scale_of", "seen_by_guards", "unscaled"]

_JUDGES = frozenset({judge.__qualname__, judge_finiteness.__qualname__})


def seen_by_guards(trace: Trace, written: Sequence[Written], own: frozenset[int]) -> tuple[int, ...]:
    """Return the gradients and losses that a guard measured and that are not finite.

    Args:
        trace: the replay.
        written: how each step appears in the source, one entry per step of the trace.
        own: the guards' states, whose statistics contain intended infinities.
    """
    inside = {
        step.index
        for step, how in zip(trace.steps, written, strict=True)
        if _JUDGES.intersection(how.source.functions)
    }
    read = dict.fromkeys(i for step in trace.steps if step.index in inside for i in step.inputs)
    kept = _made_of(trace, own)
    values = [trace.values[i] for i in read if i not in kept]
    return tuple(v.id for v in values if not v.finite and v.producer not in inside and v.role != "constant")


def _made_of(trace: Trace, own: frozenset[int]) -> set[int]:
    """Return the guards' states and what is made of them alone, such as a copy inside a branch."""
    found = set(own)
    for step in trace.steps:
        read = [i for i in step.inputs if trace.values[i].role != "constant"]
        if read and found.issuperset(read):
            found.update(step.outputs)
    return found


def scale_of(leaves: Sequence[Leaf]) -> float:
    """Return the loss scale of the guard in the arguments; 1 if there is no guard, or more than one."""
    scales = [float(np.asarray(leaf.data)) for leaf in leaves if leaf.guard == "scale"]
    return scales[0] if len(scales) == 1 else 1.0


def unscaled(leaves: Sequence[Leaf]) -> list[Leaf]:
    """Return the same arguments, with every guard's loss scale set to 1."""
    return [
        replace(leaf, data=jnp.ones_like(leaf.data)) if leaf.guard == "scale" else leaf for leaf in leaves
    ]
