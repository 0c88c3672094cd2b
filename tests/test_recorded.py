"""The recorded streams and the spikes planted in them."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from benchmarks.recorded import FOLDER, NAMES, constant, load, with_spikes

STEPS = 1500


@pytest.mark.parametrize("name", NAMES)
def test_a_stream_is_finite_and_matches_its_files_description(name):
    stream = load(name)
    assert stream.loss.shape == (STEPS,)
    assert stream.norms.shape == (STEPS, len(stream.names))
    assert 6 <= len(stream.names) <= 12
    assert np.isfinite(stream.loss).all()
    assert np.isfinite(stream.norms).all()
    assert (stream.loss > 0).all()
    assert (stream.norms > 0).all()
    path = FOLDER / f"{name}.json"
    assert path.stat().st_size < 300_000
    document = json.loads(path.read_text(encoding="utf-8"))
    np.testing.assert_allclose(stream.norm, document["norm"], rtol=1e-5)
    assert {"torch", "numpy", "scikit-learn", "python"} == set(document["versions"])
    assert {"model", "optimizer", "seed", "about"} <= set(document)


@pytest.mark.parametrize("name", NAMES)
def test_a_stream_comes_from_training_that_learns(name):
    loss = load(name).loss
    assert np.median(loss[-200:]) < 0.5 * np.median(loss[:20])


def test_each_stream_has_its_intended_feature():
    norm = load("mlp-edge").norm
    usual = np.array([np.median(norm[t - 64 : t]) for t in range(64, STEPS)])
    assert (norm[64:] > 4 * usual).sum() >= 5  # spikes of its own
    norm = load("mlp-sgd").norm
    usual = np.array([np.median(norm[t - 64 : t]) for t in range(64, STEPS)])
    assert (norm[64:] < 4 * usual).all()
    norm = load("pixels-schedule").norm
    assert np.median(norm[1100:1300]) < 0.75 * np.median(norm[800:1000])  # a lower level after the drop


def test_spikes_are_where_the_labels_say_and_nowhere_else():
    stream = load("mlp-sgd")
    spiked = with_spikes(stream, seed=0)
    assert spiked.labels.dtype == bool
    assert spiked.labels.shape == (STEPS,)
    assert np.flatnonzero(spiked.labels).tolist() == [p.step for p in spiked.planted]
    assert len(spiked.planted) == 12 + 2 * 6 + 4
    rest = ~spiked.labels
    np.testing.assert_array_equal(spiked.stream.loss[rest], stream.loss[rest])
    np.testing.assert_array_equal(spiked.stream.norms[rest], stream.norms[rest])
    for p in spiked.planted:
        if p.kind == "nonfinite":
            continue
        assert spiked.stream.loss[p.step] == stream.loss[p.step] * p.loss_factor
        assert spiked.stream.norm[p.step] == pytest.approx(stream.norm[p.step] * p.norm_factor)
        assert 5.0 <= max(p.norm_factor, p.loss_factor) <= 100.0
    bad = [p for p in spiked.planted if p.kind == "nonfinite"]
    assert len(bad) == 4
    for p in bad:
        for factor, got in (
            (p.norm_factor, spiked.stream.norm[p.step]),
            (p.loss_factor, spiked.stream.loss[p.step]),
        ):
            assert math.isfinite(got) == math.isfinite(factor)
            assert math.isnan(got) == math.isnan(factor)


def test_a_masked_spike_is_20_ten_steps_after_one_of_100():
    spiked = with_spikes(load("mlp-sgd"), seed=3, singles=0, pairs=5, nonfinite=0, on=("norm",))
    first, second = spiked.planted[::2], spiked.planted[1::2]
    assert len(first) == 5
    for a, b in zip(first, second, strict=True):
        assert (a.kind, a.norm_factor, a.loss_factor) == ("masking", 100.0, 1.0)
        assert (b.kind, b.norm_factor, b.loss_factor) == ("masked", 20.0, 1.0)
        assert b.step - a.step == 10


@pytest.mark.parametrize("seed", range(20))
def test_spikes_keep_their_distance(seed):
    spiked = with_spikes(constant(), seed=seed, start=200, apart=30)
    steps = [p.step for p in spiked.planted if p.kind != "masked"]
    assert steps[0] >= 200
    assert spiked.planted[-1].step < STEPS - 30
    assert (np.diff(steps) > 30).all()


def test_a_seed_gives_the_same_spikes_and_another_seed_gives_others():
    stream = load("transformer-adamw")
    assert repr(with_spikes(stream, seed=1).planted) == repr(with_spikes(stream, seed=1).planted)
    assert with_spikes(stream, seed=1).planted != with_spikes(stream, seed=2).planted


def test_a_constant_stream_has_no_spread_and_zero_spikes_change_nothing():
    stream = constant(steps=300, loss=2.0, norm=0.5)
    spiked = with_spikes(stream, seed=0, singles=0, pairs=0, nonfinite=0)
    assert not spiked.labels.any()
    assert (spiked.stream.loss == 2.0).all()
    assert (spiked.stream.norm == 0.5).all()


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="name must be one of mlp-edge"):
        load("nonesuch")
    with pytest.raises(ValueError, match="the stream has only 300 in all"):
        with_spikes(constant(steps=300), seed=0)
    for on in ((), ("norms",)):
        with pytest.raises(ValueError, match="on must be some of"):
            with_spikes(constant(), seed=0, on=on)
