"""Every reason code has an explanation with cause and remedy."""

from __future__ import annotations

import pickle

import pytest

from stablenum import NonFiniteError, Reason
from stablenum.guard.reasons import APPLIED, EXPLANATIONS, explain_reason


def test_the_codes_never_change():
    # They are saved in checkpoints.
    assert {reason.name: int(reason) for reason in Reason} == {
        "OK": 0,
        "CLIPPED": 1,
        "NAN_GRADIENT": 2,
        "INF_GRADIENT": 3,
        "NONFINITE_LOSS": 4,
        "FOUND_INF": 5,
        "NO_STEP_YET": 6,
        "SPIKE_LOSS": 7,
        "SPIKE_GRAD_NORM": 8,
        "SPIKE_CLIPPED": 9,
        "NOT_A_SCALE_PROBLEM": 10,
        "NONFINITE_SETTING": 11,
        "NONFINITE_UPDATE": 12,
    }


def test_the_applied_reasons_are_named():
    assert APPLIED == (Reason.OK, Reason.CLIPPED, Reason.SPIKE_CLIPPED)


def test_the_table_is_complete():
    assert set(EXPLANATIONS) == set(Reason)


@pytest.mark.parametrize("reason", Reason)
def test_the_explanation_has_what_cause_and_remedy(reason):
    row, text = EXPLANATIONS[reason], explain_reason(reason)
    assert all((row.what, row.cause, row.remedy))
    assert text.startswith(row.what)
    assert text.endswith(".")
    if reason not in (Reason.OK, Reason.NO_STEP_YET):
        assert f"Likely cause: {row.cause}." in text
        assert f"Remedy: {row.remedy}." in text
    assert ("skipped" in row.what) is (reason not in (*APPLIED, Reason.NO_STEP_YET))


@pytest.mark.parametrize("code", [-1, 13, 99])
def test_an_unknown_code_is_rejected(code):
    with pytest.raises(ValueError, match="not a valid Reason"):
        explain_reason(code)


def test_a_loss_that_is_not_finite_may_come_from_the_parameters():
    row = EXPLANATIONS[Reason.NONFINITE_LOSS]
    assert "parameters that have diverged or are NaN" in row.cause
    assert "`stablenum verify` a checkpoint" in row.remedy


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_the_error_pickles(protocol):
    error = NonFiniteError("stopped", metrics={"step": 3}, history=[{"step": 2}, {"step": 3}])
    copy = pickle.loads(pickle.dumps(error, protocol))
    assert type(copy) is NonFiniteError
    assert (str(copy), copy.metrics, copy.history) == ("stopped", {"step": 3}, [{"step": 2}, {"step": 3}])
    assert isinstance(copy, ArithmeticError)
