"""Runs of skips and halts are logged though nothing reads the state."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

import stablenum_jax
from stablenum_jax._step import skip_watch
from stablenum_jax._trees import state as states

BAD, GOOD = jnp.asarray([1.0, jnp.nan]), jnp.ones(2)


def test_what_is_skipped_is_told_once_however_it_is_compiled():
    program = Path(__file__).with_name("skipping_program.py")
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=240, check=True
    )
    told = {}
    for line in filter(None, done.stderr.splitlines()):
        (name,) = re.findall(r"First bad parameter: (\w+) ", line)
        assert name not in told, "once"
        assert "Likely cause: " in line
        assert "Remedy: " in line
        told[name] = " ".join(line.split()[:2])
    whole = dict.fromkeys(["jitted", "ahead", "exported", "scanned", "stacked", "of_nnx"], "50 steps")
    halts = dict.fromkeys(["halted", "raised"], "Training stopped:")
    assert told == {**whole, **halts, "early": "10 steps"}


@pytest.fixture
def watch(monkeypatch):
    """A watch of this process that looks at each state."""
    made = skip_watch._Watch()
    monkeypatch.setattr(skip_watch, "_SECONDS", 0.0)
    monkeypatch.setattr(skip_watch.atexit, "register", lambda function: None)
    monkeypatch.setattr(states, "_listener", None)
    made.begin()
    return made


def _step(name, **settings):
    tx = optax.chain(stablenum_jax.guard(**settings), optax.sgd(0.1))
    opt_state = tx.init({name: jnp.ones(2)})

    def step(params, opt_state, grad):
        return stablenum_jax.step(tx, params, opt_state, {name: grad})

    return step, {name: jnp.ones(2)}, opt_state


def _told(caplog):
    return [record.getMessage().split(".")[0] for record in caplog.records if record.name == "stablenum"]


def test_a_run_of_skips_is_told_while_the_training_goes_on(watch, caplog):
    step, params, opt_state = _step("goes_on")
    step = jax.jit(step, donate_argnums=(0, 1))
    for i in range(12):
        params, opt_state = step(params, opt_state, BAD if 2 <= i < 7 else GOOD)
        jax.block_until_ready(params)
    assert _told(caplog) == ["3 steps in a row were skipped, up to step 4"]


@pytest.mark.parametrize("flag", [jax.debug_nans, jax.debug_infs, jax.checking_leaks])
def test_a_look_raises_nothing_and_leaks_nothing(watch, caplog, flag):
    step, params, opt_state = _step(f"looked_at_{flag}")  # each training has a log of its own
    step = jax.jit(step)
    for _ in range(4):
        params, opt_state = step(params, opt_state, BAD)
    with flag(True) if flag is not jax.checking_leaks else flag():
        # The state is rebuilt inside a trace, where an operation would be traced.
        jax.jit(lambda x: x + jax.tree.map(lambda leaf: leaf, opt_state)[0].guard.step)(1)
    watch.flush()
    assert len(_told(caplog)) == 1


def test_a_state_without_values_is_passed_over(watch, caplog):
    step, params, opt_state = _step("donated")
    step = jax.jit(step)
    for _ in range(3):
        params, opt_state = jax.block_until_ready(step(params, opt_state, BAD))
        jax.block_until_ready(watch._copy)
    for leaf in jax.tree.leaves(opt_state):
        leaf.delete()
    jax.tree.map(lambda leaf: leaf, opt_state)
    assert _told(caplog) == ["3 steps in a row were skipped, up to step 2"]
    watch.flush()
    assert len(_told(caplog)) == 1


def test_a_compiled_step_is_the_same_with_and_without_the_log():
    texts = []
    for log_skips in (True, False):
        step, params, opt_state = _step("same", log_skips=log_skips)
        texts.append(jax.jit(step).lower(params, opt_state, GOOD).as_text())
    assert texts[0] == texts[1]
    assert "callback" not in texts[0]


def test_without_the_log_reading_tells_of_no_skips_either(caplog):
    step, params, opt_state = _step("unlogged", log_skips=False)
    for _ in range(4):
        params, opt_state = step(params, opt_state, BAD)
    assert stablenum_jax.metrics(opt_state)["skipped_in_a_row"] == 4
    assert _told(caplog) == []


def test_log_skips_must_be_true_or_false():
    with pytest.raises(TypeError, match="log_skips must be True or False"):
        stablenum_jax.guard(log_skips=1)
