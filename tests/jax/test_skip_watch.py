"""Runs of skips and halts are logged though nothing reads the state."""

from __future__ import annotations

import contextlib
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
from tests.jax.skipping_program import TRAININGS
from tests.selection import only

BAD, GOOD = jnp.asarray([1.0, jnp.nan]), jnp.ones(2)


TOLD = {
    **dict.fromkeys(["jitted", "ahead", "exported", "scanned", "stacked", "of_nnx"], "50 steps"),
    **dict.fromkeys(["halted", "raised"], "Training stopped:"),
    "early": "10 steps",
}
# Each way to compile, a halt, and a training of which nothing is told; the others are told in the same ways.
SOME = ["jitted", "ahead", "exported", "scanned", "stacked", "of_nnx", "raised", "early", "silent"]


@pytest.mark.parametrize("trainings", only([SOME], [SOME, list(TRAININGS)]), ids=["some", "all"])
def test_what_is_skipped_is_told_once_however_it_is_compiled(trainings):
    program = Path(__file__).with_name("skipping_program.py")
    done = subprocess.run(
        [sys.executable, str(program), *trainings], capture_output=True, text=True, timeout=240, check=True
    )
    told = {}
    for line in filter(None, done.stderr.splitlines()):
        (name,) = re.findall(r"First bad parameter: (\w+) ", line)
        assert name not in told, "once"
        assert "Likely cause: " in line
        assert "Remedy: " in line
        told[name] = " ".join(line.split()[:2])
    assert told == {name: said for name, said in TOLD.items() if name in trainings}


@pytest.fixture
def watch(monkeypatch):
    """A watch of this process that looks at each state."""
    made = skip_watch._Watch()
    monkeypatch.setattr(skip_watch, "_SECONDS", 0.0)
    monkeypatch.setattr(skip_watch.atexit, "register", lambda function: None)
    monkeypatch.setattr(states, "_listener", None)
    monkeypatch.setattr(skip_watch, "_watch", made)
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
        jax.block_until_ready((params, watch._copy))  # otherwise a busy machine logs it a step later
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


def _two_steps(x):
    """Return a loss of ``x`` after two guarded steps."""
    step, params, opt_state = _step("traced")
    for _ in range(2):
        params, opt_state = step(params, opt_state, params["traced"] - x)
    return params["traced"].sum()


TRANSFORMATIONS = {
    "grad": lambda f: jax.grad(f)(2.0),
    "jvp": lambda f: jax.jvp(f, (2.0,), (1.0,)),
    "vmap": lambda f: jax.vmap(f)(jnp.ones(2)),
    "vmap of grad": lambda f: jax.vmap(jax.grad(f))(jnp.ones(2)),
    "hessian": lambda f: jax.hessian(f)(2.0),
    "linearize": lambda f: jax.linearize(f, 2.0)[0],
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f))(2.0),
    "jit of grad": lambda f: jax.jit(jax.grad(f))(2.0),
}


# Looking for leaks turns off all of JAX's caches, and takes ten times as long.
@pytest.mark.parametrize("leaks", only({False}, [False, True]))
@pytest.mark.parametrize("name", only({"vmap of grad"}, TRANSFORMATIONS))  # both kinds of tracers
def test_steps_inside_a_transformation_are_not_watched(watch, caplog, name, leaks):
    with jax.checking_leaks() if leaks else contextlib.nullcontext():
        TRANSFORMATIONS[name](_two_steps)
    watch.flush()
    step, params, opt_state = _step(f"after {name} {leaks}")
    for _ in range(4):
        params, opt_state = step(params, opt_state, BAD)
    watch.flush()
    assert len(_told(caplog)) == 1


@pytest.mark.parametrize(
    "change",
    [lambda leaf: leaf if leaf.ndim == 0 else None, lambda leaf: leaf[None], lambda leaf: leaf.astype(bool)],
    ids=["without its records", "stacked", "of truth values"],
)
def test_what_a_user_makes_of_a_state_raises_nothing(watch, change):
    step, params, opt_state = _step("changed")
    kept = jax.tree.map(change, step(params, opt_state, GOOD)[1])
    watch.flush()
    step(params, opt_state, GOOD)
    assert kept is not None


def _train(trainings, steps):
    """Train in turn: each of the trainings is a step, its carry and its gradient."""
    for _ in range(steps):
        for training in trainings:
            step, carry, grad = training
            training[1] = step(*carry, grad)


def _training(name, grad, **settings):
    step, *carry = _step(name, **settings)
    return [jax.jit(step), carry, grad]


@pytest.mark.parametrize("others", only([4], [1, 4]))
@pytest.mark.parametrize("bad_is_last", [False, True])
def test_equal_models_trained_in_turn_are_told_apart(watch, caplog, monkeypatch, others, bad_is_last):
    monkeypatch.setattr(skip_watch, "_SECONDS", 1e9)
    name = f"in_turn_{others}_{bad_is_last}"
    healthy = [_training(name, GOOD + i) for i in range(others)]
    bad = _training(name, BAD)
    _train([*healthy, bad] if bad_is_last else [bad, *healthy], 5)
    watch.flush()
    watch.flush()
    assert _told(caplog) == ["5 steps in a row were skipped, up to step 4"]


def test_a_model_trained_before_an_equal_one_is_told_of(watch, caplog, monkeypatch):
    monkeypatch.setattr(skip_watch, "_SECONDS", 1e9)
    step, params, opt_state = _step("fold")
    step = jax.jit(step)
    step(params, opt_state, GOOD)
    for grad in (BAD, GOOD):
        fold = [step, _step("fold")[1:], grad]
        _train([fold], 2 * skip_watch._STATES)
    watch.flush()
    assert _told(caplog) == ["64 steps in a row were skipped, up to step 63"]


def test_reading_the_states_of_equal_models_tells_of_each_once(caplog):
    trainings = [_training("read_in_turn", grad) for grad in (BAD, GOOD, BAD.at[1].set(jnp.inf))]
    for _ in range(12):
        _train(trainings, 1)
        for _, (_, opt_state), _ in trainings:
            stablenum_jax.metrics(opt_state)
    assert _told(caplog) == ["3 steps in a row were skipped, up to step 2"] * 2


@pytest.mark.parametrize("silent_is_last", [False, True])
def test_a_silent_guard_does_not_silence_that_of_an_equal_model(watch, caplog, monkeypatch, silent_is_last):
    monkeypatch.setattr(skip_watch, "_SECONDS", 1e9)
    order = [True, False] if silent_is_last else [False, True]
    trainings = [_training(f"silent_{silent_is_last}", BAD, log_skips=log_skips) for log_skips in order]
    _train(trainings, 3)
    watch.flush()
    assert len(_told(caplog)) == 1
    for _ in range(2):
        _train([trainings[silent_is_last]], 30)
        watch.flush()
        stablenum_jax.metrics(trainings[silent_is_last][1][1])
    assert len(_told(caplog)) == 1
    assert stablenum_jax.metrics(trainings[0][1][1])["worst"].name == f"silent_{silent_is_last}"


def test_a_loaded_state_is_logged_as_the_guard_that_goes_on_says(watch, caplog):
    loaded = _step("loaded")[2]
    for log_skips in (False, True):
        step, params, _ = _step("loaded", log_skips=log_skips)
        for _ in range(4):
            params, loaded = jax.jit(step)(params, loaded, BAD)
        watch.flush()
        assert len(_told(caplog)) == log_skips


def test_a_compiled_step_is_the_same_with_and_without_the_log():
    texts = []
    for log_skips in (True, False):
        step, params, opt_state = _step("same", log_skips=log_skips)
        text = jax.jit(step).lower(params, opt_state, GOOD).as_text()
        texts.append(text.replace(f"<{opt_state[0].names_id}>", "<names>"))
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
