"""``Recovery``: each symptom end to end, what stops a run, and what it is given."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stablenum_jax
from stablenum import RecoveryStopped
from stablenum.recovery.symptoms import SymptomCode
from stablenum.typing import Response
from stablenum_jax._recovery.findings import Findings
from tests.jax.recovering import (
    AGAIN,
    INPUTS,
    POLICY,
    SECOND_MOMENT,
    batch_at,
    changed,
    donating_step,
    first_state,
    once,
    put,
    run,
    same,
    train_step,
)


def only(recovery: stablenum_jax.Recovery) -> Any:
    """The only rewind of a run that ended where it should, in a finite state."""
    (event,) = recovery.events
    assert recovery.step == 60
    assert np.isfinite(np.asarray(recovery.state["params"]["last"])).all()
    return event


def scaled(first: int, last: int, factor: float, what: int = 0) -> Any:
    """Return a ``spoil``: the inputs (0) or targets (1) of some steps are multiplied, until a rewind."""
    latest, rewound = 0, False

    def spoil(step: int, batch: Any) -> Any:
        nonlocal latest, rewound
        latest, rewound = step, rewound or step <= latest
        if not first <= step <= last or rewound:
            return batch
        return tuple(x * np.float32(factor) if i == what else x for i, x in enumerate(batch))

    return spoil


# --- symptoms ----------------------------------------------------------------------------------


def test_a_parameter_that_is_not_finite_takes_the_run_back() -> None:
    event = only(run(hurt=once(33, put(("params", "last"), math.nan))))
    assert (event.symptom.code, event.symptom.step, event.symptom.origin) == (
        SymptomCode.NONFINITE_STATE,
        35,
        31,
    )
    assert event.symptom.names == ("params.last",)
    assert event.to_step == 20  # 10 steps are needed before a snapshot is good
    assert event.left_out == ({"epoch": 0, "batch": 20}, {"epoch": 0, "batch": 134})


def test_a_parameter_that_is_overwritten_takes_the_run_back() -> None:
    policy = dataclasses.replace(POLICY, runaway_steps=None)
    event = only(run(hurt=once(50, put(("params", "last"), 1e38)), policy=policy))
    assert (event.symptom.code, event.symptom.step) == (SymptomCode.RUNAWAY_PARAMETER, 50)
    assert event.symptom.names == ("last",)


@pytest.mark.parametrize("change", [lambda x: 1e3 * x, lambda x: x + 1e3], ids=["scale", "offset"])
def test_a_batch_that_only_running_statistics_keep_takes_the_run_back(change: Any) -> None:
    state = {**first_state(), "batch_stats": {"norm": {"mean": jnp.zeros(4), "var": jnp.ones(4)}}}
    recovery = stablenum_jax.Recovery(state, POLICY, data=batch_at)
    hurt = False
    for inputs, targets in recovery.batches(60):
        seen = change(inputs) if recovery.step == 49 and not hurt else inputs
        hurt = hurt or recovery.step == 49
        kept = recovery.state["batch_stats"]["norm"]
        new = {name: 0.9 * kept[name] + 0.1 * getattr(seen, name)(0) for name in ("mean", "var")}
        state, _ = train_step(recovery.state, (inputs, targets))
        recovery.state = {**state, "batch_stats": {"norm": new}}
    event = only(recovery)
    assert (event.symptom.code, event.symptom.origin) == (SymptomCode.RUNAWAY_BUFFER, 50)
    assert event.symptom.names == ("running statistics of batch_stats.norm",)
    assert recovery.state["batch_stats"]["norm"]["var"].max() < 10.0


def norms_of(state: Any) -> dict[str, float]:
    return {name: measured.norm for name, measured in Findings(state).measures(state).items()}


def test_what_is_measured_is_the_parameters_not_what_is_kept_for_them() -> None:
    tx = optax.chain(stablenum_jax.guard(), optax.adam(0.1))
    params = {"w": 3 * jnp.ones(4), "deep": {"w": jnp.zeros((2, 2), jnp.bfloat16)}}
    expected = {"w": 6.0, "deep.w": 0.0}
    assert norms_of((params, tx.init(params))) == expected
    steps = optax.MultiSteps(tx, 2)
    assert norms_of((params, steps.init(params))) == expected
    average = jax.tree.map(lambda p: p + 1, params)
    assert norms_of({"training": {"params": params, "tx": tx.init(params)}, "average": average}) == {
        "average.w": 8.0,
        "average.deep.w": 2.0,
        "training.params.w": 6.0,
        "training.params.deep.w": 0.0,
    } | {"w": 0.0, "deep.w": 0.0}  # of these, the moments alone


def test_a_statistic_that_is_not_finite_takes_the_run_back() -> None:
    event = only(run(hurt=once(33, put(("mean",), math.inf))))
    assert (event.symptom.code, event.symptom.names) == (SymptomCode.NONFINITE_STATE, ("mean",))


def test_a_moment_that_is_not_finite_is_named_with_its_parameter() -> None:
    event = only(run(hurt=once(33, put(("opt_state", 1, "inner", 0, "mu", "first"), math.nan))))
    assert event.symptom.code is SymptomCode.NONFINITE_STATE
    assert "mu of first" in event.symptom.names


@pytest.mark.parametrize("audit", [True, False])
def test_a_negative_second_moment_is_found_by_the_audit(audit: bool) -> None:
    # The last step before the check is skipped, so that no update takes the moment's root.
    hurt, spoil = once(40, put(SECOND_MOMENT, -1.0)), scaled(40, 40, math.nan)
    event = only(run(hurt=hurt, spoil=spoil, policy=dataclasses.replace(POLICY, audit=audit)))
    if audit:
        assert (event.symptom.code, event.symptom.step) == (SymptomCode.POISONED_MOMENTS, 40)
        assert event.symptom.names == ("last",)
    else:
        assert (event.symptom.code, event.symptom.step) == (SymptomCode.NONFINITE_STATE, 45)


@pytest.mark.parametrize("value", [1e30, 1e-14])
def test_a_second_moment_that_no_gradient_explains_takes_the_run_back(value: float) -> None:
    # The last step before the check is skipped, so that no update takes the moment's root.
    event = only(run(hurt=once(40, put(SECOND_MOMENT, value)), spoil=scaled(40, 40, math.nan)))
    assert (event.symptom.code, event.symptom.names) == (SymptomCode.POISONED_MOMENTS, ("last",))
    assert "such that no gradients produce them" in event.symptom.detail


def test_skips_in_a_row_take_the_run_back() -> None:
    event = only(run(spoil=scaled(31, 40, math.nan)))
    assert (event.symptom.code, event.symptom.origin) == (SymptomCode.SKIPS_IN_A_ROW, 31)
    assert event.symptom.step == 35


def test_a_guard_that_has_halted_takes_the_run_back() -> None:
    tx = optax.chain(stablenum_jax.guard(max_skips_in_a_row=2), optax.sgd(0.1))
    params, spoil = {"w": jnp.zeros(4)}, scaled(31, 40, math.nan)

    @jax.jit
    def step(state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: ((batch[0] @ p["w"] - batch[1]) ** 2).mean())(state[0])
        return stablenum_jax.step(tx, *state, grads, value=loss)

    recovery = stablenum_jax.Recovery((params, tx.init(params)), POLICY, data=batch_at)
    for batch in recovery.batches(60):
        recovery.state = step(recovery.state, spoil(recovery.step + 1, batch))
    (event,) = recovery.events
    assert (event.symptom.code, event.symptom.step) == (SymptomCode.SKIPS_IN_A_ROW, 35)
    assert "the guard has halted the training" in event.symptom.detail
    assert (event.symptom.origin, event.symptom.names) == (31, ())
    assert recovery.history()[-1]["step"] == 59


def test_a_loss_that_stays_high_takes_the_run_back() -> None:
    event = only(run(spoil=scaled(31, 40, 30.0, what=1)))
    assert event.symptom.code in (SymptomCode.RUNAWAY_LOSS, SymptomCode.RUNAWAY_GRAD_NORM)
    assert event.symptom.origin == 31


def test_an_evaluation_that_is_not_finite_takes_the_run_back() -> None:
    def evaluate(recovery: stablenum_jax.Recovery, step: int) -> None:
        bad = step == 33 and not recovery.events
        recovery.evaluated({"loss": jnp.asarray([1.0, math.nan if bad else 1.0])})

    event = only(run(hurt=evaluate))
    assert event.symptom.code is SymptomCode.NONFINITE_EVALUATION
    assert event.symptom.origin == 32


def test_a_report_takes_the_run_back() -> None:
    def report(recovery: stablenum_jax.Recovery, step: int) -> None:
        if step == 34 and not recovery.events:
            recovery.report("the samples look odd", origin=25)

    event = only(run(hurt=report))
    assert (event.symptom.code, event.symptom.detail) == (SymptomCode.REPORTED, "the samples look odd")
    assert (event.symptom.origin, event.to_step) == (25, 10)


def test_a_predicate_takes_the_run_back() -> None:
    asked: list[int] = []

    def predicate() -> str | None:
        asked.append(1)
        return "too many words" if len(asked) == 7 else None

    event = only(run(predicate=predicate))
    assert (event.symptom.detail, event.symptom.step) == ("too many words", 35)


def test_what_was_not_finite_at_first_is_no_symptom() -> None:
    assert run().events == []  # the state has a mask of -inf
    worse = changed(first_state(), ("mask",), lambda x: x.at[0].set(math.nan))
    event = only(run(hurt=once(33, lambda state: {**state, "mask": worse["mask"]})))
    assert event.symptom.names == ("mask",)


# --- the end of a run --------------------------------------------------------------------------


def test_a_fault_that_comes_back_stops_the_run_in_a_good_state() -> None:
    policy = dataclasses.replace(POLICY, responses=(AGAIN, AGAIN))
    recovery = stablenum_jax.Recovery(first_state(), policy, data=batch_at)
    good = None

    def train() -> None:
        nonlocal good
        for batch in recovery.batches(60):
            if recovery.step == 20:
                good = recovery.state
            if recovery.step == 32:
                recovery.state = put(("params", "last"), math.nan)(recovery.state)
            recovery.state, _ = train_step(recovery.state, batch)

    with pytest.raises(RecoveryStopped) as stopped:
        train()
    assert stopped.value.step == recovery.step == 20
    assert same(recovery.state, good)
    assert len(recovery.events) == 2
    assert "params.last" in stopped.value.report


PROGRAM = """
import sys
sys.path.insert(0, {root!r})
from tests.jax.recovering import *
try:
    run(hurt=lambda r, step: setattr(r, "state", put(("params", "last"), float("nan"))(r.state)))
except Exception:
    sys.exit(1)  # a RecoveryStopped is none
"""


def test_a_program_that_is_stopped_ends_with_exit_code_3(pytestconfig: pytest.Config) -> None:
    program = PROGRAM.format(root=str(pytestconfig.rootpath))
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200)
    assert ended.returncode == 3, ended.stderr
    assert "The training was stopped" in ended.stderr


def test_explain_is_given_the_batch_of_the_first_skipped_step() -> None:
    given: list[Any] = []

    def explain(batch: Any) -> str:
        given.append(batch)
        return "the inputs are NaN"

    bad = scaled(31, 10**6, math.nan)
    with pytest.raises(RecoveryStopped, match="the inputs are NaN"):
        run(
            spoil=lambda step, batch: (batch[0] * np.nan, batch[1]) if step > 30 else bad(step, batch),
            explain=explain,
            policy=POLICY,
        )
    assert len(given) == 1


# --- history, steps and names ------------------------------------------------------------------


def test_history_has_the_identifiers_of_batches() -> None:
    recovery = run(20, identify=lambda batch: float(batch[0].sum()))
    batches = [row["batch"] for row in recovery.history()]
    assert batches == [float(INPUTS[n % 16].sum()) for n in range(20)]


def of_sums(number: int, bad: frozenset[int] = frozenset(), **options: Any) -> stablenum_jax.Recovery:
    """Train with a guard inside ``MultiSteps``, which sums up three batches; some batches are NaN."""
    tx = optax.MultiSteps(optax.chain(stablenum_jax.guard(), optax.sgd(0.1)), 3).gradient_transformation()

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, batch: Any) -> Any:
        params, opt_state = state
        loss, grads = jax.value_and_grad(lambda p: ((p["w"] - batch) ** 2).sum())(params)
        return stablenum_jax.step(tx, params, opt_state, grads, value=loss)

    def batch_at(n: int) -> Any:
        return jnp.asarray(math.nan if n in bad else float(n % 2))

    params = {"w": jnp.zeros(2)}
    recovery = stablenum_jax.Recovery((params, tx.init(params)), POLICY, data=batch_at, **options)
    for batch in recovery.batches(number):
        recovery.state = step(recovery.state, batch)
    return recovery


def numbers(recovery: stablenum_jax.Recovery) -> list[list[int]]:
    return [[place["batch"] for place in row["batch"]] for row in recovery.history()]


def test_a_row_of_a_guard_inside_multisteps_names_the_batches_of_its_sum() -> None:
    assert numbers(of_sums(11)) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def test_a_batch_that_is_skipped_by_itself_is_in_no_sum() -> None:
    recovery = of_sums(13, frozenset({0, 5}))
    assert numbers(recovery) == [[0], [1, 2, 3], [5], [4, 6, 7], [8, 9, 10]]
    assert [row["applied"] for row in recovery.history()] == [False, True, False, True, True]


def test_sums_are_named_after_a_rewind_too() -> None:
    seen: list[int] = []

    def once_at_25() -> str | None:
        seen.append(1)
        return "seen" if len(seen) == 5 else None

    recovery = of_sums(30, predicate=once_at_25)
    (event,) = recovery.events
    assert event.to_step == 10
    # 11 to 24 and 100 more are left out.
    assert numbers(recovery)[2:5] == [[6, 7, 8], [9, 125, 126], [127, 128, 129]]


def test_a_guard_around_multisteps_has_a_row_for_each_batch() -> None:
    tx = stablenum_jax.guard(optax.MultiSteps(optax.sgd(0.1), 3))
    params = {"w": jnp.zeros(2)}
    recovery = stablenum_jax.Recovery((params, tx.init(params)), POLICY, data=lambda n: jnp.asarray(float(n)))
    for batch in recovery.batches(7):
        params, opt_state = recovery.state
        recovery.state = stablenum_jax.step(tx, params, opt_state, {"w": batch * params["w"]}, value=batch)
    assert [row["batch"]["batch"] for row in recovery.history()] == list(range(7))


def test_a_run_goes_on_from_the_step_where_it_was() -> None:
    recovery = stablenum_jax.Recovery(first_state(), POLICY, data=batch_at)
    for steps in (15, 30, 60):
        for batch in recovery.batches(steps):
            recovery.state, _ = train_step(recovery.state, batch)
    assert same(recovery.state, run().state)


def test_entries_of_a_plain_pair_have_the_names_of_parameters() -> None:
    tx = optax.chain(stablenum_jax.guard(), optax.adam(0.1))
    params = [{"w": jnp.ones(2)}, {"w": jnp.ones(2)}]
    opt_state, bad = tx.init(params), jnp.asarray([1.0, jnp.inf])
    findings = Findings((params, opt_state, [jnp.ones(2)]))
    (found,) = findings.of(([params[0], {"w": bad}], opt_state, [-bad]))
    assert found.names == ("1.w", "0")
    moments = opt_state[1][0]._replace(nu=[{"w": -bad}, {"w": bad}])
    hurt = (params, (opt_state[0], (moments, opt_state[1][1])), [jnp.ones(2)])
    (nonfinite,) = findings.of(hurt)
    assert nonfinite.names == ("nu of 0.w", "nu of 1.w")


# --- arguments ---------------------------------------------------------------------------------


def test_a_state_that_was_donated_is_put_back() -> None:
    hurt = once(33, put(("params", "last"), math.nan))
    donated = run(hurt=hurt, step=donating_step, policy=POLICY)
    assert same(donated.state, run(hurt=once(33, put(("params", "last"), math.nan))).state)


@pytest.mark.parametrize("step", [train_step, donating_step])
def test_a_state_that_is_not_assigned_is_an_error(step: Any) -> None:
    recovery = stablenum_jax.Recovery(first_state(), POLICY, data=batch_at)
    state = recovery.state
    batches = recovery.batches(60)
    for _ in range(5):
        state, _ = step(state, next(batches))
    with pytest.raises(RuntimeError, match=r"recovery\.state, loss = train_step"):
        next(batches)
    assert recovery.step == 5


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"data": iter([1])}, TypeError, "data must be"),
        ({"every": 0}, ValueError, "every must be"),
        ({"policy": POLICY, "every": 5}, TypeError, "not both"),
        ({"policy": 3}, TypeError, "policy must be a RecoveryPolicy"),
        ({"predicate": "loss > 3"}, TypeError, "predicate must be a function or None; got str"),
        ({"on_ease": 1}, TypeError, "on_ease must be a function or None; got int"),
        ({"state": {"w": jnp.ones(2)}}, ValueError, "exactly one guard's state; got none"),
        ({"unknown": 1}, TypeError, "unknown"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], error: type, message: str) -> None:
    given = {"state": first_state(), "data": batch_at} | options
    with pytest.raises(error, match=message):
        stablenum_jax.Recovery(given.pop("state"), **given)


def test_a_stacked_state_is_refused() -> None:
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), first_state())
    with pytest.raises(ValueError, match="stacked to shape"):
        stablenum_jax.Recovery(stacked, data=batch_at)


def test_a_state_without_a_guard_cannot_be_assigned() -> None:
    recovery = stablenum_jax.Recovery(first_state(), data=batch_at)
    before = recovery.state
    with pytest.raises(ValueError, match="exactly one guard"):
        recovery.state = before["params"]
    assert recovery.state is before


def test_reports_of_the_wrong_type_are_refused() -> None:
    recovery = stablenum_jax.Recovery(first_state(), data=batch_at)
    with pytest.raises(TypeError, match="text must be a string"):
        recovery.report(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="origin must be a whole number"):
        recovery.report("odd", origin=2.5)  # type: ignore[arg-type]


def test_each_rewind_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "stablenum"):
        run(hurt=once(33, put(("params", "last"), math.nan)), policy=POLICY)
    assert any("Recovery at step 35" in record.message for record in caplog.records)
    assert Response(skip_further=100) == POLICY.responses[0]
