"""``python -m tests.jax.mesh_records LAYOUT ...``: a training on eight devices in each layout, with faults.

It prints, as JSON, what each layout recorded and where its parameters ended, for ``test_meshes.py``, which
compares that with one process on the gathered gradients; of ``LAYOUT: RULES``, the collectives of a compiled
step.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec

import stablenum
import stablenum_jax
from tests.jax.mesh_layouts import DEVICES, FAULTS, GOOD_STEPS, SHAPES, Layout, batch, spoiled


def replicas_agree(tree: Any) -> bool:
    """Whether all devices that hold the same part of an array hold the same bits."""
    for leaf in jax.tree.leaves(tree):
        parts: dict[str, bytes] = {}
        for shard in leaf.addressable_shards:
            data = np.asarray(shard.data).tobytes()
            if parts.setdefault(str(shard.index), data) != data:
                return False
    return True


def states_agree(stacked: Any) -> bool:
    """Whether the guard's states of all devices, stacked by pmap, are the same."""
    return all(
        len({np.asarray(one).tobytes() for one in np.asarray(leaf)}) == 1 for leaf in jax.tree.leaves(stacked)
    )


def gathered(params: Any) -> dict[str, Any]:
    """The whole parameters; under pmap they are stacked by device."""
    return {
        name: np.asarray(part, np.float64).reshape(SHAPES[name]).tolist() for name, part in params.items()
    }


def record(layout: str) -> dict[str, Any]:
    """What a layout recorded of each fault, by fault."""
    made = Layout(layout)
    before, found = made.first(), {}
    for i in range(GOOD_STEPS):
        before = made.step(*before, made.examples(batch(i)))
    for fault in FAULTS:
        after = made.step(*before, made.examples(spoiled(fault)))
        state = after[1] if made.kind != "pmap" else jax.tree.map(lambda x: x[0], after[1])
        last = stablenum_jax.metrics(state)
        same = [
            np.asarray(a).tobytes() == np.asarray(b).tobytes()
            for a, b in zip(jax.tree.leaves(after[0]), jax.tree.leaves(before[0]), strict=True)
        ]
        alike = replicas_agree(after) if made.kind != "pmap" else states_agree(after[1][0])
        again = made.step(*after, made.examples(batch(GOOD_STEPS + 1)))
        found[fault] = {
            "applied": last["applied"],
            "reason": last["reason"].name,
            "grad_norm": last["grad_norm"],
            "loss": last["loss"],
            "worst": last["worst"].name,
            "worst_rank": last["worst_rank"],
            "unchanged": all(same),
            "replicas agree": alike,
            "params": gathered(again[0]),
        }
    return found


COLLECTIVE = re.compile(r"= (\(?[a-z0-9]+\[.*?) (all-\w+|collective-\w+|reduce-scatter)(?:-start)?\(")
HOST = re.compile(r"custom-call\(.*callback|infeed\(|outfeed\(|send\(|recv\(")


def collectives(layout: str, **rules: Any) -> dict[str, Any]:
    """The collectives of a guarded step whose gradients come in as they lie, and whether it asks the host."""
    made = Layout(layout)
    axis_name = made.axes if made.joins else None
    with_units = stablenum.GuardConfig(**rules).unit_rule is not None
    specs = made.specs(dict.fromkeys(made.names, 0)) if with_units else None
    made.tx = optax.chain(stablenum_jax.guard(**rules, axis_name=axis_name, specs=specs), optax.sgd(0.1))
    params, state = made.first()
    if made.kind == "jit":
        program = jax.jit(made._update).lower(params, state, params, np.float32(1.0))
    elif made.kind == "pmap":
        program = jax.pmap(made._update, axis_name="d").lower(params, state, params, np.ones(DEVICES))
    else:
        specs, by_device = made.specs((params, state)), PartitionSpec(made.axes)

        def update(params: Any, state: Any, grads: Any, losses: Any) -> Any:
            return made._update(params, state, grads, losses[0])

        mapped = jax.shard_map(
            update, mesh=made.mesh, in_specs=(*specs, specs[0], by_device), out_specs=specs
        )
        program = jax.jit(mapped).lower(params, state, params, np.ones(DEVICES, np.float32))
    text = program.compile().as_text()
    found = [match.groups() for line in text.splitlines() if (match := COLLECTIVE.search(line))]
    return {"collectives": found, "asks the host": bool(HOST.search(text))}


RULES: dict[str, dict[str, Any]] = {
    "clip": {"clip": 1.0},
    "per tensor": {"clip": stablenum.ClipByNorm(1.0)},
    "exact": {"clip": 1.0, "exact_norms": True},
    "two rules": {"clip": (stablenum.AutoClip(), 1.0)},
    "update": {"clip": (1.0, stablenum.ClipUpdateRMS(1.0, per_lr=False))},
    "units": {"clip": stablenum.AdaptiveGradClip()},
    "units, then a norm": {"clip": (stablenum.AdaptiveGradClip(), 1.0)},
    "elements": {"loss_scale": stablenum.UnderflowAwareLossScale()},
}


def main(*names: str) -> None:
    """Print what these layouts recorded, and the collectives of programs that have rules too."""
    found = {}
    for name in names:
        layout, _, rules = name.partition(": ")
        found[name] = collectives(layout, **RULES[rules]) if rules else record(layout)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
