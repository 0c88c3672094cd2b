"""A benchmark without a figure that can be stood for ends with an error and writes nothing."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace

import jax
import numpy as np
import pytest
import torch
from rich.console import Console

import benchmarks.__main__ as command
from benchmarks.steps import bandwidth, errors, jax_variants, measure, run, torch_variants, worker
from benchmarks.timing import Times, uncertainty
from stablenum_torch.deciding import HostGuard
from tests.benchmarks.small import JAX_ROW, TORCH_ROW

QUIET = Console(quiet=True)


@pytest.fixture
def results(monkeypatch, tmp_path):
    """An empty folder in place of that of the results, and a command line that asks for the steps."""
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    monkeypatch.setattr(command, "Console", lambda: QUIET)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "steps"])
    monkeypatch.setattr(run, "PAUSE_S", 0.0)
    return tmp_path


def steps_fail(results) -> str:
    """What the command says when it ends with an error."""
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code not in (0, None)
    assert list(results.iterdir()) == []
    return str(ended.value.code)


# --- a missing peer --------------------------------------------------------------------------


def test_a_missing_peer_is_named_with_the_way_to_install_it(monkeypatch, results):
    monkeypatch.setattr(run, "PEERS", ("torch", "a_peer_that_nobody_has"))
    monkeypatch.setattr(run, "in_own_process", lambda *_, **__: pytest.fail("measured without a peer"))
    said = steps_fail(results)
    assert "a_peer_that_nobody_has" in said
    assert "pip install a_peer_that_nobody_has" in said
    assert "torch," not in said, "what is installed is not missing"


def test_all_peers_are_required():
    assert {"torch", "jax", "optax", "accelerate", "flax", "jmp"} <= set(run.PEERS)
    errors.require(run.PEERS)


# --- a wrong result --------------------------------------------------------------------------


def wrong(monkeypatch, name, change):
    """The error of measuring with one variant changed."""
    build = torch_variants.BUILD[name]

    def changed(problem):
        variant = build(problem)
        change(variant)
        return variant

    monkeypatch.setitem(torch_variants.BUILD, name, changed)
    with pytest.raises(errors.WrongResultError, match=name) as found:
        measure.measure(TORCH_ROW)
    return str(found.value)


@pytest.mark.parametrize("name", ["clip", "idle"])
def test_parameters_off_the_reference(monkeypatch, name):
    def change(variant):
        inner = variant.step

        def step():
            inner()
            with torch.no_grad():
                variant.params[-1].mul_(1.001).add_(1e-3)

        variant.step = step

    assert "float64 reference" in wrong(monkeypatch, name, change)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_clip_that_does_not_clip_is_seen(monkeypatch, optimizer):
    monkeypatch.setitem(torch_variants.BUILD, "clip", torch_variants.BUILD["bare"])
    row = replace(TORCH_ROW, optimizer=optimizer)
    with pytest.raises(errors.WrongResultError, match=r"'clip' are .* from the"):
        measure.measure(row)


def test_a_step_that_ought_to_be_skipped(monkeypatch):
    def change(variant):
        variant.skips = True

    assert "did not skip" in wrong(monkeypatch, "clip", change)


def test_a_guard_that_refused_a_step(monkeypatch):
    def change(variant):
        inner = variant.step

        def step():
            if variant.steps == 5:
                variant.params[0].grad[0] = float("nan")
            inner()

        variant.step = step

    assert "ought to have applied all" in wrong(monkeypatch, "fold", change)


@pytest.mark.parametrize("name", ["idle", "fold", "all"])
def test_gradients_that_come_multiplied_by_another_number(monkeypatch, name):
    """Neither Adam nor a clip lets it be seen in the parameters."""

    def change(variant):
        inner = variant.step

        def step():
            for p in variant.params:
                p.grad.mul_(2.0)
            inner()

        variant.step = step

    assert "ought to have applied all" in wrong(monkeypatch, name, change)


def test_a_state_that_is_written_back_once_only(monkeypatch):
    write, written = HostGuard.write, []

    def once(self, *given, **more):
        if not written:
            write(self, *given, **more)
        written.append(self)

    monkeypatch.setattr(HostGuard, "write", once)
    row = replace(TORCH_ROW, variants=("bare", "idle"))
    with pytest.raises(errors.WrongResultError, match="idle: ought to have applied all"):
        measure.measure(row)


@pytest.mark.parametrize(("name", "factor"), [("idle", 2.0), ("wrapper", 2.0), ("fold", 0.5)])
def test_the_same_of_jax(monkeypatch, name, factor):
    make = jax_variants.MAKE[name]

    def changed(problem):
        variant = make(problem)
        step_on = variant.step_on
        variant.step_on = lambda grads: step_on(jax.tree.map(lambda g: g * factor, grads))
        return variant

    monkeypatch.setitem(jax_variants.MAKE, name, changed)
    with pytest.raises(errors.WrongResultError, match=f"{name}: ought to have applied all"):
        measure.measure(replace(JAX_ROW, variants=("bare", name)))


def test_a_skip_that_leaves_infinite_moments(monkeypatch):
    """A peer that chooses between old and new parameters, and forgets the optimizer's state."""
    import jmp

    honest = jmp.select_tree
    monkeypatch.setattr(jmp, "select_tree", lambda finite, new, old: (honest(finite, new[0], old[0]), new[1]))
    with pytest.raises(errors.WrongResultError, match="'jmp' did not skip"):
        measure.measure(replace(JAX_ROW, variants=("bare", "jmp")))


def test_elements_that_the_reference_does_not_sample(monkeypatch):
    """All elements are compared between the variants."""
    row = replace(TORCH_ROW, tensors=1, shape=(1000,), variants=("bare", "idle"))
    build = torch_variants.BUILD["idle"]

    def changed(problem):
        variant = build(problem)
        with torch.no_grad():
            variant.params[0][1:10] += 1.0  # between the sampled ones
        return variant

    monkeypatch.setitem(torch_variants.BUILD, "idle", changed)
    with pytest.raises(errors.WrongResultError, match="apart"):
        measure.measure(row)


def test_a_wrong_result_stops_the_command(monkeypatch, results):
    def measured(part, **_):
        raise errors.WrongResultError(f"{part} is wrong")

    monkeypatch.setattr(run, "in_own_process", measured)
    assert "is wrong" in steps_fail(results)


def test_what_is_no_number_is_not_written(monkeypatch, results):
    (results / "cpu.json").write_text("of before")
    with pytest.raises(ValueError, match="JSON compliant"):
        command._save(QUIET, "cpu.json", {"median_ms": float("nan")})
    assert [file.read_text() for file in results.iterdir()] == ["of before"]


# --- a spread beyond its bound ---------------------------------------------------------------


def test_the_uncertainty_is_held_against_the_bound():
    row = replace(TORCH_ROW, bound=0.1)
    bare, moody = Times([1.0, 1.01, 0.99, 1.0] * 8), Times([2.0, 2.02, 1.98, 2.0] * 8)
    measure.check_spread(row, {"bare": bare, "clip": moody})
    restless = Times([1.0, 1.4, 1.0, 1.5] * 8)
    with pytest.raises(errors.NoisyError, match=r"'clip': '\d+\.\d%'}, beyond 10%"):
        measure.check_spread(row, {"bare": bare, "clip": restless})
    with pytest.raises(errors.NoisyError):
        measure.check_spread(row, {"bare": bare, "clip": Times([1.0, float("nan"), 1.0, 1.0] * 8)})


def test_a_mood_that_both_share_is_no_uncertainty():
    mood = [1.0 + (i // 8) for i in range(32)]
    times = {"bare": Times(mood), "clip": Times([2 * m for m in mood])}
    assert times["clip"].spread > 0.5
    measure.check_spread(replace(TORCH_ROW, bound=0.01), times)


def test_the_uncertainty_of_a_median_covers_it():
    """In 95 of 100 samples the interval holds the true median, whatever the distribution."""
    draw, held = np.random.default_rng(4), 0
    for _ in range(1000):
        sample = np.sort(draw.lognormal(0.0, 1.0, 41))
        half = uncertainty(sample.tolist()) * np.median(sample)
        low, high = sample[14], sample[26]  # the order statistics of 41, from a table
        assert half == pytest.approx((high - low) / 2)
        held += low <= 1.0 <= high
    assert held >= 930
    assert uncertainty([1.0] * 5) == math.inf


def test_every_measured_row_is_held_against_its_bound():
    with pytest.raises(errors.NoisyError, match="tiny"):
        measure.measure(replace(TORCH_ROW, variants=("bare", "scaler"), bound=-1.0))
    with pytest.raises(errors.NoisyError, match="bandwidth"):
        bandwidth.bandwidth(elements=1000, rounds=3, bound=-1.0)


def test_noise_is_given_more_chances_and_more_rounds(monkeypatch, results):
    attempts = []

    def measured(part, *, attempt, **_):
        attempts.append(attempt)
        raise errors.NoisyError(f"{part} was too noisy")

    monkeypatch.setattr(run, "in_own_process", measured)
    assert "too noisy" in steps_fail(results)
    assert attempts == [1, 2, 3, 3, 3]


def test_a_later_attempt_may_succeed(monkeypatch):
    monkeypatch.setattr(run, "PAUSE_S", 0.0)

    def measured(part, *, attempt, **_):
        if attempt == 1:
            raise errors.NoisyError("noisy")
        return {"part": part, "attempt": attempt}

    assert run._with_patience(QUIET, measured, "bandwidth", "cpu") == {"part": "bandwidth", "attempt": 2}


# --- from process to process -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"), [(errors.NoisyError, 3), (errors.WrongResultError, 1), (errors.MissingPeerError, 1)]
)
def test_a_worker_says_by_its_exit_code_why_it_has_no_result(monkeypatch, tmp_path, capsys, error, code):
    def fail(*_, **__):
        raise error("the reason")

    monkeypatch.setattr(measure, "measure", fail)
    out = tmp_path / "out.json"
    with pytest.raises(SystemExit) as ended:
        worker.main(["torch adamw fused 10k/10 float32", str(out)])
    assert ended.value.code == code
    assert capsys.readouterr().err.strip() == "the reason"
    assert not out.exists()


@pytest.mark.parametrize(
    ("code", "error"), [(3, errors.NoisyError), (1, errors.BenchmarkError), (-9, errors.BenchmarkError)]
)
def test_the_exit_code_becomes_the_error_again(monkeypatch, code, error):
    def ended(*_, **__):
        return run.subprocess.CompletedProcess([], code, "", "a warning\nthe reason")

    monkeypatch.setattr(run.subprocess, "run", ended)
    with pytest.raises(error, match="the reason") as found:
        run.in_own_process("bandwidth", device="cpu", attempt=1)
    assert isinstance(found.value, errors.NoisyError) == (code == 3)


def test_a_result_comes_back_from_its_process(monkeypatch, tmp_path):
    monkeypatch.setattr(bandwidth, "bandwidth", lambda **given: {"device": given["device"]})
    out = tmp_path / "out.json"
    worker.main(["bandwidth", str(out)])
    assert json.loads(out.read_text(encoding="utf-8")) == {"device": "cpu"}


def test_the_rows_asked_for_have_to_exist():
    with pytest.raises(errors.BenchmarkError, match="--only must be part of a row's name"):
        run.measure_all(QUIET, only="no such row")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_cuda_device_the_gpu_part_says_so(monkeypatch, results):
    monkeypatch.setattr(sys, "argv", ["benchmarks", "gpu"])
    assert "no CUDA device" in steps_fail(results)
