"""A benchmark without a trustworthy figure ends with an error and writes nothing."""

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
from benchmarks import repeats
from benchmarks.steps import (
    bandwidth,
    errors,
    jax_variants,
    keeping,
    measure,
    run,
    summary,
    torch_variants,
    worker,
)
from stablenum_torch._devices.host_decide import HostGuard
from tests.benchmarks.small import JAX_ROW, TORCH_ROW
from tests.selection import REPEATS, slow_unless

QUIET = Console(quiet=True)


@pytest.fixture
def results(monkeypatch, tmp_path):
    """An empty folder in place of the results folder, and a command line that selects the steps."""
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    monkeypatch.setattr(command, "Console", lambda: QUIET)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "steps"])
    monkeypatch.setattr(run, "PAUSE_S", 0.0)
    monkeypatch.setattr(repeats, "PAUSE_S", 0.0)
    return tmp_path


def steps_fail(results) -> str:
    """The message with which the command ends in an error."""
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code not in (0, None)
    assert list(results.glob("*.json")) == []
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
    """The error raised when one variant is changed."""
    build = torch_variants.BUILD[name]

    def changed(problem):
        variant = build(problem)
        change(variant)
        return variant

    monkeypatch.setitem(torch_variants.BUILD, name, changed)
    with pytest.raises(errors.WrongResultError, match=name) as found:
        measure.measure(TORCH_ROW)
    return str(found.value)


@pytest.mark.parametrize("name", ["idle", pytest.param("clip", marks=REPEATS)])
def test_parameters_that_differ_from_the_reference_are_detected(monkeypatch, name):
    def change(variant):
        inner = variant.step

        def step():
            inner()
            with torch.no_grad():
                variant.params[-1].mul_(1.001).add_(1e-3)

        variant.step = step

    assert "float64 reference" in wrong(monkeypatch, name, change)


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("sgd", marks=REPEATS)])
def test_a_clip_that_does_not_clip_is_detected(monkeypatch, optimizer):
    monkeypatch.setitem(torch_variants.BUILD, "clip", torch_variants.BUILD["bare"])
    row = replace(TORCH_ROW, optimizer=optimizer)
    with pytest.raises(errors.WrongResultError, match=r"'clip' differ from the"):
        measure.measure(row)


def test_a_bad_step_that_is_not_skipped_is_detected(monkeypatch):
    def change(variant):
        variant.skips = True

    assert "did not skip" in wrong(monkeypatch, "clip", change)


def test_a_guard_that_skipped_a_step_is_detected(monkeypatch):
    def change(variant):
        inner = variant.step

        def step():
            if variant.steps == 5:
                variant.params[0].grad[0] = float("nan")
            inner()

        variant.step = step

    assert "expected all" in wrong(monkeypatch, "fold", change)


@pytest.mark.parametrize("name", ["fold", *(pytest.param(n, marks=REPEATS) for n in ("idle", "all"))])
def test_gradients_multiplied_by_another_number_are_detected(monkeypatch, name):
    """With Adam or a clip, the wrong multiplier does not show up in the parameters."""

    def change(variant):
        inner = variant.step

        def step():
            for p in variant.params:
                p.grad.mul_(2.0)
            inner()

        variant.step = step

    assert "expected all" in wrong(monkeypatch, name, change)


def test_a_state_that_is_written_back_only_once_is_detected(monkeypatch):
    write, written = HostGuard.write, []

    def once(self, *given, **more):
        if not written:
            write(self, *given, **more)
        written.append(self)

    monkeypatch.setattr(HostGuard, "write", once)
    row = replace(TORCH_ROW, variants=("bare", "idle"))
    with pytest.raises(errors.WrongResultError, match="idle: expected all"):
        measure.measure(row)


@pytest.mark.parametrize(
    ("name", "factor"),
    slow_unless(lambda name, _: name == "fold", [("idle", 2.0), ("wrapper", 2.0), ("fold", 0.5)]),
)
def test_gradients_multiplied_by_another_number_are_detected_in_jax(monkeypatch, name, factor):
    make = jax_variants.MAKE[name]

    def changed(problem):
        variant = make(problem)
        step_on = variant.step_on
        variant.step_on = lambda grads: step_on(jax.tree.map(lambda g: g * factor, grads))
        return variant

    monkeypatch.setitem(jax_variants.MAKE, name, changed)
    with pytest.raises(errors.WrongResultError, match=f"{name}: expected all"):
        measure.measure(replace(JAX_ROW, variants=("bare", name)))


def test_a_skip_that_leaves_infinite_moments_is_detected(monkeypatch):
    """A peer that chooses between old and new parameters, and forgets the optimizer's state."""
    import jmp

    honest = jmp.select_tree
    monkeypatch.setattr(jmp, "select_tree", lambda finite, new, old: (honest(finite, new[0], old[0]), new[1]))
    with pytest.raises(errors.WrongResultError, match="'jmp' did not skip"):
        measure.measure(replace(JAX_ROW, variants=("bare", "jmp")))


def test_differences_between_the_sampled_elements_are_detected(monkeypatch):
    """All elements are compared between the variants."""
    row = replace(TORCH_ROW, tensors=1, shape=(1000,), variants=("bare", "idle"))
    build = torch_variants.BUILD["idle"]

    def changed(problem):
        variant = build(problem)
        with torch.no_grad():
            variant.params[0][1:10] += 1.0  # between the sampled elements
        return variant

    monkeypatch.setitem(torch_variants.BUILD, "idle", changed)
    with pytest.raises(errors.WrongResultError, match="differ by"):
        measure.measure(row)


def test_a_wrong_result_stops_the_command(monkeypatch, results):
    def measured(part, **_):
        raise errors.WrongResultError(f"{part} is wrong")

    monkeypatch.setattr(run, "in_own_process", measured)
    assert "is wrong" in steps_fail(results)


def test_nan_is_not_written(monkeypatch, results):
    (results / "cpu.json").write_text("of before")
    with pytest.raises(ValueError, match="JSON compliant"):
        command._save(QUIET, "cpu.json", {"median_ms": float("nan")})
    assert [file.read_text() for file in results.iterdir()] == ["of before"]


# --- an uncertain figure --------------------------------------------------


def part(*ratios):
    """The result of a process whose rounds have these ratios to the bare step."""
    bare = [
        1.0 + 0.5 * (i % 3) for i in range(len(ratios))
    ]  # variations of the machine that both variants share
    clip = [ratio * mood for ratio, mood in zip(ratios, bare, strict=True)]
    return {"samples": {"bare": bare, "clip": clip}, "distances": {"bare": 0.0, "clip": 0.0}}


def test_the_uncertainty_is_compared_with_the_bound():

    def said(*parts):
        return repeats.restless("a row", repeats.timed(parts), 0.05)

    close = [part(2.0, 2.0, 2.0), part(2.0, 9.0, 2.02), part(1.98, 1.98, 0.1)]
    assert said(*close) == "", "a mood that both share, or a single round, is no uncertainty"
    assert "'clip': " in said(part(2.0, 2.0), part(2.3, 2.3), part(1.9, 1.9))
    assert "above 5%" in said(close[0]), "one process knows nothing of the others"
    assert said(*close, part(math.nan, math.nan))


def test_the_interval_is_the_student_t_interval():
    """The interval contains the true mean in 95 of 100 experiments, however few processes there are."""
    draw = np.random.default_rng(4)
    for n in (2, 3, 5, 12):
        held = 0
        for values in draw.normal(1.5, 0.1, (2000, n)):
            mean, known = repeats.known_within(values.tolist())
            held += abs(mean - 1.5) <= known
        assert held == pytest.approx(1900, abs=45)  # a little more than four standard deviations


def test_the_quantiles_are_those_of_the_student_t_distribution():
    import mpmath

    for freedom, t in enumerate(repeats._T, start=1):
        within = 1 - mpmath.betainc(freedom / 2, 0.5, 0, freedom / (freedom + t * t), regularized=True)
        assert float(within) == pytest.approx(0.95, abs=1e-4)
    assert len(repeats._T) == repeats.MOST - 1


def test_processes_are_added_until_the_figure_is_known(monkeypatch):
    monkeypatch.setattr(repeats, "PAUSE_S", 0.0)
    monkeypatch.setattr(run, "in_own_process", lambda name, *, turn, **_: turn)
    monkeypatch.setattr(run, "timed", lambda parts: parts)
    monkeypatch.setattr(run, "restless", lambda row, parts, bound: "" if len(parts) >= 7 else "restless.")
    monkeypatch.setattr(summary, "result_of", lambda row, parts: parts)
    assert run.measure_row(QUIET, TORCH_ROW, "cpu") == [0, 1, 2, 3, 4, 5, 6]


def test_a_row_that_stays_noisy_stops_the_command(monkeypatch, results):
    turns = []

    def measured(name, *, turn, **_):
        turns.append(turn)
        return part(2.0 + turn, 2.0 + turn) if "/" in name else {}

    monkeypatch.setattr(run, "in_own_process", measured)
    said = steps_fail(results)
    assert "uncertainty is {'clip'" in said
    assert "too busy" in said
    assert turns == [0, 0, *range(repeats.MOST)], "two other parts, and the first row again and again"


def test_noisy_parts_are_retried(monkeypatch, results):
    turns = []

    def measured(name, *, turn, **_):
        turns.append(turn)
        raise errors.NoisyError(f"{name} was too noisy")

    monkeypatch.setattr(run, "in_own_process", measured)
    assert "bandwidth was too noisy" in steps_fail(results)
    assert turns == [0, 1, 2, 3, 4]
    with pytest.raises(errors.NoisyError, match="bandwidth"):
        bandwidth.bandwidth(elements=1000, rounds=3, bound=-1.0)


def test_a_later_attempt_may_succeed(monkeypatch):
    monkeypatch.setattr(run, "PAUSE_S", 0.0)

    def measured(name, *, turn, **_):
        if turn == 0:
            raise errors.NoisyError("noisy")
        return {"part": name, "turn": turn}

    monkeypatch.setattr(run, "in_own_process", measured)
    assert run._with_patience(QUIET, "bandwidth", "cpu") == {"part": "bandwidth", "turn": 1}


# --- an interrupted run ----------------------------------------------------------------------


def interrupted(monkeypatch, results, after):
    """The names that are measured until the process is stopped."""
    names = []

    def measured(name, **_):
        names.append(name)
        if len(set(names)) > after:
            raise KeyboardInterrupt
        return {"of": name}

    monkeypatch.setattr(run, "in_own_process", measured)
    monkeypatch.setattr(run, "timed", lambda parts: parts)
    monkeypatch.setattr(run, "restless", lambda row, parts, bound: "")
    monkeypatch.setattr(summary, "result_of", lambda row, parts: parts[0])
    monkeypatch.setattr(run, "row_table", lambda row: "")
    monkeypatch.setattr(command, "_facts", lambda more: {"versions": "these"})
    with pytest.raises(KeyboardInterrupt):
        command.main()
    assert list(results.glob("*.json")) == []
    return list(dict.fromkeys(names))


def test_an_interrupted_run_resumes(monkeypatch, results):
    first = interrupted(monkeypatch, results, after=4)
    assert first[:2] == ["bandwidth", "compiling"]
    again = interrupted(monkeypatch, results, after=3)
    assert again[0] == first[-1], "what was interrupted is measured again, what was done before is not"
    names = []
    monkeypatch.setattr(run, "in_own_process", lambda name, **_: names.append(name) or {"of": name})
    command.main()
    assert names[0] == again[-1]
    written = json.loads((results / "cpu.json").read_text(encoding="utf-8"))
    assert [row["of"] for row in written["rows"]] == [row.name for row in run.ROWS]
    assert written["bandwidth"] == {"of": "bandwidth"}
    assert list((results / "unfinished").iterdir()) == [], "a complete run starts from scratch"


@pytest.mark.parametrize("changed", ["versions", "sources", "threads", "file"])
def test_results_from_other_circumstances_are_discarded(monkeypatch, results, changed):
    interrupted(monkeypatch, results, after=4)
    if changed == "file":
        (results / "unfinished" / "cpu.json").write_text('{"parts": ')
    if changed == "sources":
        monkeypatch.setattr(command, "sources_digest", lambda: "others")
    if changed == "threads":
        monkeypatch.setenv("BENCH_THREADS", "17")
    if changed == "versions":
        kept = json.loads((results / "unfinished" / "cpu.json").read_text())
        kept["circumstances"]["facts"] = {"versions": "others"}
        (results / "unfinished" / "cpu.json").write_text(json.dumps(kept))
    assert interrupted(monkeypatch, results, after=1)[0] == "bandwidth"


def test_results_whose_sources_change_during_the_run_are_discarded(monkeypatch, results):
    versions = iter(["one", "one", "two"])
    monkeypatch.setattr(command, "sources_digest", lambda: next(versions))
    monkeypatch.setattr(run, "in_own_process", lambda name, **_: {"of": name})
    assert "compiling: versions or sources changed" in steps_fail(results)
    kept = json.loads((results / "unfinished" / "cpu.json").read_text())
    assert list(kept["parts"]) == ["bandwidth"]


def test_a_part_that_cannot_be_written_is_not_saved(monkeypatch, tmp_path):
    kept = keeping.Kept(tmp_path / "cpu.json", dict, say=lambda _: None)
    kept.part("one", lambda: 1.5)
    with pytest.raises(ValueError, match="JSON compliant"):
        kept.part("two", lambda: math.nan)
    again = keeping.Kept(tmp_path / "cpu.json", dict, say=lambda _: None)
    assert again.part("one", pytest.fail) == 1.5
    assert again.part("two", lambda: 2.5) == 2.5


def test_the_sources_are_those_of_the_benchmarks_and_of_what_they_measure(monkeypatch, tmp_path):
    for package in ("benchmarks", "stablenum_torch/inner", "tests"):
        (tmp_path / package).mkdir(parents=True)
        (tmp_path / package / "a.py").write_text("1")
    monkeypatch.setattr(keeping, "ROOT", tmp_path)
    digests = [keeping.sources_digest()]
    for package in ("tests", "stablenum_torch/inner", "benchmarks"):
        (tmp_path / package / "a.py").write_text("2")
        digests.append(keeping.sources_digest())
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


# --- exit codes and arguments of worker processes ---------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"), [(errors.NoisyError, 3), (errors.WrongResultError, 1), (errors.MissingPeerError, 1)]
)
def test_the_exit_code_of_a_worker_distinguishes_its_errors(monkeypatch, tmp_path, capsys, error, code):
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
def test_the_exit_code_is_turned_back_into_the_error(monkeypatch, code, error):
    def ended(*_, **__):
        return run.subprocess.CompletedProcess([], code, "", "a warning\nthe reason")

    monkeypatch.setattr(run.subprocess, "run", ended)
    with pytest.raises(error, match="the reason") as found:
        run.in_own_process("bandwidth", device="cpu", turn=1)
    assert isinstance(found.value, errors.NoisyError) == (code == 3)


def test_the_process_is_started_with_the_name_device_and_turn(monkeypatch):
    seen = {}

    def ended(command, *, env, **_):
        seen.update(command=command, env=env)
        (run.Path(command[4])).write_text('{"of": 1}')
        return run.subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(run.subprocess, "run", ended)
    monkeypatch.setenv("BENCH_THREADS", "3")
    assert run.in_own_process("a row", device="cuda", turn=4) == {"of": 1}
    assert seen["command"][3] == "a row"
    assert seen["command"][5:] == ["--device", "cuda", "--turn", "4"]
    assert (seen["env"]["OMP_NUM_THREADS"], seen["env"]["JAX_PLATFORMS"]) == ("3", "cuda")


def test_the_worker_measures_the_row_in_its_arguments(monkeypatch, tmp_path):
    monkeypatch.setattr(measure, "measure", lambda row, **given: [row.name, given])
    name = "torch adamw fused 10k/10 float32"
    worker.main([name, str(tmp_path / "out.json"), "--device", "cuda", "--turn", "4"])
    found = json.loads((tmp_path / "out.json").read_text())
    assert found == [name, {"device": "cuda", "turn": 4}]


def test_a_process_that_does_not_end_is_an_error(monkeypatch):
    def hangs(command, *, timeout, **_):
        raise run.subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(run.subprocess, "run", hangs)
    with pytest.raises(errors.BenchmarkError, match="did not end within"):
        run.in_own_process("bandwidth", device="cpu", turn=1)


def test_the_worker_writes_its_result(monkeypatch, tmp_path):
    monkeypatch.setattr(bandwidth, "bandwidth", lambda **given: {"device": given["device"]})
    out = tmp_path / "out.json"
    worker.main(["bandwidth", str(out)])
    assert json.loads(out.read_text(encoding="utf-8")) == {"device": "cpu"}


def test_a_row_that_does_not_exist_raises():
    with pytest.raises(SystemExit, match="--only must be part of a row's name"):
        run.main(["--only", "no such row"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_the_gpu_part_without_a_cuda_device_ends_with_an_error(monkeypatch, results):
    monkeypatch.setattr(sys, "argv", ["benchmarks", "gpu"])
    assert "no CUDA device" in steps_fail(results)
