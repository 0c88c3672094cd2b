"""Small rows, really measured: the code of every device, framework and variant runs."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import optax
import pytest
import torch

from benchmarks.repeats import quotient_within
from benchmarks.steps import jax_variants, measure, summary, torch_variants
from benchmarks.steps.bandwidth import bandwidth
from benchmarks.steps.compiling import compiling
from benchmarks.steps.reference import FACTORS, LEARNING_RATE, MOMENTUM, WEIGHT_DECAY, expected
from benchmarks.steps.rows import LABELS, OURS, ROWS, on_device, row_named
from benchmarks.steps.transformer import Sizes, transformer
from benchmarks.timing import Times, interleaved
from tests.benchmarks.small import JAX_ROW, TORCH_ROW, kinds, measured
from tests.selection import REPEATS


@pytest.fixture(scope="module")
def torch_row():
    return measured(TORCH_ROW)


@pytest.fixture(scope="module")
def jax_row():
    return measured(JAX_ROW)


def test_a_torch_row_has_a_figure_for_everything(torch_row):
    assert json.loads(json.dumps(torch_row)) == torch_row
    assert list(torch_row["variants"]) == list(TORCH_ROW.variants)
    counts = {name: (v["gradient_reads"], v["gradient_writes"]) for name, v in torch_row["variants"].items()}
    # The peers' counts are those of the documentation's table; ours are those of the design.
    assert counts["bare"] == (1, 0)
    assert counts["clip"] == (3, 1)
    assert counts["scaler"] == (4, 2)
    assert counts["idle"] == (2, 0)
    assert counts["fold"] == counts["all"] == (2, 1)
    waits = {name: v["host_waits"] for name, v in torch_row["variants"].items()}
    assert waits["isfinite"] == TORCH_ROW.tensors
    assert [waits[name] for name in ("bare", "clip", "scaler", "idle", "fold")] == [0] * 5
    assert waits["all"] > 0, "reading the metrics waits"
    for v in torch_row["variants"].values():
        assert v["median_ms"] > 0
        assert v["operations"] > 0
        assert v["peak_bytes"] > 0
        assert v["distance_from_reference"] < 1e-3


def test_a_jax_row_has_a_figure_for_everything(jax_row):
    assert json.loads(json.dumps(jax_row)) == jax_row
    assert list(jax_row["variants"]) == list(JAX_ROW.variants)
    for name, v in jax_row["variants"].items():
        assert v["median_ms"] > 0
        assert v["compile_s"] > 0
        assert v["operations"] > 0
        assert v["gradient_reads"] >= (1 if name == "bare" else 2)
        assert v["host_waits"] == (1 if name == "all" else 0)
    assert jax_row["variants"]["apply_if_finite"]["ratio_to_peer"] == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("row", kinds(TORCH_ROW) + kinds(JAX_ROW), ids=lambda row: row.name)
def test_every_kind_of_row_agrees_with_the_reference(row):
    """Measuring raises if a variant does not agree."""
    found = measured(replace(row, rounds=4))
    assert set(found["variants"]) == set(row.variants)


def times(**samples):
    return {name: Times(list(values)) for name, values in samples.items()}


def test_a_ratio_is_the_median_of_its_rounds_and_the_mean_of_processes():
    one = times(bare=[1, 2, 1, 1], scaler=[3, 4, 3, 3], fold=[2, 3, 2, 2])
    other = times(bare=[1, 1, 1, 1], scaler=[4, 4, 4, 4], fold=[2.5, 2.5, 9.0, 2.5])
    row = replace(TORCH_ROW, variants=tuple(one))
    figures = summary.figures_of(row, [one])
    assert figures["fold"]["ratio_to_bare"] == 2.0
    assert figures["fold"]["extra_ms"] == 1.0
    assert figures["fold"]["uncertainty"] == math.inf, "one process knows nothing of the others"
    assert "extra_over_peers" not in figures["fold"]
    both = summary.figures_of(row, [one, other])["fold"]
    assert both["ratio_to_bare"] == 2.25
    assert both["extra_ms"] == 1.25
    # Two values 0.5 apart: t = 12.706, and s / sqrt(2) is half their distance.
    assert both["uncertainty"] == pytest.approx(12.706 * 0.25 / 2.25, abs=1e-4)
    assert both["median_ms"] == 2.5
    assert both["ratio_to_peer"] == pytest.approx((2 / 3 + 2.5 / 4) / 2, abs=1e-4)


def test_the_overhead_is_compared_with_that_of_the_peer():
    """A quotient of means, and its interval from the deviation of each process."""
    processes = [times(bare=[1] * 4, scaler=[1 + q] * 4, fold=[1 + e] * 4) for e, q in EXTRAS]
    row = replace(TORCH_ROW, variants=("bare", "scaler", "fold"))
    figures = summary.figures_of(row, processes)
    assert figures["fold"]["extra_over_peers"] == pytest.approx(0.5)
    off = np.array([e - 0.5 * q for e, q in EXTRAS])
    within = 3.182 * off.std(ddof=1) / 2 / np.mean([q for _, q in EXTRAS])
    assert figures["fold"]["extra_over_peers_within"] == pytest.approx(within, abs=1e-4)
    assert (figures["scaler"]["extra_over_peers"], figures["scaler"]["extra_over_peers_within"]) == (1, 0)


EXTRAS = ((1.0, 2.1), (1.1, 2.0), (0.9, 1.9), (1.0, 2.0))


@pytest.mark.parametrize(
    "extras",
    [
        [(1.0, 0.0)] * 4,
        [(1.0, -1.0)] * 4,
        [(1.0, 1.0), (1.0, 0.1), (1.0, -0.5), (1.0, 0.2)],
        [(1.0, 2.0), (0.0, 2.1), (1.5, 2.0), (0.2, 1.9)],
    ],
    ids=["costs nothing", "costs less than nothing", "not told from nothing", "ours is not known"],
)
def test_an_uncertain_share_is_left_out(extras):
    processes = [times(bare=[2] * 4, scaler=[2 + q] * 4, fold=[2 + e] * 4) for e, q in extras]
    figures = summary.figures_of(replace(TORCH_ROW, variants=("bare", "scaler", "fold")), processes)
    assert "extra_over_peers" not in figures["fold"]


def test_the_interval_of_a_quotient_contains_the_true_value():
    """It does so in about 95 of 100 experiments, even if numerator and denominator are correlated."""
    draw, held = np.random.default_rng(0), 0
    for _ in range(1000):
        below = draw.normal(1.0, 0.15, 6)
        above = 0.4 * below + draw.normal(0.0, 0.05, 6)
        found = quotient_within(above.tolist(), below.tolist())
        held += found is not None and abs(found[0] - 0.4) <= found[1]
    assert held == pytest.approx(950, abs=25)


def test_each_process_measures_in_its_own_order():
    row = replace(TORCH_ROW, variants=tuple("abcdefgh"))
    orders = [row.in_turn(turn) for turn in range(40)]
    assert orders == [row.in_turn(turn) for turn in range(40)]
    assert all(sorted(order) == sorted(row.variants) for order in orders)
    for name in row.variants:
        places = {order.index(name) for order in orders}
        assert len(places) >= 7, "each variant is early in some and late in others"


@pytest.mark.parametrize(
    "row", [pytest.param(TORCH_ROW, id="torch"), pytest.param(JAX_ROW, id="jax", marks=REPEATS)]
)
def test_later_processes_build_variants_in_their_own_order_and_skip_the_counts(monkeypatch, row):
    made, seeds = [], []
    module = torch_variants if row.framework == "torch" else jax_variants
    makers = "BUILD" if row.framework == "torch" else "MAKE"
    for name, make in getattr(module, makers).items():
        monkeypatch.setitem(
            getattr(module, makers), name, lambda p, make=make, name=name: made.append(name) or make(p)
        )
    monkeypatch.setattr(
        measure, "interleaved", lambda *a, seed, **more: seeds.append(seed) or interleaved(*a, **more)
    )
    row = replace(row, variants=row.variants[:3], rounds=2)
    first, later = measure.measure(row, turn=0), measure.measure(row, turn=1)
    assert made == [*row.in_turn(0), *row.in_turn(1)]
    assert seeds == [0, 1]
    assert ("counts" in first, "counts" in later) == (True, False)
    later["distances"]["clip" if row.framework == "torch" else "apply_if_finite"] = 0.5
    result = summary.result_of(row, [first, later])
    assert result["processes"] == 2
    far = result["variants"]["clip" if row.framework == "torch" else "apply_if_finite"]
    assert far["distance_from_reference"] == 0.5, "the farthest"
    assert far["operations"] > 0


# --- the reference ---------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("clipped", [True, False])
def test_the_reference_is_torchs_optimizer_in_float64(optimizer, clipped):
    draw = np.random.default_rng(0)
    start, gradient = draw.standard_normal(20) * 1e-3, draw.standard_normal(20)
    p = torch.nn.Parameter(torch.tensor(start))
    lr = LEARNING_RATE[optimizer]
    opt = (
        torch.optim.SGD([p], lr=lr, momentum=MOMENTUM)
        if optimizer == "sgd"
        else torch.optim.AdamW([p], lr=lr, weight_decay=WEIGHT_DECAY)
    )
    norm = float(np.linalg.norm(gradient))
    for k in range(9):
        p.grad = torch.tensor(gradient) * FACTORS[k % 4]
        if clipped:
            torch.nn.utils.clip_grad_norm_([p], 0.1 * norm)
        opt.step()
    row = replace(TORCH_ROW, optimizer=optimizer)
    wanted = expected(row, start, gradient, norm=norm, steps=9, clipped=clipped)
    np.testing.assert_allclose(p.detach().numpy(), wanted, rtol=1e-5)


def test_the_reference_is_optaxs_adamw():
    params = np.array([1e-3, -2e-3, 5e-4], np.float32)
    gradient = np.array([0.5, -1.0, 2.0], np.float32)
    tx = optax.adamw(LEARNING_RATE["adamw"], weight_decay=WEIGHT_DECAY)
    p, state = params, tx.init(params)
    for k in range(5):
        updates, state = tx.update(gradient * FACTORS[k % 4], state, p)
        p = optax.apply_updates(p, updates)
    wanted = expected(JAX_ROW, params.astype(float), gradient.astype(float), norm=1.0, steps=5, clipped=False)
    np.testing.assert_allclose(p, wanted, rtol=1e-4)


# --- the other parts -------------------------------------------------------------------------


def test_bandwidth_counts_both_directions_of_a_copy():
    found = bandwidth(elements=2**16, rounds=5, timer=lambda step: (step(), 2.0)[1])
    size = 2**16 * 4
    assert found["copy_gb_s"] == pytest.approx(2 * size / 2e-3 / 1e9, rel=0.05)
    assert found["read_gb_s"] == pytest.approx(size / 2e-3 / 1e9, rel=0.05)


def test_a_small_transformer_on_a_cpu():
    sizes = Sizes(layers=1, width=16, heads=2, vocabulary=32, length=8, batch=2, rounds=3)
    found = transformer(sizes, device="cpu", bound=1e9)
    assert set(found["variants"]) == {"bare", "clip", "guarded"}
    assert found["distance"] < 1e-3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own optimizers warn about themselves when compiled
def test_graph_breaks_are_counted():
    fused, foreach = compiling(2, seconds=False)
    assert (fused["kernel"], foreach["kernel"]) == ("fused", "foreach")
    assert set(fused["variants"]) == set(TORCH_ROW.variants)
    assert fused["variants"]["all"]["graph_breaks"] > fused["variants"]["bare"]["graph_breaks"]


def test_grad_scaler_is_left_out_where_it_cannot_run():
    half = replace(TORCH_ROW, dtype="bfloat16")
    left = on_device(half, "cuda").variants
    assert set(half.variants) - set(left) == {"scaler"}
    timed = times(**dict.fromkeys(left, (1.0, 2.0, 1.0)))
    figures = summary.figures_of(replace(half, variants=left), [timed])
    assert not any("extra_over_peers" in v for v in figures.values())
    for row, device in ((half, "cpu"), (TORCH_ROW, "cuda"), (replace(JAX_ROW, dtype="bfloat16"), "cuda")):
        assert on_device(row, device) is row


def test_rows_have_unique_names_and_the_sizes_in_them():
    assert len({row.name for row in ROWS}) == len(ROWS)
    says = {"10k": 1e4, "1M": 1e6, "38M": 38e6, "150M": 150e6}
    for row in ROWS:
        assert row.parameters == pytest.approx(says[row.size], rel=0.01)
        assert row.variants[0] == "bare"
        assert summary.PEER[row.framework] in row.variants
        assert set(row.variants) <= set(LABELS)
        assert any(name in row.variants for name in OURS)
        assert row_named(row.name) is row
    with pytest.raises(ValueError, match="row must be one of"):
        row_named("torch")
