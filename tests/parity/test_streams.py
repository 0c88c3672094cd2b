"""The gradients that a stream describes: events, drift and jitter, and streams as text."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from stablenum.commands.compare.builtin.streams import STREAMS
from stablenum.commands.compare.scenario_file import read_scenario_file, to_toml
from stablenum.commands.compare.scenarios import Event, Stream, TensorSpec
from stablenum.commands.compare.scenarios.stream_data import stream_step

F32 = np.float32


def stream(*events: Event, **fields: object) -> Stream:
    return Stream(name="x", steps=20, events=events, **fields)  # type: ignore[arg-type]


def same(one: Stream, other: Stream, step: int) -> bool:
    a, b = stream_step(one, step), stream_step(other, step)
    return all(map(np.array_equal, a.gradients, b.gradients)) and a.loss == b.loss


CLEAN = stream()


@pytest.mark.parametrize("until", [None, 7, "end"])
def test_a_factor_multiplies_one_gradient_for_as_long_as_it_lasts(until: int | str | None) -> None:
    made = stream(Event(step=5, until=until, tensor=1, factor=50.0))  # type: ignore[arg-type]
    last = {None: 5, 7: 7, "end": 19}[until]
    for step in range(20):
        clean, got = stream_step(CLEAN, step), stream_step(made, step)
        factor = F32(50.0 if 5 <= step <= last else 1.0)
        np.testing.assert_array_equal(got.gradients[1], clean.gradients[1] * factor)
        np.testing.assert_array_equal(got.gradients[0], clean.gradients[0])
        assert got.loss == clean.loss


def test_a_factor_of_all_and_of_the_loss() -> None:
    made = stream(Event(step=3, tensor="all", factor=-4.0), Event(step=3, tensor="loss", factor=8.0))
    clean, got = stream_step(CLEAN, 3), stream_step(made, 3)
    for theirs, ours in zip(clean.gradients, got.gradients, strict=True):
        np.testing.assert_array_equal(ours, theirs * F32(-4.0))
    assert isinstance(got.loss, np.float32)
    assert got.loss == clean.loss * F32(8.0)


def test_a_value_in_all_is_in_the_first_element_of_each_or_everywhere() -> None:
    first = stream_step(stream(Event(step=3, tensor="all", value=math.nan)), 3)
    assert [int(np.isnan(g).sum()) for g in first.gradients] == [1, 1, 1]
    assert all(np.isnan(g.reshape(-1)[0]) for g in first.gradients)
    everywhere = stream_step(stream(Event(step=3, tensor="all", value=2.0, everywhere=True)), 3)
    assert all((g == 2.0).all() for g in everywhere.gradients)


def test_factor_0_is_a_late_start() -> None:
    made = stream(Event(step=0, until=9, tensor=0, factor=0.0))
    norms = [float(np.linalg.norm(stream_step(made, step).gradients[0])) for step in range(20)]
    assert norms[:10] == [0.0] * 10
    assert min(norms[10:]) > 0.0


def test_events_happen_in_the_order_listed() -> None:
    put, double = Event(step=3, value=2.0, everywhere=True), Event(step=3, factor=10.0)
    assert (stream_step(stream(put, double), 3).gradients[0] == 20.0).all()
    assert (stream_step(stream(double, put), 3).gradients[0] == 2.0).all()


def test_a_factor_beyond_the_range_gives_inf_and_0_times_inf_gives_nan() -> None:
    huge = stream(Event(step=1, tensor="all", factor=1e300), Event(step=1, tensor="loss", factor=1e300))
    got = stream_step(huge, 1)
    assert all(np.isinf(g).all() for g in got.gradients)
    assert np.isinf(got.loss)
    got = stream_step(stream(Event(step=1, value=math.inf, everywhere=True), Event(step=1, factor=0.0)), 1)
    assert np.isnan(got.gradients[0]).all()


def test_events_of_no_elements_do_nothing() -> None:
    empty = stream(
        Event(step=1, tensor="all", factor=2.0),
        Event(step=1, tensor="all", value=1.0),
        tensors=(TensorSpec(shape=(0, 3)),),
    )
    assert stream_step(empty, 1).gradients[0].shape == (0, 3)
    assert stream_step(stream(Event(step=1, tensor="all", factor=2.0), tensors=()), 1).gradients == []


@pytest.mark.parametrize("drift", [2.0, 0.5])
def test_drift_multiplies_the_gradients_and_not_the_loss(drift: float) -> None:
    made = stream(drift=drift)
    for step in range(20):
        clean, got = stream_step(CLEAN, step), stream_step(made, step)
        for theirs, ours in zip(clean.gradients, got.gradients, strict=True):
            np.testing.assert_array_equal(ours, theirs * F32(drift**step))  # a power of 2: exact
        assert got.loss == clean.loss


def test_jitter_is_one_seeded_log_normal_factor_per_step() -> None:
    made = Stream(name="x", steps=2000, jitter=0.3, tensors=(TensorSpec(shape=(4,)), TensorSpec(shape=(2,))))
    clean = Stream(name="x", steps=2000, tensors=made.tensors)
    logs = []
    for step in range(2000):
        a, b = stream_step(clean, step), stream_step(made, step)
        ratios = np.concatenate([y / x for x, y in zip(a.gradients, b.gradients, strict=True)])
        np.testing.assert_allclose(ratios, ratios[0], rtol=1e-6)
        assert a.loss == b.loss
        logs.append(math.log(ratios[0]))
    assert np.std(logs) == pytest.approx(0.3, rel=0.05)
    assert np.mean(logs) == pytest.approx(0.0, abs=0.02)
    assert same(made, made, 7)
    assert not same(made, Stream(name="x", steps=2000, seed=1, jitter=0.3, tensors=made.tensors), 7)


def test_a_long_drift_stays_finite() -> None:
    made = Stream(name="x", steps=4000, drift=1.02, magnitude=1e-3, jitter=1.0)
    assert all(np.isfinite(g).all() for g in stream_step(made, 3999).gradients)
    faded = Stream(name="x", steps=4000, drift=0.5)
    assert all((g == 0.0).all() for g in stream_step(faded, 3999).gradients)
    for fields in ({"magnitude": 1.0}, {"magnitude": 1e-300}, {"magnitude": 0.0}):
        with pytest.raises(ValueError, match="drift must be such that"):
            Stream(name="x", steps=4000, drift=1.1, **fields)  # type: ignore[arg-type]


def test_streams_as_text_read_back_equal(tmp_path: Path) -> None:
    own = Stream(
        name="own",
        about="Everything at once.",
        drift=1.01,
        jitter=0.25,
        events=(
            Event(step=1, until="end", tensor="all", factor=0.5),
            Event(step=2, until=4, tensor="loss", factor=100.0),
            Event(step=3, tensor=2, value=-math.inf, everywhere=True),
        ),
    )
    streams = [*STREAMS, own]
    file = tmp_path / "all.toml"
    file.write_text(to_toml(streams), encoding="utf-8")
    # NaN is not equal to itself; its text is.
    assert list(map(repr, read_scenario_file(file).scenarios)) == list(map(repr, streams))
