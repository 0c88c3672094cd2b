"""The line at which NumPy warned of bad data, in the report on the batch that held it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from stablenum.diagnosis import Cause, Finding, Place, Report
from stablenum.diagnosis.replay.judge import Evidence
from stablenum.diagnosis.watch.numpy_errors import NumpyErrors
from stablenum.diagnosis.watch.plan import Plan
from stablenum.diagnosis.watch.session import Session

READER = Place("model.py", 3, "forward", "return x @ w")


def report_on(operation: str, kind: str) -> Report:
    finding = Finding(operation=operation, phase="before", kind=kind, name="x", place=READER)
    return Report.of(Evidence(framework="torch", findings=(finding,), loss_finite=False))


@pytest.fixture
def errors(monkeypatch: pytest.MonkeyPatch) -> Iterator[NumpyErrors]:
    monkeypatch.setattr(warnings, "showwarning", lambda *args, **kwargs: None)
    made = NumpyErrors()
    made.listen()
    with np.errstate(all="warn"):
        yield made


MAKERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "divide": (lambda x: (x - x) / x, "range is 0 or infinite, use 1"),
    "log": (lambda x: np.log(x - 1.0), "numbers above 0"),
    "sqrt": (lambda x: np.sqrt(x - 1.0), "at or above 0"),
    "arccos": (lambda x: np.arccos(x + 2.0), "inside its domain"),
    "scalar divide": (lambda x: np.float64(x[0]) / np.float64(0.0), "range is 0 or infinite, use 1"),
}


@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize("name", MAKERS)
def test_the_line_that_made_a_bad_batch_is_named(errors: NumpyErrors, name: str) -> None:
    make, remedy = MAKERS[name]
    make(np.zeros(3))
    placed = errors.placed(report_on("input", "nan"))
    first = placed.findings[0]
    assert first.place is not None
    assert first.place.code.startswith(f'"{name}": (lambda x')
    assert str(first).endswith(
        f"NumPy's {name.split()[-1]} gives the NaN that input 'x' holds before the step"
    )
    assert placed.verdict.cause is Cause.BATCH
    assert remedy in placed.verdict.remedy
    assert placed == Report.from_dict(placed.to_dict())


@pytest.mark.filterwarnings("always")
def test_a_nan_that_comes_of_an_infinity_is_traced_to_it(errors: NumpyErrors) -> None:
    weights = np.zeros(3) ** -0.5
    weights = weights / weights.max()
    report = errors.placed(report_on("input", "nan"))
    first = report.findings[0]
    assert first.place is not None
    assert first.place.code == "weights = np.zeros(3) ** -0.5"
    assert "NumPy warned: divide by zero encountered in power" in report.verdict.evidence


@pytest.mark.filterwarnings("always")
def test_the_warning_that_fits_the_bad_number_is_named(errors: NumpyErrors) -> None:
    zero = np.zeros(3)
    one = np.ones(3) / zero
    bad = zero / zero
    assert not np.isfinite(one + bad).any()
    for kind, code in (("nan", "bad = zero / zero"), ("inf", "one = np.ones(3) / zero")):
        place = errors.placed(report_on("input", kind)).findings[0].place
        assert place is not None
        assert place.code == code


@pytest.mark.filterwarnings("always")
def test_other_causes_and_other_warnings_change_nothing(errors: NumpyErrors) -> None:
    given = report_on("input", "nan")
    warnings.warn("invalid value in line 3", RuntimeWarning, stacklevel=1)
    assert errors.placed(given) is given
    assert not np.isfinite(np.log(np.zeros(3))).any()
    given = report_on("parameter", "nan")
    assert errors.placed(given) is given


def test_the_script_still_sees_its_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(warnings, "showwarning", lambda message, *args, **kwargs: shown.append(str(message)))
    NumpyErrors().listen()
    with warnings.catch_warnings(), np.errstate(all="warn"):
        warnings.simplefilter("always")
        np.log(np.zeros(1))
    assert shown == ["divide by zero encountered in log"]


@pytest.mark.filterwarnings("always")
def test_the_line_that_made_a_bad_setting_is_named(errors: NumpyErrors) -> None:
    steps = np.arange(3.0)
    assert np.isnan(steps / np.zeros(3)).any()
    finding = Finding(operation="addcdiv", phase="update", kind="nan", place=READER)
    settings = ("lr is NaN in parameter group 0 of Adam",)
    evidence = Evidence(framework="torch", findings=(finding,), loss_finite=True, settings=settings)
    placed = errors.placed(Report.of(evidence))
    assert placed.verdict.cause is Cause.OPTIMIZER_STATE
    text = str(placed.findings[0])
    assert text.endswith("NumPy's divide gives the NaN of a setting that addcdiv reads (update)")
    assert "test_numpy_errors.py" in text


@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize(
    ("error", "told"), [("ValueError: probabilities contain NaN", True), ("KeyError: 'x'", False)]
)
def test_an_error_about_numbers_that_only_numpy_saw_is_placed(
    errors: NumpyErrors, error: str, told: bool
) -> None:
    session = Session(Plan(script="script.py"))
    session.numpy = errors
    assert np.isinf(np.exp(np.float32([100.0]))).all()
    session.outcome.error, session.outcome.exit_code = error, 1
    session.conclude()
    assert (session.outcome.report is not None) is told
    if session.outcome.report is not None:
        first = Report.from_dict(session.outcome.report).findings[0]
        assert first.maker == "NumPy's exp"
        assert first.place is not None
        assert first.place.code == "assert np.isinf(np.exp(np.float32([100.0]))).all()"
