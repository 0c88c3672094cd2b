"""The range report's core: counts compared with real casts, loss scales with brute force, and the text."""

from __future__ import annotations

import itertools
import json
import math
import sys

import array_api_compat.numpy as numpy_namespace
import array_api_compat.torch as torch_namespace
import ml_dtypes
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from stablenum.diagnosis.ranges import RangeCollector, RangeReport, RangeRow
from stablenum.diagnosis.ranges.counting import checked_formats, count_lost, count_row
from stablenum.diagnosis.ranges.plot import draw
from stablenum.diagnosis.ranges.verdicts import scale_exponent
from stablenum.formats import FORMATS
from tests.test_imports import run

NAMES = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
BOTH = ("numpy", "torch")


def dtype(name):
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def cast(x, name):
    """Computed without stablenum, by ml_dtypes and NumPy."""
    with np.errstate(all="ignore"):
        return x.astype(dtype(name)).astype(np.float64)


def values(seed=0):
    """Floats of all exponents, and those at and next to every limit of a format."""
    rng = np.random.default_rng(seed)
    wide = rng.normal(size=4000) * np.exp2(rng.uniform(-148, 126, size=4000))
    near = rng.normal(size=4000) * np.exp2(rng.uniform(-30, 18, size=4000))
    edges = []
    for name in NAMES:
        info = ml_dtypes.finfo(dtype(name))
        tiny, normal, top = (float(x) for x in (info.smallest_subnormal, info.smallest_normal, info.max))
        unit = top - float(np.nextafter(info.max, dtype(name).type(0)))
        edges += [tiny, tiny / 2, 1.5 * tiny, normal, normal - tiny / 2, normal - tiny, top, top + unit / 2]
    edges = np.asarray(edges, np.float32)
    beside = [np.nextafter(edges, np.float32(to)) for to in (0, np.inf)]
    with np.errstate(over="ignore"):
        x = np.concatenate([wide, near, edges, -edges, *beside, np.zeros(7)]).astype(np.float32)
    return x[np.isfinite(x)]


def counted(x, library="numpy", kind="activation", formats=NAMES):
    if library == "torch":
        return count_row(kind, "m", torch.as_tensor(x), formats=formats, xp=torch_namespace)
    return count_row(kind, "m", np.asarray(x), formats=formats, xp=numpy_namespace)


@pytest.mark.parametrize("library", BOTH)
@pytest.mark.parametrize("name", NAMES)
def test_counts_are_those_of_real_casts(name, library):
    x = values()
    row, became = counted(x, library), cast(x, name)
    normal = float(ml_dtypes.finfo(dtype(name)).smallest_normal)
    assert row.elements == x.size
    assert row.zeros == np.count_nonzero(x == 0)
    assert row.overflow[name] == np.count_nonzero(~np.isfinite(became))
    assert row.flushed(name) == np.count_nonzero((became == 0) & (x != 0))
    assert row.subnormal[name] == np.count_nonzero((became != 0) & (np.abs(became) < normal))
    assert row.amax == np.abs(x).max()
    assert row.amin == np.abs(x[x != 0]).min()
    assert sum(row.histogram.values()) == np.count_nonzero(x)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e5m2"])
def test_counts_are_those_of_torchs_casts(name):
    x = torch.as_tensor(values(1))
    row, became = counted(x, "torch"), x.to(getattr(torch, name)).float()
    assert row.overflow[name] == int((~became.isfinite()).sum())
    assert row.flushed(name) == int(((became == 0) & (x != 0)).sum())


def test_overflow_and_flush_limits_are_as_documented():
    edges = np.asarray(
        [65519.996, 65520.0, 2.0**-25, np.nextafter(np.float32(2.0**-25), 1), 464.0, 464.00003]
    )
    row = counted(edges.astype(np.float32))
    assert row.overflow["float16"] == 1
    assert row.flushed("float16") == 1
    assert row.overflow["float8_e4m3fn"] == 3
    saturated = torch.tensor([464.00003]).to(torch.float8_e4m3fn).float()
    assert saturated.isnan() or saturated == 448  # depending on the implementation of the cast


@pytest.mark.parametrize("library", BOTH)
def test_float64_is_counted_too(library):
    row = counted(np.asarray([1e300, 1e-300, 1e-40, 1.0, -1e39]), library, formats=("float32", "bfloat16"))
    assert row.overflow == {"float32": 2, "bfloat16": 2}
    assert row.flushed("float32") == 1
    assert row.subnormal["float32"] == 1


@pytest.mark.parametrize("name", ["float16", "float8_e5m2", "float8_e4m3fn"])
@pytest.mark.parametrize("k", [-9, -1, 0, 1, 7, 24])
def test_what_a_scale_flushes_is_known_without_multiplying(name, k):
    x = values(2)
    x = x[np.abs(x) < 2.0**90]
    became = cast(np.ldexp(x.astype(np.float64), k).astype(np.float64), name)
    assert counted(x).flushed(name, k) == np.count_nonzero((became == 0) & (x != 0))


@pytest.mark.parametrize("library", BOTH)
def test_what_is_not_finite_is_counted_apart(library):
    x = np.asarray([np.nan, np.inf, -np.inf, 0.0, 1e-9, 2.0], np.float32)
    row = counted(x, library)
    assert (row.nan, row.inf, row.elements, row.zeros) == (1, 2, 3, 1)
    assert (row.amax, row.amin) == (2.0, np.float32(1e-9))
    assert row.overflow["float16"] == 0
    assert row.flushed("float16") == 1
    none = counted(np.asarray([np.nan, np.inf], np.float32), library)
    assert (none.elements, none.zeros, none.amax, none.amin, dict(none.histogram)) == (0, 0, 0.0, 0.0, {})
    assert none.fraction(0) == 0.0


@pytest.mark.parametrize("library", BOTH)
def test_integers_and_empty_arrays_have_no_row(library):
    for x in (np.arange(3), np.ones(2, bool), np.ones((2, 0), np.float32), np.ones(2, np.complex64)):
        assert counted(x, library) is None


def test_rows_add_up():
    x = values(3)
    both, parts = counted(x), [counted(x[:100]), counted(x[100:])]
    assert parts[0].merged(parts[1]) == both
    nothing = RangeRow(kind="activation", module="m")
    assert both.merged(nothing).amin == both.amin


@pytest.mark.parametrize("name", NAMES)
def test_lost_updates_equal_those_of_real_sums_in_the_format(name):
    rng = np.random.default_rng(4)
    w = (rng.normal(size=3000) * np.exp2(rng.uniform(-9, 8, size=3000))).astype(np.float32)
    dw = (w * np.exp2(rng.uniform(-14, 1, size=3000)) * rng.choice([-1, 1, 0], size=3000)).astype(np.float32)
    w[:3], dw[:3] = (np.nan, 1.0, 1e30), (1.0, np.inf, 1.0)
    lost = count_lost(
        w, dw, formats=[name], cast=lambda x, name: cast(x, name).astype(x.dtype), xp=numpy_namespace
    )
    kept, moved = w[2 + (name != "bfloat16") :], dw[2 + (name != "bfloat16") :]
    inside = np.isfinite(cast(kept, name))
    a, b = kept.astype(dtype(name)), moved.astype(dtype(name))
    with np.errstate(all="ignore"):
        same = (a + b).astype(np.float64) == a.astype(np.float64)
    assert lost[name] == np.count_nonzero(same & (moved != 0) & inside)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sign", [1, -1])
def test_an_update_beyond_the_largest_number_is_lost_only_if_the_cast_saturates(name, sign):
    top = float(ml_dtypes.finfo(dtype(name)).max)
    unit = top - float(np.nextafter(ml_dtypes.finfo(dtype(name)).max, dtype(name).type(0)))
    w, dw = (np.asarray([sign * x], np.float32) for x in (top, 0.75 * unit))
    lost = count_lost(
        w, dw, formats=[name], cast=lambda x, name: cast(x, name).astype(x.dtype), xp=numpy_namespace
    )
    assert lost == {name: int(name == "float8_e4m3fn")}  # the others become infinite


@pytest.mark.parametrize("name", ["float16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("amax", [1e-12, 3.0, 32752.0, 32752.0001, 1e6, 2.0**-20, 0.1])
def test_the_loss_scale_is_the_largest_with_a_bit_to_spare(name, amax):
    row = count_row("gradient", "m", np.asarray([amax, 0.0]), formats=NAMES, xp=numpy_namespace)
    fits = [k for k in range(-100, 101) if amax * 2.0**k <= FORMATS[name].max / 2]
    assert scale_exponent(FORMATS[name], [row]) == max(fits)


def test_the_loss_scale_is_accepted_by_a_guard():
    smallest = RangeRow(kind="gradient", module="m", elements=1, amax=2.0**-149, histogram={-149: 1})
    largest = RangeRow(kind="gradient", module="m", elements=1, amax=3e38, histogram={128: 1})
    assert scale_exponent(FORMATS["float16"], [smallest]) == 100
    assert scale_exponent(FORMATS["float8_e4m3fn"], [largest]) == -100
    assert scale_exponent(FORMATS["bfloat16"], [largest]) == 0
    assert scale_exponent(FORMATS["float16"], [RangeRow(kind="gradient", module="m", elements=1)]) is None


# --- verdicts ------------------------------------------------------------------------------------


def report(*arrays, formats=NAMES):
    seen = RangeCollector(formats, xp=numpy_namespace, cast=lambda x, name: cast(x, name).astype(x.dtype))
    for kind, module, x in arrays:
        x = np.asarray(x, np.float32)
        if kind == "update":
            seen.add_update(module, np.ones_like(x), x)
        else:
            seen.add(kind, module, x)
    return RangeReport(seen.rows, seen.formats, seen.notes)


def test_a_module_that_overflows_is_named_with_a_remedy():
    made = report(
        ("activation", "blocks.3.attn.proj", [1.0, 1e6]),
        ("activation", "blocks.3.attn", [1.0, 1e6]),
        ("activation", "", [1e6]),
        ("activation", "lm_head", [2e5]),
        ("gradient", "blocks.0.mlp", [8.0, 0.1]),
    )
    assert made.verdicts["float16"].sentence == (
        "float16 works with scale 2^11; blocks.3.attn.proj overflows (1e+06); use bfloat16 there, or a soft "
        "cap of 50; lm_head overflows (2e+05); use bfloat16 there, or a soft cap of 30."
    )
    assert not made.verdicts["float16"].works
    assert made.verdicts["bfloat16"].works
    assert made.loss_scale() == 2.0**11
    troubled = {(t.module, t.what) for t in made.verdicts["float16"].troubles}
    assert {("blocks.3.attn.proj", "overflow"), ("blocks.3.attn", "overflow"), ("", "overflow")} <= troubled
    policy = made.policy()
    assert (policy.compute, policy.at("lm_head").compute, policy.at("blocks.0").compute) == (
        "float16",
        "float32",
        "float16",
    )


def test_of_many_modules_three_are_named_and_the_rest_counted():
    made = report(*(("activation", f"m{i}", [1e6]) for i in range(6)))
    assert "m0, m1, m2 and 3 more overflow (1e+06)" in made.verdicts["float16"].sentence
    made = report(*(("activation", f"m{i}", [1e6]) for i in range(3)))
    assert "m0, m1, m2 overflow (1e+06)" in made.verdicts["float16"].sentence


def test_beyond_bfloat16_only_float32_is_left():
    assert "use float32 there" in report(("weight", "m", [3.4e38])).verdict


def test_gradients_that_a_scale_saves():
    made = report(("gradient", "quiet", [1e-9] * 50), ("gradient", "loud", [0.1] * 50))
    verdict = made.verdicts["float16"]
    assert verdict.works
    assert (verdict.flushed_before, verdict.flushed_after) == (0.5, 0.0)
    assert [(t.module, t.what) for t in verdict.troubles] == [("quiet", "saved")]
    assert "without it 50.0% of the gradients become 0 (most in quiet), with it 0.0%" in verdict.sentence


def test_gradients_that_no_scale_saves():
    made = report(("gradient", "quiet", [1e-14] * 50), ("gradient", "loud", [1e3] * 50))
    verdict = made.verdicts["float16"]
    assert not verdict.works
    assert verdict.sentence == (
        "float16 loses gradients: no loss scale brings the flushed fraction below 0.001 (50.0% at 2^5, most "
        "in quiet); use bfloat16."
    )
    assert made.verdicts["bfloat16"].sentence == "bfloat16 works without a loss scale."
    assert made.verdicts["float8_e5m2"].works  # each tensor has a scale of its own


def test_one_kind_does_not_hide_the_other():
    """Gradients of a few parameters next to those of many activations."""
    made = report(("activation gradient", "m", [1.0] * 10000), ("gradient", "m", [1e-30]))
    assert made.verdicts["float16"].flushed_before == 1.0


def test_gradients_may_need_a_smaller_scale():
    assert report(("gradient", "m", [1e9])).loss_scale() == 2.0**-15


def test_lost_updates_suggest_float32_weights():
    made = report(("update", "m", [1e-5] * 9 + [1.0]))
    for name in ("float16", "bfloat16"):
        assert made.verdicts[name].lost == 0.9
        assert made.verdicts[name].holds_weights is False
        assert f"keep the weights in float32: 90.0% of the updates are lost in {name}" in made.verdict


@pytest.mark.parametrize(("lost", "holds"), [(9, True), (10, False), (380, False)])
def test_a_format_that_loses_updates_works_only_with_float32_weights(lost, holds):
    gradient = RangeRow(kind="gradient", module="m", elements=1000, amax=0.5, amin=0.5, histogram={-1: 1000})
    update = RangeRow(kind="update", module="m", elements=1000, lost={"float16": lost, "bfloat16": lost})
    made = RangeReport([gradient, update], ["float16", "bfloat16"])
    for name, scale in (("bfloat16", "without a loss scale"), ("float16", "with scale 2^15")):
        verdict = made.verdicts[name]
        assert (verdict.works, verdict.holds_weights) == (True, holds)
        only = f" only with the weights in float32 ({lost / 10}% of the updates are lost in {name}),"
        assert verdict.sentence == f"{name} works{'' if holds else only} {scale}."


def test_without_updates_nothing_is_said_of_the_weights():
    gradient = RangeRow(kind="gradient", module="m", elements=1000, amax=0.5, amin=0.5, histogram={-1: 1000})
    assert RangeReport([gradient], ["bfloat16"]).verdicts["bfloat16"].holds_weights is None


def test_without_gradients_there_is_no_scale():
    made = report(("activation", "m", [1.0]))
    assert made.loss_scale() is None
    assert made.verdicts["float16"].sentence == "float16 holds all measured values (no gradients)."
    assert made.verdicts["float8_e5m2"].sentence == "float8_e5m2 is for gradients, which were not measured."
    zeros = report(("gradient", "m", [0.0, 0.0]))
    assert zeros.loss_scale() is None
    assert zeros.verdicts["float16"].works


def test_8_bits_are_judged_with_a_scale_for_each_tensor():
    spread = np.exp2(np.arange(-40.0, 1.0))
    made = report(("activation", "wide", spread), ("activation", "narrow", [1e-9, 1e-8]))
    verdict = made.verdicts["float8_e4m3fn"]
    assert [t.module for t in verdict.troubles] == ["wide"]
    # Scaled by 2^8 (448 is the largest), all values up to 2^-10 become 0: 23 of 41.
    assert "except in wide: 56.1% still become 0" in verdict.sentence


# --- the report ----------------------------------------------------------------------------------

MADE = (
    ("activation", "fine", [1.0, 2.0]),
    ("activation", "over", [1e6, 2.0]),
    ("gradient", "gone", [1e-9, 1.0]),
    ("gradient", "bad", [np.nan, np.inf, 1.0]),
)


def test_the_table_begins_with_the_worst():
    made = report(*MADE)
    assert [row.module for row in made.by_trouble()][:2] == ["over", "gone"]
    lines = made.table().splitlines()
    assert lines[2].split()[:2] == ["over", "activation"]
    assert "over 50%" in lines[2]
    assert "zero 50%" in lines[3]
    assert any("bad" in line and "non-finite 2" in line for line in lines)
    assert made.table(rows=1).endswith("(3 more rows with less trouble)")
    assert len(made.table(rows=None).splitlines()) == 6
    assert str(made).endswith(made.verdict)


def test_words_are_aligned_to_the_left_and_numbers_to_the_right():
    made = report(("activation", "m", [1.0, 1e6]), ("weight", "longer", [1e-9] * 3), formats=("float16",))
    assert made.table().splitlines() == [
        "module  kind        elements  smallest  largest  float16",
        "------  ----------  --------  --------  -------  ---------",
        "m       activation         2   1.0e+00  1.0e+06  over 50%",
        "longer  weight             3   1.0e-09  1.0e-09  zero 100%",
    ]


def test_weights_that_become_0_are_named():
    sentence = report(("weight", "tiny", [1e-9, 1.0])).verdicts["float16"].sentence
    assert sentence.endswith("; small activations or weights of tiny become 0.")


def test_a_row_without_counts_has_an_empty_cell():
    row = RangeRow(kind="activation", module="m", elements=1, amin=1.0, amax=1.0)
    assert RangeReport([row], ("float16",)).table().splitlines()[2].endswith("1.0e+00")


@pytest.mark.parametrize("name", NAMES)
def test_a_row_without_counts_has_no_trouble(name):
    rows = [
        RangeRow(kind=kind, module="m", elements=1, amin=1.0, amax=1.0)
        for kind in ("activation", "weight", "gradient", "update")
    ]
    verdict = RangeReport(rows, (name,)).verdicts[name]
    assert verdict.works
    assert verdict.troubles == ()
    assert rows[0].to_dict((name,))["formats"][name] == {"overflow": 0, "flushed": 0, "subnormal": 0}


def test_small_and_large_fractions_are_not_rounded_away():
    made = report(("activation", "m", [1e6] + [1.0] * 999))
    assert "over 0.1%" in made.table()
    made = report(("activation", "m", [1e6] + [1.0] * 9999), ("activation", "n", [1e6] * 999 + [1.0]))
    assert "over <0.1%" in made.table()
    assert "over >99%" in made.table()


def test_the_rich_table_has_the_same_rows():
    made = report(*MADE)
    table = made.rich_table()
    assert table.row_count == 4
    assert [column.header for column in table.columns][-4:] == list(NAMES)
    assert [column.justify for column in table.columns] == ["left"] * 2 + ["right"] * 3 + ["left"] * 4


def test_the_json_is_strict_and_complete():
    made = report(*MADE)

    def reject(constant):
        raise AssertionError(constant)

    read = json.loads(made.to_json(), parse_constant=reject)
    assert read == json.loads(json.dumps(made.to_dict()))
    row = next(row for row in read["rows"] if row["module"] == "over")
    assert row["formats"]["float16"] == {"overflow": 0.5, "flushed": 0.0, "subnormal": 0.0}
    assert sum(row["histogram"].values()) == 2
    assert read["verdicts"]["float16"]["loss_scale"] == made.loss_scale("float16")


def test_the_plot_is_a_picture(tmp_path):
    report(*MADE).plot(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    report(("weight", "m", [1e30])).plot(tmp_path / "plot.svg")
    with pytest.raises(
        ValueError, match="plot must be called on a report with at least one value other than 0"
    ):
        report(("weight", "m", [0.0])).plot(tmp_path / "none.png")


def test_the_plot_leaves_room_for_gradients_times_the_loss_scale(tmp_path, monkeypatch):
    figures = []
    savefig = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *a, **k: (figures.append(figure), savefig(figure, *a, **k))
    )
    made = report(("activation", "m", [2.0**30]), ("gradient", "m", [2.0**22]))
    for scale in (5, 10):
        draw(made.rows, ("float16",), scale, tmp_path / "plot.png")
    assert [figure.axes[-1].get_xlim()[1] for figure in figures] == [30 + 3, 22 + 10 + 3]


@pytest.mark.parametrize("formats", [(), "float16", ("float12",)])
def test_formats_are_checked(formats):
    with pytest.raises(ValueError, match="format"):
        checked_formats(formats)


def test_a_format_that_was_not_requested_is_an_error():
    with pytest.raises(ValueError, match="name must be one of float16; got 'bfloat16'"):
        report(*MADE, formats=("half",)).loss_scale("bfloat16")


def test_every_fraction_has_an_action():
    made = report(*MADE, ("update", "m", [1e-9] * 3), ("weight", "w", [1e-9, 1e-10]))
    assert {t.what for t in made.troubles} == {"overflow", "saved", "lost", "flushed"}
    assert all(t.action and math.isfinite(t.fraction) for t in made.troubles)


@pytest.mark.parametrize(
    "statement", ["import stablenum.diagnosis.ranges", "from stablenum.diagnosis.ranges import RangeReport"]
)
def test_table_and_plot_packages_are_imported_only_when_used(statement):
    result = run(f"{statement}; import sys; print(*sys.modules)", ("numpy", "torch", "jax"))
    assert result.returncode == 0, result.stderr
    assert not {"rich", "matplotlib"} & set(result.stdout.split())


@pytest.mark.parametrize(
    ("call", "library"),
    [(lambda made: made.plot("plot.png"), "matplotlib"), (lambda made: made.rich_table(), "rich")],
)
def test_a_missing_library_is_named(call, library, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=f"needs {library}: pip install {library}$"):
        call(report(*MADE))


def test_formats_keep_the_callers_order():
    for formats in itertools.permutations(("bfloat16", "float16")):
        assert tuple(report(*MADE, formats=formats).verdicts) == formats
