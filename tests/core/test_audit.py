"""The audit's core: statistics compared with plain float64 sums, the risk rules, the record."""

from __future__ import annotations

import copy
import json
import math
import pickle

import array_api_compat.numpy as xp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from stablenum.diagnosis import Cause
from stablenum.diagnosis.audit import (
    Audit,
    Measured,
    Moments,
    Role,
    Row,
    Severity,
    UpdateFormula,
    eps_is_lost,
    join_blocks,
    measure_block,
    poisoned,
    risks_of,
    update_of,
)
from stablenum.diagnosis.replay.causes import CAUSES

ADAM = UpdateFormula(kind="adam", lr=0.01, beta1=0.9, beta2=0.999, eps=1e-8, step=7.0, corrected=True)


def measure(w, m, v, g=None, formula=ADAM, blocks=1, eps=1e-8, dtype=np.float32, update=None):
    """The statistics of arrays split into blocks."""
    pieces = np.array_split(np.arange(len(w)), blocks)

    def cut(x, at):
        return None if x is None else np.asarray(x)[at].astype(np.float64)

    with np.errstate(all="ignore"):
        found = [
            measure_block(
                cut(w, at),
                [(Role.FIRST, cut(m, at)), (Role.SECOND, cut(v, at))],
                cut(g, at),
                cut(update, at),
                formula,
                eps=eps,
                narrow=lambda x: x.astype(dtype).astype(np.float64),
                xp=xp,
            )
            for at in pieces
            if len(at)
        ]
    return join_blocks([{k: float(x) for k, x in block.items()} for block in found])


def oracle(w, m, v, g, eps=1e-8, lr=0.01, b1=0.9, b2=0.999, t=7):
    """The same numbers computed one element at a time with plain floats."""
    out = {"vanished": 0, "second_inf": 0, "second_negative": 0, "moment_nan": 0, "below_eps": 0}
    out |= {"stalled": 0, "moved": 0, "poisoned": 0}
    steps, ratios, relative = [], [], []
    for w_i, m_i, v_i, g_i in zip(w, m, v, g, strict=True):
        w_i, m_i, v_i, g_i = (float(x) for x in (w_i, m_i, v_i, g_i))
        out["second_inf"] += math.isinf(v_i)
        out["second_negative"] += v_i < 0
        out["moment_nan"] += math.isnan(v_i) or math.isnan(m_i)
        if not (math.isfinite(v_i) and math.isfinite(m_i) and v_i >= 0):
            out["poisoned"] += 1
            continue
        root = math.sqrt(v_i / (1 - b2**t))
        out["vanished"] += v_i == 0 and m_i != 0
        out["below_eps"] += (v_i != 0 or m_i != 0) and root < eps
        ratios.append(abs(g_i) / max(root, eps))
        step = -lr * (m_i / (1 - b1**t)) / (root + eps)
        steps.append(abs(step))
        if w_i:
            relative.append(abs(step / w_i))
        if step:
            out["moved"] += 1
            out["stalled"] += np.float32(w_i + step) == np.float32(w_i)
    out["update_rms"] = math.sqrt(math.fsum(s * s for s in steps) / len(steps))
    out["gradient_ratio"] = math.sqrt(math.fsum(r * r for r in ratios) / len(ratios))
    out["update_relative"] = max(relative)
    return out


def planted(n=300, seed=0):
    """Parameters, moments and gradients with every kind of fault among valid elements."""
    rng = np.random.default_rng(seed)
    w = rng.normal(size=n).astype(np.float32)
    g = (rng.normal(size=n) * 1e-2).astype(np.float32)
    m, v = g * np.float32(0.5), (g * g * np.float32(0.1)).astype(np.float32)
    v[3], v[10], v[20:22], m[30], m[31] = np.inf, np.nan, -1e-3, np.nan, np.inf
    v[40], m[40] = 0.0, 1e-24
    v[41] = m[41] = 0.0
    v[50], v[51], v[52] = 3e38, 1e-45, 1e-18
    w[60], w[61] = 0.0, 1e6
    return w, m, v, g


@pytest.mark.parametrize("blocks", [1, 7, 300])
def test_statistics_equal_plain_sums(blocks: int) -> None:
    arrays = planted()
    found, expected = measure(*arrays, blocks=blocks), oracle(*arrays)
    for name, value in expected.items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-12), name
    assert found.size == 300
    assert found.first_inf == 1
    assert found.largest_vanished == float(np.float32(1e-24))
    assert found.parameter_bad == found.gradient_bad == found.update_bad == 0


@given(st.integers(0, 2**31), st.integers(1, 40))
def test_statistics_of_blocks_combine_to_those_of_the_whole(seed: int, blocks: int) -> None:
    arrays = planted(n=80, seed=seed)
    whole, joined = measure(*arrays), measure(*arrays, blocks=blocks)
    for name in Measured.__slots__:
        assert getattr(joined, name) == pytest.approx(getattr(whole, name), rel=1e-12), name


@pytest.mark.parametrize("size", [1e-320, 1e-160, 1.0, 1e160, 1e300])
def test_no_square_overflows_or_vanishes(size: float) -> None:
    w = np.full(9, size)
    found = measure(w, w, w, formula=UpdateFormula(), update=w, dtype=np.float64, blocks=3)
    assert found.parameter_rms == pytest.approx(size, rel=1e-3)
    assert found.update_rms == pytest.approx(size, rel=1e-3)
    assert found.update_relative == 1.0


def test_a_ratio_beyond_every_number_is_the_largest() -> None:
    formula = UpdateFormula(kind="adam", beta2=0.9, step=5.0, corrected=True, eps=0.0)
    found = measure(np.ones(2), np.ones(2), np.zeros(2), g=np.ones(2), formula=formula)
    assert found.gradient_ratio == pytest.approx(1.7976931348623157e308)
    assert measure(np.ones(2), np.ones(2), np.zeros(2), g=np.zeros(2), formula=formula).gradient_ratio == 0.0


@pytest.mark.parametrize("kind", ["rmsprop", "adadelta"])
def test_a_young_second_moment_is_compared_with_the_gradient_as_an_average(kind: str) -> None:
    """Although the update uses it as it is: after one step v = (1 - beta2) g^2, and the ratio is 1."""
    formula = UpdateFormula(kind=kind, beta2=0.9, step=1.0, eps=1e-8)
    found = measure(np.ones(2), np.zeros(2), np.full(2, 0.1 * 4.0), g=np.full(2, 2.0), formula=formula)
    assert found.gradient_ratio == pytest.approx(1.0)


def test_bad_parameters_and_gradients_stay_out_of_the_statistics() -> None:
    w, m, v, g = planted()
    clean = measure(w, m, v, g)
    w, g = w.copy(), g.copy()
    w[3], g[10] = np.nan, np.inf  # elements whose state is bad already
    found = measure(w, m, v, g)
    assert (found.parameter_bad, found.gradient_bad) == (1, 1)
    assert found.update_rms == clean.update_rms
    assert found.gradient_ratio == clean.gradient_ratio


def test_unknown_values_are_none() -> None:
    w, m, v, g = planted()
    found = measure(w, m, v, g, formula=UpdateFormula())
    assert found.update_rms is None
    assert found.stalled is None
    assert found.below_eps is None
    found = measure(w, m, v, formula=ADAM)
    assert found.gradient_ratio is None
    assert found.gradient_bad is None
    early = measure(w, m, v, g, formula=UpdateFormula(kind="adam", lr=0.1, eps=1e-8, corrected=True))
    assert early.update_rms is None
    assert early.gradient_ratio is None
    assert measure(w[:0], m[:0], v[:0]) == Measured()


def test_an_update_goes_against_the_gradient_unless_the_optimizer_maximizes() -> None:
    moments = Moments(gradient=np.asarray([2.0, -4.0]))
    for more, update in (({}, [-1.0, 2.0]), ({"maximize": True}, [1.0, -2.0])):
        formula = UpdateFormula(kind="sgd", lr=0.5, **more)
        assert update_of(formula, moments, eps=None, xp=xp).tolist() == update


def test_an_eps_that_rounds_to_0_gives_non_finite_updates() -> None:
    w = np.ones(3)
    found = measure(w, np.asarray([0.0, 1e-4, 1e-4]), np.asarray([0.0, 0.0, 1e-4]), eps=0.0, dtype=np.float16)
    assert found.update_bad == 2
    assert found.vanished == 1
    assert found.update_rms is not None


def test_an_update_that_leaves_the_parameter_s_format_is_bad() -> None:
    w = np.asarray([65000.0, 1.0])
    found = measure(w, w, w, formula=UpdateFormula(), update=np.asarray([1000.0, 1.0]), dtype=np.float16)
    assert found.update_bad == 1


@pytest.mark.parametrize("role", list(Role))
def test_poisoned_elements_by_role(role: Role) -> None:
    values = np.asarray([1.0, 0.0, -0.0, -1.0, np.nan, np.inf, -np.inf])
    if role is Role.OTHER:
        assert poisoned([(role, values)], xp=xp) is None
        return
    expected = [False, False, False, role.squared, True, True, True]
    assert poisoned([(role, values)], xp=xp).tolist() == expected


@pytest.mark.parametrize(
    ("eps", "dtype", "wide", "lost"),
    [
        (1e-8, "float16", False, True),
        (1e-8, "float16", True, False),
        (6e-8, "float16", False, False),
        (1e-8, "bfloat16", False, False),
        (1e-8, "float32", False, False),
        (0.0, "float32", False, True),
        (1e-46, "float32", False, True),
        (None, "float32", False, None),
        (1e-8, None, False, None),
    ],
)
def test_eps_against_formats(eps: float | None, dtype: str | None, wide: bool, lost: bool | None) -> None:
    assert eps_is_lost(eps, dtype, wide=wide) is lost
    if dtype and eps is not None and not wide and dtype != "bfloat16":
        assert (np.dtype(dtype).type(eps) == 0) is np.bool_(lost)


def row(formula: UpdateFormula = ADAM, **fields) -> Row:
    """A row of 100 float32 elements."""
    of_row = {k: fields.pop(k) for k in ("dtype", "second_dtype", "eps_lost", "others") if k in fields}
    settings = {"dtype": "float32", "second_dtype": "float32", **of_row}
    return Row(name="w", shape=(100,), law=formula, measured=Measured(**{"size": 100, **fields}), **settings)


RISKS = {
    "parameters": (row(parameter_bad=1), Cause.PARAMETERS, Severity.POISONED),
    "v inf": (row(poisoned=1, second_inf=1), Cause.OPTIMIZER_STATE, Severity.POISONED),
    "unknown": (row(others={"x": 2}), Cause.OPTIMIZER_STATE, Severity.DANGER),
    "update": (row(update_bad=1), Cause.OPTIMIZER_STATE, Severity.POISONED),
    "eps": (row(eps_lost=True), Cause.OPTIMIZER_STATE, Severity.DANGER),
    "vanished, large": (row(vanished=1, largest_vanished=1e-4), Cause.OPTIMIZER_STATE, Severity.DANGER),
    "vanished, small": (row(vanished=1, largest_vanished=1e-24), Cause.UNDERFLOW, Severity.WARNING),
    "vanished, eps unknown": (
        row(formula=UpdateFormula(), vanished=1, largest_vanished=1.0), Cause.UNDERFLOW, Severity.WARNING,
    ),
    "stale": (row(gradient_ratio=2.5), Cause.STALE_SECOND_MOMENT, Severity.WARNING),
    "bf16 v": (row(second_dtype="bfloat16"), Cause.STALE_SECOND_MOMENT, Severity.WARNING),
    "fp16 v": (row(second_dtype="float16"), Cause.OPTIMIZER_STATE, Severity.WARNING),
    "below eps": (row(alive=100, below_eps=60), Cause.UNDERFLOW, Severity.WARNING),
    "stall": (row(moved=10, stalled=6), Cause.STALL, Severity.WARNING),
}  # fmt: skip


def test_a_gradient_that_is_0_by_construction_is_called_harmless() -> None:
    (risk,) = risks_of(RISKS["below eps"][0])
    assert "a bias in front of a batch norm, is harmless and may be left out" in risk.remedy


@pytest.mark.parametrize("case", list(RISKS))
def test_each_risk_rule_names_its_cause(case: str) -> None:
    bad, cause, severity = RISKS[case]
    (risk,) = risks_of(bad)
    assert (risk.cause, risk.severity) == (cause, severity)
    assert risk.cause in CAUSES
    assert risk.what.startswith("w: ")
    assert risk.remedy
    assert risk.breaks_update is (cause is Cause.OPTIMIZER_STATE and severity >= Severity.DANGER)


HEALTHY = {
    "plain": row(),
    "a little of each": row(alive=100, below_eps=10, moved=100, stalled=20, gradient_ratio=1.5, vanished=0),
    "untouched": row(alive=0, below_eps=0, moved=0, stalled=0, gradient_ratio=0.0),
    "few elements": Row(name="w", shape=(3,), dtype="float32", measured=Measured(size=3, gradient_ratio=4.0)),
    "bfloat16, quick decay": row(formula=UpdateFormula(kind="adam", beta2=0.95), second_dtype="bfloat16"),
    "bfloat16 weights": row(dtype="bfloat16"),
    "no state": Row(name="w", shape=(), dtype="float16"),
}


@pytest.mark.parametrize("case", list(HEALTHY))
def test_a_healthy_optimizer_has_no_risks(case: str) -> None:
    assert risks_of(HEALTHY[case]) == []


@pytest.mark.parametrize(
    ("size", "ratio", "stale"),
    [(63, 10.0, False), (63, 10.1, True), (64, 2.3, False), (64, 2.4, True)],
)
def test_fewer_than_64_elements_may_be_further_from_their_second_moment(
    size: int, ratio: float, stale: bool
) -> None:
    found = risks_of(row(size=size, gradient_ratio=ratio))
    assert [risk.cause for risk in found] == [Cause.STALE_SECOND_MOMENT] * stale


def test_bfloat16_second_moments_with_a_slow_decay_never_fall() -> None:
    """The rule's threshold is the decay at which every significand is rounded back."""
    import ml_dtypes

    grid = np.arange(128, 256).astype(np.float64).astype(ml_dtypes.bfloat16)
    fell = {b: (grid.astype(np.float64) * b).astype(ml_dtypes.bfloat16) < grid for b in (0.9981, 0.995)}
    assert not fell[0.9981].any()
    assert fell[0.995].any()
    assert risks_of(row(formula=UpdateFormula(kind="adam", beta2=0.9981), second_dtype="bfloat16"))
    assert not risks_of(row(formula=UpdateFormula(kind="adam", beta2=0.995), second_dtype="bfloat16"))


def audit_of(rows) -> Audit:
    """An audit of rows with distinct names."""
    named = [
        Row(**{**{n: getattr(r, n) for n in Row.__slots__}, "name": f"layers.{i}.weight"})
        for i, r in enumerate(rows)
    ]
    return Audit.of("Adam", named, notes=("something",))


def test_the_worst_comes_first() -> None:
    audit = audit_of([row(), row(moved=10, stalled=9), row(poisoned=1, second_inf=1), row(poisoned=50)])
    assert [r.name for r in audit.rows] == [f"layers.{i}.weight" for i in (3, 2, 1, 0)]
    assert [r.name for r in audit.risks] == [f"layers.{i}.weight" for i in (3, 2, 1)]
    assert not audit.ok
    assert audit.poisoned == {"layers.3.weight": 50, "layers.2.weight": 1}
    assert [p.split(":")[0] for p in audit.problems()] == ["layers.3.weight", "layers.2.weight"]


def test_text_names_the_risk_and_the_remedy() -> None:
    audit = audit_of([case for case, _, _ in RISKS.values()])
    text = str(audit)
    assert text.splitlines()[0] == "Audit of Adam, 13 parameters: 3 poisoned, 3 danger, 7 warning."
    assert "poisoned (parameters): layers.0.weight: 1 of 100 parameters are not finite." in text
    assert "... and 5 more risks (audit.risks)" in text
    assert text.endswith("Note: something.")
    assert "\x1b" not in text
    table = text.split("\n\n")[1].splitlines()
    assert len(table) == 14
    assert max(map(len, table)) <= 130
    short = audit.to_text(limit=2)
    assert "... and 11 more parameters" in short


def test_an_empty_audit_is_ok() -> None:
    audit = Audit.of("SGD", [])
    assert audit.ok
    assert str(audit) == "Audit of SGD, 0 parameters: nothing at risk."


def test_long_names_are_cut_in_the_middle() -> None:
    long = Row(name="a" * 60 + ".weight", shape=(), dtype="float32")
    line = str(Audit.of("SGD", [long])).splitlines()[-1]
    assert line.startswith("a" * 18 + "...")
    assert ".weight" in line


def test_rich_shows_the_same_table() -> None:
    audit = audit_of([row(), row(poisoned=1, second_inf=1)])
    console = Console(width=160, file=open("/dev/null", "w"), record=True)  # noqa: SIM115
    console.print(audit)
    shown = console.export_text()
    console.file.close()
    assert "layers.1.weight" in shown
    assert "[" not in shown.split("\n")[0]
    assert "poisoned (optimizer_state)" in shown


def test_json_is_strict_and_plain() -> None:
    odd = Row(
        name="w", shape=(2,), dtype="float32", law=UpdateFormula(lr=math.inf, eps=math.nan),
        measured=Measured(size=2, gradient_ratio=math.inf),
    )  # fmt: skip
    audit = Audit.of("Adam", [odd, *(case for case, _, _ in RISKS.values())])
    read = json.loads(audit.to_json(), parse_constant=pytest.fail)
    assert read["ok"] is False
    assert {r["cause"] for r in read["risks"]} >= {"stall", "parameters"}
    by_name = next(r for r in read["rows"] if r["shape"] == [2])
    assert by_name["law"]["lr"] is None
    assert by_name["gradient_ratio"] is None
    assert read["risks"][0]["severity"] == "poisoned"


def test_an_audit_is_a_record_that_can_be_copied_and_pickled() -> None:
    audit = Audit.of("Adam", [row(poisoned=1)])
    for other in (copy.deepcopy(audit), pickle.loads(pickle.dumps(audit))):
        assert other == audit
        assert other.poisoned == audit.poisoned
