"""The table of signatures: which evidence leads to which verdict."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from stablenum.diagnosis import Cause, Finding, Place, Report, TensorStats
from stablenum.diagnosis.replay.causes import CAUSES
from stablenum.diagnosis.replay.findings import finding_of
from stablenum.diagnosis.replay.judge import Evidence, judge
from stablenum.diagnosis.replay.operations import ADVICE, BOUNDARIES, REMEDIES
from stablenum.diagnosis.replay.trace import Trace
from stablenum.diagnosis.replay.walk import first_causes

PLACE = Place("model.py", 7, "forward", "y = f(x)")


def stats(low: float = 1.0, high: float = 1.0, dtype: str = "float32", **counts: int) -> TensorStats:
    return TensorStats(
        dtype=dtype, shape=(4,), size=4, min=low, max=high, amax=max(abs(low), abs(high)), **counts
    )


def finding(operation: str, kind: str = "nan", **more: Any) -> Finding:
    more = {"phase": "forward", "inputs": (stats(),), "outputs": (stats(nan=1),), "place": PLACE} | more
    return Finding(operation=operation, kind=kind, **more)


def before(role: str, **more: Any) -> Finding:
    return finding(role, phase="before", name="x", inputs=(), **more)


FLOAT16 = {"outputs": (stats(dtype="float16", posinf=1),), "inputs": (stats(1.0, 300.0, "float16"),)}
LARGE = {"inputs": (stats(1.0, 1e30),), "outputs": (stats(posinf=1),)}

TABLE: list[tuple[Cause, dict[str, Any]]] = [
    (Cause.NOTHING_WRONG, {"loss_finite": True}),
    (Cause.NOTHING_WRONG, {"loss_finite": True, "loss_scale": 1024.0, "unscaled_finite": None}),
    (Cause.BATCH, {"findings": (before("input"),)}),
    (Cause.PARAMETERS, {"findings": (before("parameter"),)}),
    (Cause.PARAMETERS, {"findings": (before("buffer"),)}),
    (Cause.PARAMETERS, {"findings": (before("input"),), "bad_parameters": ("w",)}),
    (Cause.BATCH, {"findings": (before("constant"),)}),
    (Cause.OPTIMIZER_STATE, {"findings": (finding("sqrt", phase="update"),), "bad_updates": ("w",)}),
    (Cause.OPTIMIZER_STATE, {"findings": (before("state"),)}),
    (Cause.LABELS, {"labels": "7 is not one of 5 classes", "findings": (finding("cross_entropy"),)}),
    (Cause.TRANSIENT, {"reproduced": False}),
    (Cause.TRANSIENT, {"reproduced": False, "findings": (finding("log"),)}),
    (Cause.OTHER_RANK, {"other_rank": True, "loss_finite": True, "reproduced": False}),
    (
        Cause.LOSS_SCALE,
        {"loss_scale": 2.0**16, "unscaled_finite": True, "findings": (finding("mul", "inf", **FLOAT16),)},
    ),
    (Cause.MASK, {"findings": (finding("softmax", placed=True),)}),
    (Cause.MASK, {"findings": (before("constant", kind="inf", placed=True),)}),
    (
        Cause.LOW_PRECISION_OVERFLOW,
        {"findings": (finding("mul", "inf", wide_finite=True, **FLOAT16),)},
    ),
    (Cause.WHERE_TRAP, {"findings": (finding("sqrt", derivative=True, phase="backward", selected=True),)}),
    (Cause.BOUNDARY_DERIVATIVE, {"findings": (finding("sqrt", derivative=True, phase="backward"),)}),
    (Cause.DOMAIN, {"findings": (finding("log", "inf", inputs=(stats(0.0, 1.0, zero=1),)),)}),
    (Cause.DOMAIN, {"findings": (finding("div", inputs=(stats(), stats(0.0, 0.0, zero=4))),)}),
    (Cause.OVERFLOW, {"findings": (finding("div", "inf", **LARGE),)}),
    (Cause.OVERFLOW, {"findings": (finding("exp", "inf", inputs=(stats(0.0, 100.0),)),)}),
    (Cause.OVERFLOW, {"findings": (finding("mul", "inf", derivative=True, phase="backward", **LARGE),)}),
    (
        Cause.OVERFLOW,
        {"findings": (finding("matmul", inputs=(stats(0.0, 2e38, zero=2), stats(-70.0, 70.0))),)},
    ),
    (Cause.UNKNOWN, {"findings": (finding("matmul", inputs=(stats(0.0, 2e38), stats(posinf=1))),)}),
    (Cause.UNKNOWN, {"findings": (finding("matmul", inputs=(stats(), stats())),)}),
    (Cause.DOMAIN, {"findings": (finding("sqrt", inputs=(stats(-1e30, 1.0),)),)}),
    (Cause.DOMAIN, {"findings": (finding("layer_norm", inputs=(stats(), stats(0.0, 0.0, zero=4))),)}),
    (Cause.NORM_OVERFLOW, {"norm_overflow": True, "loss_finite": True}),
    (Cause.OPTIMIZER_STATE, {"bad_updates": ("w",), "loss_finite": True}),
    (Cause.OPTIMIZER_STATE, {"state": ("v of w holds 3 inf",), "loss_finite": True}),
    (Cause.UNKNOWN, {"loss_finite": False}),
]


@pytest.mark.parametrize(("cause", "evidence"), TABLE, ids=[f"{i}-{c}" for i, (c, _) in enumerate(TABLE)])
def test_evidence_gives_the_verdict(cause: Cause, evidence: dict[str, Any]) -> None:
    verdict = judge(Evidence(framework="torch", **evidence))
    assert verdict.cause is cause
    assert verdict.what == CAUSES[cause].what
    report = Report.of(Evidence(framework="torch", **evidence))
    assert report.ok is (cause is Cause.NOTHING_WRONG)
    assert json.loads(report.to_json())["verdict"]["cause"] == cause.value


def test_every_cause_is_explained() -> None:
    assert set(CAUSES) == set(Cause)


def test_a_safe_function_is_named_in_the_frameworks_words() -> None:
    found = (finding("softmax", placed=True),)
    torch, jax = (judge(Evidence(framework=f, findings=found)) for f in ("torch", "jax"))
    assert torch.safe_function == "stablenum_torch.numerics.softmax"
    assert "dim=-1" in torch.code
    assert "axis=-1" in jax.code
    assert jax.safe_function == "stablenum_jax.numerics.softmax"


def test_an_infinity_computed_from_zeros_is_no_overflow() -> None:
    zeros = {"inputs": (stats(0.0, 0.0, zero=4),), "outputs": (stats(neginf=4),)}
    found = (finding("shard_map", "inf", **zeros),)
    assert judge(Evidence(framework="jax", findings=found, loss_finite=False)).cause is Cause.UNKNOWN


@pytest.mark.parametrize("operation", sorted(REMEDIES))
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_the_remedys_line_is_python_and_its_function_exists(operation: str, framework: str) -> None:
    import stablenum.losses
    import stablenum.numerics

    remedy = REMEDIES[operation]
    part, name = remedy.name.split(".")
    assert hasattr(getattr(stablenum, part), name)
    line = remedy.code.format(ns=f"stablenum_{framework}", axis="dim" if framework == "torch" else "axis")
    compile(line, "remedy", "eval")


def test_a_function_with_an_edge_has_a_safe_form_or_advice() -> None:
    assert set(BOUNDARIES) - set(REMEDIES) == set(ADVICE)
    verdict = judge(Evidence(framework="torch", findings=(finding("mean", inputs=()),)))
    assert (verdict.cause, verdict.remedy, verdict.code) == (Cause.DOMAIN, ADVICE["mean"], "")


def test_a_remedy_mentions_a_safe_form_only_if_it_names_it() -> None:
    found = finding("acosh", derivative=True, phase="backward")
    verdict = judge(Evidence(framework="torch", findings=(found,)))
    assert (verdict.cause, verdict.code) == (Cause.BOUNDARY_DERIVATIVE, "")
    assert "safe form" not in verdict.remedy


def test_a_safe_form_that_overflows_as_well_is_no_remedy() -> None:
    overflown = judge(Evidence(framework="torch", findings=(finding("pow", "inf", **LARGE),)))
    assert (overflown.cause, overflown.code) == (Cause.OVERFLOW, "")
    norm = judge(Evidence(framework="torch", findings=(finding("norm", "inf", **LARGE),)))
    assert norm.code.startswith("stablenum_torch.numerics.norm(")


def test_the_first_place_in_the_text_is_the_first_causes() -> None:
    second = replace(finding("div"), place=Place("other.py", 99))
    text = str(Report.of(Evidence(framework="torch", findings=(finding("log"), second))))
    assert text.startswith("model.py:7: log gives NaN")
    assert text.index("model.py:7") < text.index("other.py:99")


def test_the_text_repeats_nothing() -> None:
    again = (finding("log"), finding("log"), finding("div"), finding("div"))
    text = str(Report.of(Evidence(framework="torch", findings=again)))
    assert text.count("log gives NaN") == text.count("div gives NaN") == 1


def test_findings_survive_plain_values() -> None:
    f = finding("log", inputs=(stats(float("nan"), float("nan"), nan=4),), frames=(PLACE, PLACE))
    again = Finding.from_dict(json.loads(json.dumps(f.to_dict(), allow_nan=False)))
    assert str(again) == str(f)
    assert again.frames == f.frames
    assert str(again.inputs[0]) == str(f.inputs[0])


def test_no_more_than_four_values_are_kept() -> None:
    kept = TensorStats(dtype="float32", shape=(9,), size=9, values=tuple(range(9)))
    assert kept.values == (0, 1, 2, 3)


def test_an_infinity_that_is_selected_away_traps_if_the_loss_is_finite() -> None:
    found = (finding("exp", "inf", selected=True, inputs=(stats(1.0, 100.0),)),)
    trapped = judge(Evidence(framework="torch", findings=found, loss_finite=True))
    assert trapped.cause is Cause.WHERE_TRAP
    assert judge(Evidence(framework="torch", findings=found, loss_finite=False)).cause is Cause.OVERFLOW


@pytest.mark.parametrize(
    ("operation", "kind", "cause"),
    [
        ("sqrt", "nan", Cause.OPTIMIZER_STATE),
        ("div", "inf", Cause.OPTIMIZER_STATE),
        ("mul", "inf", Cause.OVERFLOW),
    ],
)
def test_a_fault_in_an_update_is_attributed_to_the_optimizer(operation: str, kind: str, cause: Cause) -> None:
    found = (finding(operation, kind, phase="update"),)
    assert judge(Evidence(framework="jax", findings=found, loss_finite=True)).cause is cause


def test_a_plain_number_may_be_the_divisor() -> None:
    found = (finding("div", "inf", scalars=(0.0,)),)
    assert judge(Evidence(framework="torch", findings=found, loss_finite=False)).cause is Cause.DOMAIN
    assert Finding.from_dict(json.loads(json.dumps(found[0].to_dict()))).scalars == (0.0,)


def test_a_nan_scalar_is_named_as_a_constant() -> None:
    t = Trace()
    x, y = t.add_value(role="input"), t.add_value(flags=(True, False, False))
    t.add_step("mul", inputs=[x], outputs=[y], scalars=[math.nan], place=PLACE)
    (origin,) = first_causes(t, [y])
    found = finding_of(t, origin)
    assert str(found) == "model.py:7: constant holds NaN before the step"
    assert judge(Evidence(framework="torch", findings=(found,))).cause is Cause.BATCH


def test_a_nan_that_was_written_into_data_has_the_remedy_of_a_bad_batch_too() -> None:
    """A whole script is recorded with the line that writes its data, a step that is replayed without."""
    written, given = (finding(name, phase="before") for name in ("constant", "input"))
    remedies = [
        judge(Evidence(framework="torch", findings=(found,), loss_finite=False)).remedy
        for found in (written, given)
    ]
    assert remedies[0].startswith(f"if it came with a batch, {remedies[1]}; if it is a constant of the code")
    masked = judge(Evidence(framework="torch", findings=(written,), loss_finite=True))
    assert masked.remedy.startswith("put a number (0) in its place")


@pytest.mark.parametrize(("zeros", "cause"), [(0, Cause.OVERFLOW), (1, Cause.DOMAIN)])
def test_a_quotient_is_at_its_edge_if_the_divisor_is_zero(zeros: int, cause: Cause) -> None:
    found = (finding("div", "inf", inputs=(stats(1.0, 200.0), stats(1e-38, 1e-38, zero=zeros))),)
    assert judge(Evidence(framework="torch", findings=found, loss_finite=False)).cause is cause


@pytest.mark.parametrize(("dtype", "rounds"), [("bfloat16", True), ("float16", True), ("float32", False)])
def test_a_clamp_is_advised_in_a_format_that_can_hold_its_bound(dtype: str, rounds: bool) -> None:
    found = (finding("log1p", inputs=(stats(-1.0, 0.5, dtype),)),)
    verdict = judge(Evidence(framework="torch", findings=found, loss_finite=False))
    assert verdict.cause is Cause.DOMAIN
    assert ("rounds a bound such as 1 - 1e-6 to 1" in verdict.remedy) is rounds
