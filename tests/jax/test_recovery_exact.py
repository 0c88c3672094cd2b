"""After a fault that does not come back, a rewound run is bit for bit the one that never failed."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import pytest

import stablenum_jax
from tests.jax.recovering import (
    AGAIN,
    POLICY,
    SECOND_MOMENT,
    batch_at,
    donating_step,
    nothing,
    once,
    put,
    run,
    same,
    train_step,
)
from tests.jax.recovery_kinds import DATA, KINDS

TRANSIENT = dataclasses.replace(POLICY, responses=(AGAIN,))

HARMS = {
    "a parameter": put(("params", "first"), math.nan),
    "a moment": put(("opt_state", 1, "inner", 0, "mu", "last"), math.inf),
    "a statistic": put(("mean",), math.nan),
    "a negative second moment": put(SECOND_MOMENT, -1e6),
}


@pytest.mark.parametrize("step", [train_step, donating_step])
@pytest.mark.parametrize("at", [3, 21, 47, 60])
@pytest.mark.parametrize("harm", HARMS)
def test_a_hurt_state_is_replaced_by_what_it_would_have_been(harm: str, at: int, step: Any) -> None:
    recovery = run(hurt=once(at, HARMS[harm]), policy=TRANSIENT, step=step)
    assert len(recovery.events) == 1
    assert same(recovery.state, run().state)


def test_a_hurt_run_is_another_one_if_nothing_is_done() -> None:
    recovery = run(hurt=once(21, put(("params", "last"), 0.5)), policy=TRANSIENT)
    assert recovery.events == []
    assert not same(recovery.state, run().state)


def test_the_history_of_a_rewound_run_is_that_of_one_that_never_failed() -> None:
    recovery = run(hurt=once(47, HARMS["a moment"]), policy=TRANSIENT)
    assert str(recovery.history()) == str(run().history())


# --- data --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", DATA)
def test_the_same_data_follow_again(kind: str) -> None:
    straight = run(data=DATA[kind]())
    rewound = run(data=DATA[kind](), hurt=once(47, HARMS["a parameter"]), policy=TRANSIENT)
    assert [event.to_step for event in rewound.events] == [30]
    assert same(rewound.state, straight.state)


# --- kinds of states ---------------------------------------------------------------------------


def train(first: Any, step: Any, hurt: Any, harmed_at: int | None) -> stablenum_jax.Recovery:
    recovery = stablenum_jax.Recovery(first(), TRANSIENT, data=batch_at)
    harm = nothing if harmed_at is None else once(harmed_at, hurt)
    for batch in recovery.batches(40):
        harm(recovery, recovery.step + 1)
        recovery.state = step(recovery.state, batch)
    return recovery


@pytest.mark.parametrize("kind", KINDS)
def test_states_of_libraries_are_put_back_whole(kind: str) -> None:
    first, *how = KINDS[kind]()
    straight, rewound = train(first, *how, None), train(first, *how, 33)
    (event,) = rewound.events
    assert event.to_step == 20
    names = {
        "linen": "batch_stats.BatchNorm_0.var",
        "nnx": "norm.var",
        "equinox": "layers.0.bias",
    }
    assert names[kind] in event.symptom.names
    leaves = [jax.tree.leaves(recovery.state) for recovery in (straight, rewound)]
    assert all(same(*pair) for pair in zip(*leaves, strict=True))
    assert not same(leaves[0], jax.tree.leaves(first()))
