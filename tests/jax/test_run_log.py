"""The log of a run in JAX: every step in order, no wait, donated states, and calls of several steps."""

from __future__ import annotations

import functools
import gc
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stablenum
import stablenum_jax
from stablenum.runlog.lines import Step, parsed
from stablenum.runlog.reading import read_run
from stablenum_jax._step import run_log
from stablenum_jax._step.sampled import sample, update_between
from tests.jax.recovering import POLICY, batch_at, first_state, train_step

ROOT = Path(__file__).parents[2]
SETTINGS: dict[str, Any] = {"clip": 1.0, "loss_scale": 8.0}


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(jnp.tanh(x @ params["w"]) @ params["v"]))


def parameters() -> dict[str, jax.Array]:
    return {"v": jnp.full((8, 1), 0.3), "w": jnp.linspace(-1.0, 1.0, 32).reshape(4, 8)}


def batch(step: int) -> jax.Array:
    x = np.random.default_rng(step).normal(size=(16, 4)).astype(np.float32)
    return jnp.asarray(x * (math.nan if step % 50 == 7 else 1.0))


class Training:
    """A training whose jitted step takes the memory of its arguments."""

    def __init__(self, tx: optax.GradientTransformation) -> None:
        self.params = parameters()
        self.opt_state = tx.init(self.params)

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(params: Any, opt_state: Any, x: jax.Array) -> Any:
            loss, grads = stablenum_jax.value_and_grad(loss_fn, opt_state)(params, x)
            return stablenum_jax.step(tx, params, opt_state, grads, value=loss)

        self.step = step

    def take(self, x: jax.Array) -> None:
        self.params, self.opt_state = self.step(self.params, self.opt_state, x)


def chained(**settings: Any) -> optax.GradientTransformation:
    return optax.chain(stablenum_jax.guard(**(SETTINGS | settings)), optax.adamw(1e-2))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.jsonl"


def test_every_step_is_in_the_log_as_it_was(path):
    training, seen = Training(chained()), []
    log = stablenum_jax.RunLog(path)
    for step in range(300):
        training.take(batch(step))
        log(training.opt_state, training.params)
        seen.append(stablenum_jax.metrics(training.opt_state))
    log.close()
    run = read_run(path)
    assert run.steps == list(range(300))
    assert run.reason == [row["reason"] for row in seen]
    names = list(run.names)
    assert [names[i] for i in run.worst] == [row["worst"].name for row in seen]
    for column, name in ((run.loss, "loss"), (run.grad_norm, "grad_norm"), (run.loss_scale, "loss_scale")):
        assert column == pytest.approx([row[name] for row in seen], rel=1e-8, nan_ok=True)
    assert len(run.skipped) == 6
    assert all(update.step % 64 == 63 for update in run.updates)
    assert len(run.updates) >= 3


def test_the_header_has_settings_and_versions(path):
    training = Training(chained(clip=0.25))
    with stablenum_jax.RunLog(path) as log:
        training.take(batch(0))
        log(training.opt_state)
    header = read_run(path).header
    assert stablenum.GuardConfig.from_dict(header["settings"]) == stablenum.GuardConfig(
        clip=0.25, loss_scale=8.0
    )
    assert header["framework"] == "jax"
    assert header["versions"]["jax"] == jax.__version__


def test_no_call_waits_for_a_step_that_goes_on(path):
    tx = chained()
    params = parameters()
    opt_state = tx.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params: Any, opt_state: Any, x: jax.Array, n: Any) -> Any:
        slow = jax.lax.fori_loop(0, n, lambda i, a: jnp.tanh(a @ a), jnp.ones((300, 300)))
        loss, grads = stablenum_jax.value_and_grad(loss_fn, opt_state)(params, x + slow[:1, :1])
        return stablenum_jax.step(tx, params, opt_state, grads, value=loss)

    log = stablenum_jax.RunLog(path)
    for step in range(4):  # what the log computes is compiled by the first steps
        params, opt_state = train_step(params, opt_state, batch(step), 1)
        log(opt_state, params)
        log._readings._write(wait=True)
    before = path.read_bytes()
    params, opt_state = train_step(params, opt_state, batch(4), 300)  # some seconds
    log._readings._pace._every = 1  # a step after which the record is read
    log(opt_state, params)
    log(opt_state, params)
    assert not opt_state[0].guard.step.is_ready()
    assert path.read_bytes() == before
    log.close()
    assert read_run(path).steps == list(range(5))


def test_readings_that_arrive_late_are_written_in_order_and_lose_nothing(path, monkeypatch):
    training = Training(chained())
    log = stablenum_jax.RunLog(path)
    with monkeypatch.context() as patch:
        patch.setattr(run_log._Reading, "arrived", False)
        for step in range(150):
            training.take(batch(step))
            log(training.opt_state)
        assert not path.exists()
    training.take(batch(150))
    log(training.opt_state)
    assert read_run(path).steps[:150] == list(range(150))


def test_the_record_is_read_once_in_64_steps(path, monkeypatch):
    real, copied = run_log._copy, []
    monkeypatch.setattr(run_log, "_copy", lambda array: copied.append(1) or real(array))
    training = Training(chained())
    log = stablenum_jax.RunLog(path)
    for step in range(200):
        training.take(batch(step))
        log(training.opt_state)
        jax.block_until_ready(training.opt_state)
    assert len(copied) / 3 <= 2 + 200 / 64  # the first two calls tell that a call is one step
    log.close()
    assert read_run(path).steps == list(range(200))


@pytest.mark.parametrize(("steps", "calls"), [(50, 8), (128, 4)])
def test_a_call_may_stand_for_several_steps(path, caplog, steps, calls):
    run_scanned(path, steps, calls)
    assert read_run(path).steps == list(range(steps * calls))
    assert caplog.messages == []


def test_steps_that_a_long_scan_leaves_out_are_told(path, caplog):
    run_scanned(path, 200, 3)
    assert read_run(path).steps == [*range(72, 200), *range(272, 400), *range(472, 600)]
    (message,) = caplog.messages
    assert "72 steps before step 272 are missing" in message


def run_scanned(path: Path, steps: int, calls: int) -> None:
    tx = chained()

    @jax.jit
    def many(params: Any, opt_state: Any) -> Any:
        def one(carry: Any, _: Any) -> Any:
            loss, grads = stablenum_jax.value_and_grad(loss_fn, carry[1])(carry[0], jnp.ones((2, 4)))
            return stablenum_jax.step(tx, *carry, grads, value=loss), None

        return jax.lax.scan(one, (params, opt_state), length=steps)[0]

    params = parameters()
    opt_state = tx.init(params)
    with stablenum_jax.RunLog(path) as log:
        for _ in range(calls):
            params, opt_state = many(params, opt_state)
            log(opt_state, params)


def test_a_guard_inside_multisteps(path):
    tx = optax.MultiSteps(chained(loss_scale=None), every_k_schedule=4)
    training = Training(tx)
    with stablenum_jax.RunLog(path) as log:
        for step in range(40):
            training.take(jnp.ones((2, 4)) * step)
            log(training.opt_state)
    assert read_run(path).steps == list(range(10))


@pytest.mark.parametrize(("every", "measured"), [(2, [63, 127, 191]), (3, [191]), (4, [63, 127, 191])])
def test_updates_of_steps_that_only_accumulate_are_left_out(path, every, measured):
    tx = stablenum_jax.guard(optax.MultiSteps(optax.adamw(1e-2), every))
    training = Training(tx)
    with stablenum_jax.RunLog(path) as log:
        for step in range(200):
            training.take(jnp.ones((2, 4)) + 0.01 * step)
            jax.block_until_ready(training.params)  # so that the readings arrive at once
            log(training.opt_state, training.params)
    run = read_run(path)
    assert run.steps == list(range(200))
    assert [update.step for update in run.updates] == measured
    assert all(update.size > 0.0 for update in run.updates)


def test_a_run_that_goes_on_measures_the_updates_that_it_would_have_measured(path):
    training, updates = Training(chained()), []
    kept = None
    for name, steps in (("whole", range(200)), ("rest", range(100, 200))):
        if kept is not None:
            training.params, training.opt_state = kept
        with stablenum_jax.RunLog(path.with_name(name)) as log:
            for step in steps:
                if step == 100 and kept is None:
                    kept = jax.tree.map(jnp.copy, (training.params, training.opt_state))
                training.take(batch(step))
                jax.block_until_ready(training.params)  # so that the readings arrive at once
                log(training.opt_state, training.params)
        updates.append(read_run(path.with_name(name)).updates)
    assert [update.step for update in updates[0]] == [63, 127, 191]
    assert updates[1] == updates[0][1:]


def test_a_run_that_goes_back_is_logged_as_it_went(path):
    training = Training(chained())
    with stablenum_jax.RunLog(path) as log:
        for step in range(30):
            training.take(batch(step))
            log(training.opt_state)
        kept = jax.tree.map(jnp.copy, (training.params, training.opt_state))
        for step in range(30, 40):
            training.take(batch(step))
            log(training.opt_state)
        log.close()
        training.params, training.opt_state = kept
        for step in range(130, 150):
            training.take(batch(step))
            log(training.opt_state)
    run = read_run(path)
    assert run.steps == list(range(50))
    assert run.rewinds == [30]


def test_the_steps_that_a_recovery_undoes_are_logged(path):
    """The rewind comes between two readings, and takes the record of the bad steps with it."""
    bad, hurt = (np.full((6, 4), np.nan, np.float32), np.ones(6, np.float32)), []
    recovery = stablenum_jax.Recovery(first_state(), POLICY, data=batch_at)
    log = stablenum_jax.RunLog(path)
    for batch in recovery.batches(60):
        now = recovery.step + 1 in range(31, 36) and len(hurt) < 5
        hurt += [recovery.step + 1] if now else []
        recovery.state, _ = train_step(recovery.state, bad if now else batch)
        log(recovery.state)
    log.close()
    assert len(recovery.events) == 1
    lines = [line for line in map(parsed, path.read_text().splitlines()) if isinstance(line, Step)]
    assert sum(line.reason is stablenum.Reason.NONFINITE_LOSS for line in lines) >= POLICY.skips_in_a_row
    run = read_run(path)
    assert run.rewinds != []
    assert run.steps == list(range(60))
    assert run.skipped == []
    undone = [step.reason for step in run.undone]
    assert undone.count(stablenum.Reason.NONFINITE_LOSS) >= POLICY.skips_in_a_row


def test_a_log_that_is_dropped_writes_the_rest(path):
    training = Training(chained())
    log = stablenum_jax.RunLog(path)
    for step in range(10):
        training.take(batch(step))
        log(training.opt_state)
    del log
    gc.collect()
    assert read_run(path).steps == list(range(10))


PROGRAM = """
import sys
import jax.numpy as jnp, optax
import stablenum_jax
tx = optax.chain(stablenum_jax.guard(), optax.sgd(0.1))
params = {"w": jnp.ones(3)}
opt_state = tx.init(params)
log = stablenum_jax.RunLog(sys.argv[1])
for step in range(10):
    params, opt_state = stablenum_jax.step(tx, params, opt_state, params)
    log(opt_state)
"""


def test_a_program_that_ends_has_written_every_step(path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", PROGRAM, str(path)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert (result.returncode, result.stderr) == (0, "")
    assert read_run(path).steps == list(range(10))


def test_a_state_that_was_donated_after_it_was_logged_is_told(path, caplog):
    training = Training(chained())
    log = stablenum_jax.RunLog(path)
    for step in range(10):
        training.take(batch(step))
        log(training.opt_state)
    training.take(batch(10))  # takes the memory of the state that was logged last
    log.close()
    assert "The last steps are missing" in caplog.messages[-1]
    training.take(batch(11))
    log(training.opt_state)
    log.close()
    assert read_run(path).steps == list(range(12))


def test_only_the_first_process_writes(path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    training = Training(chained())
    with stablenum_jax.RunLog(path) as log:
        training.take(batch(0))
        log(training.opt_state)
    assert not path.exists()


def test_a_log_that_fails_does_not_end_the_training(tmp_path, caplog):
    folder = tmp_path / "runs"
    folder.mkdir()
    training = Training(chained())
    with stablenum_jax.RunLog(folder / "run.jsonl") as log:
        folder.rmdir()
        for step in range(10):
            training.take(batch(step))
            log(training.opt_state)
    assert ["The log of the run ends here" in message for message in caplog.messages] == [True]


def test_wrong_arguments_are_named(path):
    with pytest.raises(TypeError, match="path must be the path of a file"):
        stablenum_jax.RunLog(7)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="path must be a file in a folder that is there"):
        stablenum_jax.RunLog(path / "run.jsonl")
    log = stablenum_jax.RunLog(path)
    with pytest.raises(ValueError, match="exactly one guard's state"):
        log(optax.sgd(0.1).init(parameters()))
    opt_state = chained().init(parameters())
    with pytest.raises(ValueError, match="stacked"):
        log(jax.tree.map(lambda x: x[None], opt_state))
    with pytest.raises(ValueError, match="concrete arrays"):
        jax.jit(log)(opt_state)
    log.close()
    assert not path.exists()


def test_a_sample_has_elements_of_all_of_a_large_parameter():
    params = {"a": jnp.arange(100_000.0), "b": jnp.arange(3, dtype=jnp.bfloat16), "n": jnp.arange(4)}
    before = sample(params)
    assert before.names == ("a", "b")
    assert before.counts == (100_000, 3)
    assert before.elements[256:].tolist() == [0.0, 1.0, 2.0]
    assert float(before.elements[:256].max()) > 99_000
    after = sample({"a": params["a"] * 1.5, "b": params["b"], "n": params["n"]})
    assert update_between(5, before, after) == (5, pytest.approx(0.5), pytest.approx(0.5), "a")
    assert update_between(5, before, sample({"a": params["a"]})) is None
    assert sample({}) is None


def test_both_frameworks_write_the_same_steps(tmp_path):
    import torch

    import stablenum_torch

    w = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    opt = stablenum_torch.wrap(
        torch.optim.SGD([w], lr=0.125), clip=1.0, names=[("w", w)], log=tmp_path / "torch.jsonl"
    )
    tx = optax.chain(stablenum_jax.guard(clip=1.0), optax.sgd(0.125))
    params = {"w": jnp.asarray([3.0, 4.0])}
    opt_state = tx.init(params)
    with stablenum_jax.RunLog(tmp_path / "jax.jsonl") as log:
        for factor in (1.0, math.nan, 0.125):
            w.grad = torch.tensor([3.0, 4.0]) * factor
            opt.step()
            grads = {"w": jnp.asarray([3.0, 4.0]) * factor}
            params, opt_state = stablenum_jax.step(tx, params, opt_state, grads)
            log(opt_state)
    opt.history()
    logs = [(tmp_path / name).read_text().splitlines()[1:] for name in ("torch.jsonl", "jax.jsonl")]
    assert logs[0] == logs[1]
    assert len(logs[0]) == 3
