"""Of checkpoints in every format, all planted poison is named, and no good one is called poisoned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stablenum.commands.verify.looking import look_at
from stablenum.commands.verify.verdicts import Outcome
from tests.verifying import jax_states, torch_states

# What torch.distributed.checkpoint says in one process.
pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning"
)

GOOD = [
    (framework, kind, format_name)
    for framework, states in (("torch", torch_states), ("jax", jax_states))
    for kind in states.OPTIMIZERS
    for format_name in states.WRITERS
]


def written(framework: str, kind: str, format_name: str, folder: Path, poison: str = "") -> Any:
    """A checkpoint, and the names of the entries in which poison was planted."""
    if framework == "torch":
        state = torch_states.trained(kind)
        planted = torch_states.plant(state, poison) if poison else set()
        return torch_states.WRITERS[format_name](state, folder), planted
    state, planted = jax_states.started(kind), set()
    if poison:
        state, planted = jax_states.plant(state, poison)
    return jax_states.WRITERS[format_name](state, folder), planted


def looked_at(path: Path) -> Outcome:
    (outcome,), notes = look_at(path)
    assert notes == ()
    return outcome


@pytest.mark.sampled
@pytest.mark.parametrize(("framework", "kind", "format_name"), GOOD)
def test_a_good_checkpoint_is_called_good(framework, kind, format_name, tmp_path):
    path, _ = written(framework, kind, format_name, tmp_path)
    outcome = looked_at(path)
    assert (outcome.word, outcome.exit_code) == ("good", 0), outcome
    assert outcome.verdict.elements > 100
    noted = "\n".join(outcome.verdict.notes)
    assert "-inf" in noted, "the mask is noted"
    assert ("guard's state" in noted) == (
        kind in ("guarded", "around") and (framework, format_name) not in NO_GUARD
    )


# These hold tensors only, and PyTorch's guard saves plain numbers.
NO_GUARD = {("torch", "safetensors"), ("torch", "npz")}


def cases():
    """Each poison in each format once, with the optimizers in turn."""
    for framework, states in (("torch", torch_states), ("jax", jax_states)):
        kinds = list(states.OPTIMIZERS)
        for i, poison in enumerate(states.POISONS):
            for j, format_name in enumerate(states.WRITERS):
                kind = kinds[(i + j) % len(kinds)]
                if poison == "negative" and kind in ("momentum", "adafactor"):
                    kind = "adamw"
                if poison == "inf in a count" and kind == "momentum":
                    kind = "guarded"
                yield framework, kind, format_name, poison


@pytest.mark.sampled
@pytest.mark.parametrize(("framework", "kind", "format_name", "poison"), list(cases()))
def test_all_planted_poison_is_named(framework, kind, format_name, poison, tmp_path):
    path, planted = written(framework, kind, format_name, tmp_path, poison)
    outcome = looked_at(path)
    assert planted, "nothing was planted"
    assert outcome.verdict is not None, outcome
    assert {found.name.replace("default.", "") for found in outcome.verdict.poison} == planted
    assert (outcome.word, outcome.exit_code) == ("poisoned", 1)


def test_enough_checkpoints_are_looked_at():
    assert len(GOOD) >= 40
    assert len(list(cases())) >= 40
