"""The command: what it accepts, what it prints and writes, and its exit codes."""

from __future__ import annotations

import dataclasses
import fcntl
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner, Result

import stablenum
import stablenum.commands.compare.backends as backends_module
from stablenum import cli
from stablenum.commands.compare.backends import BACKENDS, numpy_run, torch_run
from stablenum.commands.compare.builtin import SCENARIOS
from stablenum.commands.compare.builtin.rule_streams import RULE_STREAMS
from stablenum.commands.compare.processes import run_side_by_side
from stablenum.commands.compare.report import print_report, to_plain
from stablenum.commands.compare.runner import run_guarded, run_scenario
from stablenum.commands.compare.scenario_file import read_scenario_file, to_toml
from stablenum.guard.config import GuardConfig
from stablenum.rules.clipping import CLIP_RULES
from stablenum.rules.loss_scale import LOSS_SCALES
from stablenum.rules.spikes import MeanStdSpikeGuard, SpikeGuard
from tests.selection import only

session = importlib.import_module("stablenum.commands.compare.session")
app = cli.app("compare", "explain")

FAST = ["--backend", "numpy", "--backend", "torch-foreach"]


def stablenum_command(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def compare(*arguments: object) -> Result:
    return stablenum_command("compare", *arguments)


def plain(result: Result) -> str:
    """Output and messages without the line breaks of the terminal."""
    return " ".join((result.output + result.stderr).split())


def strict(text: str) -> Any:
    def reject(constant: str) -> None:
        raise AssertionError(f"not strict JSON: {constant}")

    return json.loads(text, parse_constant=reject)


# ---------------------------------------------------------------------------------- reading


def test_version_and_help() -> None:
    assert plain(stablenum_command("--version")).startswith(f"stablenum {stablenum.__version__}")
    for arguments in (["--help"], ["compare", "--help"], ["compare", "-h"]):
        result = stablenum_command(*arguments)
        assert result.exit_code == 0
        assert "compare" in result.output
    assert "[[scenario]]" in plain(compare("--help"))


def test_python_m_stablenum() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "stablenum", "--version"], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == f"stablenum {stablenum.__version__}"


def test_compiler_logs_are_off_and_one_thread_is_used_unless_the_user_set_them() -> None:
    program = (
        "import os, stablenum.cli as cli; cli._keep_quiet(); print(*map(os.environ.get, "
        "('TORCH_LOGS', 'OMP_NUM_THREADS')))"
    )
    unset = {name: v for name, v in os.environ.items() if name not in ("TORCH_LOGS", "OMP_NUM_THREADS")}
    for given, seen in (({}, "-all 1"), ({"TORCH_LOGS": "dynamo", "OMP_NUM_THREADS": "3"}, "dynamo 3")):
        command = [sys.executable, "-c", program]
        run = subprocess.run(command, env=unset | given, capture_output=True, text=True, check=True)
        assert run.stdout.strip() == seen


def test_list_names_every_scenario_and_backend() -> None:
    result = compare("--list")
    assert result.exit_code == 0
    for name in (*SCENARIOS, *BACKENDS):
        assert name in result.output


def test_a_run_prints_a_table_and_exits_0() -> None:
    result = compare("--scenario", "single-inf", "--scenario", "huge-1e20", *FAST)
    assert result.exit_code == 0, result.output
    line = next(line for line in result.output.splitlines() if line.strip().startswith("single-inf"))
    assert line.split()[:7] == ["single-inf", "dies", "survives", "200", "1", "2/2", "yes"]
    assert "all backends agree" in result.output


def test_scenarios_side_by_side_give_what_they_give_one_after_the_other(tmp_path: Path) -> None:
    names = ["--scenario", "single-inf", "--scenario", "bce-saturated", "--scenario", "huge-1e20"]
    tables, documents = [], []
    for jobs in (1, 2):
        out = tmp_path / f"{jobs}.json"
        result = compare(*names, *FAST, "--jobs", jobs, "--json", out)
        assert result.exit_code == 0, result.output
        tables.append(result.output.replace(str(out), ""))
        documents.append(without_times(strict(out.read_text())))
    assert tables[0] == tables[1]
    assert documents[0] == documents[1]
    assert [s["name"] for s in documents[0]["scenarios"]] == names[1::2]


def without_times(value: Any) -> Any:
    """A document without its times, and without what made it."""
    if isinstance(value, dict):
        return {key: without_times(part) for key, part in value.items() if key not in ("seconds", "about")}
    return [without_times(part) for part in value] if isinstance(value, list) else value


def test_a_process_that_is_ended_from_the_outside_is_reported() -> None:
    scenario = dataclasses.replace(SCENARIOS["clean"], name="killed")
    killer = dataclasses.replace(BACKENDS["numpy"], module="tests.parity.killing_backend")
    with pytest.raises(RuntimeError, match=r"ended from the outside.* With --jobs 1 the scenarios run"):
        run_side_by_side([scenario, scenario], [killer], jobs=2, checked=set(), brief=False)


def test_processes_end_with_the_main_one(tmp_path: Path) -> None:
    program = f"""
import dataclasses
from stablenum.commands.compare.backends import BACKENDS
from stablenum.commands.compare.builtin import SCENARIOS
from stablenum.commands.compare.processes import run_side_by_side

if __name__ == "__main__":
    module = "tests.parity.sleeping_backend"
    slow = dataclasses.replace(BACKENDS["numpy"], module=module, mode={str(tmp_path)!r})
    scenarios = [dataclasses.replace(SCENARIOS["clean"], name=name) for name in ("one", "two")]
    run_side_by_side(scenarios, [slow], jobs=2, checked=set(), brief=False)
"""
    file = tmp_path / "program.py"
    file.write_text(program)
    path = {"PYTHONPATH": os.pathsep.join(["", *sys.path])}
    main = subprocess.Popen([sys.executable, file], env=os.environ | path)
    try:
        wait_until(lambda: sum(map(is_held, tmp_path.glob("*.lock"))) == 2)
    finally:
        main.kill()
        main.wait()
    wait_until(lambda: not any(map(is_held, tmp_path.glob("*.lock"))))


def wait_until(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + 100
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.1)


def is_held(lock: Path) -> bool:
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_numpy_alone_is_compared_with_no_backend() -> None:
    result = compare("--scenario", "single-inf", "--backend", "numpy")
    assert result.exit_code == 0
    assert "nothing to compare NumPy with" in result.output


def test_numpy_runs_with_every_backend() -> None:
    result = compare("--scenario", "single-inf", "--backend", "torch-foreach")
    assert result.exit_code == 0
    assert "on numpy, torch-foreach" in result.output


# ------------------------------------------------------------------------------ usage errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scenario", "nonesuch"], "unknown scenario 'nonesuch'; the known ones are clean, single-inf"),
        (["--backend", "tensorflow"], "unknown backend 'tensorflow'; the known ones are numpy, torch"),
        (["--config", "nonesuch.toml"], "cannot read nonesuch.toml: No such file"),
        (["--json", "no/such/folder/x.json"], "does not exist"),
        (["--plot", "."], "is a folder; name a file"),
        (["--html", "no/such/folder/x.html"], "does not exist"),
        (["--jobs", "0"], "Invalid value for '--jobs'"),
    ],
)
def test_usage_errors_exit_2(arguments: list[str], message: str) -> None:
    result = compare(*arguments)
    assert result.exit_code == 2
    assert message in plain(result).replace("│ ", "")


def test_a_missing_framework_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        backends_module.importlib.util, "find_spec", lambda name: None if name == "jax" else find(name)
    )
    result = compare("--backend", "jax-jit")
    assert result.exit_code == 2
    assert "backend 'jax-jit' needs jax: pip install jax" in plain(result).replace("│ ", "")
    # If it was not requested, it is reported but is not an error.
    chosen, absent = backends_module.find_backends()
    assert [b.name for b in chosen] == ["numpy", "torch", "torch-foreach", "torch-compiled"]
    assert absent == {"jax": ["jax"], "jax-jit": ["jax"]}
    result = compare("--list")
    assert "(absent: jax not installed)" in result.output


# -------------------------------------------------------------------------------- TOML files

GOOD = """
[guard]
max_skips_in_a_row = 9

[[scenario]]
name = "mine"
about = "Two bad steps."
steps = 30
seed = 3
magnitude = 0.1
drift = 1.01
jitter = 0.2
optimizer = { name = "sgd", lr = 0.1, momentum = 0.9 }
tensors = [{ shape = [4, 3] }, { shape = [2], dtype = "float16" }]
events = [
  { step = 5, tensor = 0, value = inf },
  { step = 9, tensor = "loss", value = nan },
  { step = 12, until = "end", tensor = "all", factor = 0.5 },
]
guard = { clip = 1.0, loss_scale = { rule = "DynamicLossScale", growth_interval = 10 } }
expected = { plain = "dies", guarded = "survives", skips = 2 }
tolerance = { params = 1e-2 }
"""


def test_a_file_gives_own_scenarios(tmp_path: Path) -> None:
    file, out = tmp_path / "mine.toml", tmp_path / "out.json"
    file.write_text(GOOD)
    result = compare("--config", file, "--json", out, *FAST)
    assert result.exit_code == 0, result.output
    (scenario,) = strict(out.read_text())["scenarios"]
    assert scenario["name"] == "mine"
    assert scenario["guard"]["max_skips_in_a_row"] == 9
    assert scenario["guard"]["clip"] == [{"rule": "ClipByGlobalNorm", "max_norm": 1.0}]
    assert scenario["guarded"]["numpy"]["skipped"] == 2


def test_an_unexpected_outcome_exits_1(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(GOOD.replace("skips = 2", "skips = 3"))
    result = compare("--config", file, *FAST)
    assert result.exit_code == 1
    assert "mine, numpy: expected 3 skipped steps, got 2" in plain(result)


def test_a_file_overrides_the_guard_of_built_in_scenarios(tmp_path: Path) -> None:
    file, out = tmp_path / "guard.toml", tmp_path / "out.json"
    file.write_text('[guard]\non_nonfinite = "raise"\n')
    result = compare("--config", file, "--scenario", "bad-200", "--json", out, *FAST)
    assert result.exit_code == 0, result.output  # with another guard the stated outcome is not checked
    (scenario,) = strict(out.read_text())["scenarios"]
    assert scenario["guarded"]["torch-foreach"]["outcome"] == "stops"
    assert "step(s) in a row" in scenario["guarded"]["torch-foreach"]["stopped"]
    assert scenario["guard"]["loss_scale"]["growth_interval"] == 10  # the scenario's own is kept


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[guard]", "[guard", "is not valid TOML"),
        ("[guard]", "[gard]", "the file has no field 'gard'; it has guard, scenario"),
        ("max_skips_in_a_row = 9", "max_skips = 9", "guard: config has no field 'max_skips'"),
        ("max_skips_in_a_row = 9", "max_skips_in_a_row = 0", "max_skips_in_a_row must be a whole number"),
        ('name = "mine"', "", "scenario 1: name is missing"),
        ('name = "mine"', 'name = "my own"', "name must be one word"),
        ("steps = 30", "steps = 0", "scenario 1 ('mine'): steps must be a whole number from 1"),
        ("steps = 30", "step = 30", "a scenario has no field 'step'"),
        ("steps = 30", "steps = 8", "events.step must be below the number of steps, 8; got 9"),
        ("seed = 3", 'seed = "x"', "seed must be a whole number"),
        ("magnitude = 0.1", "magnitude = inf", "magnitude must be a finite number"),
        ('name = "sgd", lr', 'name = "lion", lr', "optimizer.name must be one of sgd, adam or adamw; got"),
        ("lr = 0.1", "rate = 0.1", "optimizer has no field 'rate'"),
        ("lr = 0.1", "lr = -0.1", "optimizer.lr must be a finite number at least 0"),
        ("lr = 0.1", "lr = 0.1, eps = -1e-8", "optimizer.eps must be a finite number at least 0; got -1e-08"),
        ("lr = 0.1", "lr = 0.1, weight_decay = -1", "optimizer.weight_decay must be a finite number at"),
        ("momentum = 0.9", "momentum = 1", "optimizer.momentum must be a finite number at least 0 and below"),
        ("shape = [4, 3]", "shape = 4", "tensors[0].shape must be a list; got 4"),
        ("shape = [4, 3]", "shape = [4, -3]", "tensors[0]: tensors.shape must be a whole number from 0"),
        ('"float16"', '"float12"', "tensors[1]: tensors.dtype must be one of float32, bfloat16 or float16"),
        ("tensor = 0,", "tensor = 2,", "events.tensor must be an index below 2"),
        ("tensor = 0,", 'tensor = "every",', "events.tensor must be an index from 0, 'all' or 'loss'"),
        ("tensor = 0,", "tensor = -1,", "events[0]: events.tensor must be a whole number from 0"),
        ("tensor = 0,", 'until = "last",', "events.until must be a whole number or 'end'; got 'last'"),
        ("tensor = 0,", "until = 4,", "events[0]: events.until must be a whole number from 5"),
        ("value = inf", "value = inf, factor = 2", "events[0]: events.value (replaces what is there) and"),
        ("value = inf", "factor = 2, value = inf", "exactly one must be given; got both"),
        ("value = inf", "factor = inf", "events[0]: events.factor must be a finite number; got inf"),
        ("value = inf", 'factor = "2"', "events[0]: events.factor must be a finite number; got '2'"),
        ("value = inf", "factor = 2, everywhere = true", "everywhere must be false with events.factor"),
        ("value = inf", "value = 1, everywhere = 1", "events.everywhere must be true or false; got 1"),
        ("drift = 1.01", "drift = 0", "scenario 1 ('mine'): drift must be a finite number above 0; got 0"),
        ("drift = 1.01", "drift = 1e5", "drift must be such that drift**(steps - 1), and magnitude"),
        ("jitter = 0.2", "jitter = -0.1", "jitter must be a finite number at least 0 and at most 1"),
        ("jitter = 0.2", "jitter = 2", "jitter must be a finite number at least 0 and at most 1"),
        ("value = inf", 'value = "inf"', "events[0]: events.value must be a number, nan or inf; got 'inf'"),
        ("{ step = 5, tensor = 0, value = inf }", "{ step = 5 }", "exactly one must be given; got neither"),
        ("{ step = 5, tensor = 0, value = inf }", "5", "events[0] must be a table; got 5"),
        ("clip = 1.0", "clip = -1.0", "clip must be a finite number above 0"),
        ("growth_interval = 10", "growth_intervall = 10", "loss_scale (DynamicLossScale) has no field"),
        ('guarded = "survives"', 'guarded = "lives"', "expected.guarded must be one of survives, dies"),
        ("params = 1e-2", "parms = 1e-2", "tolerance has no field 'parms'"),
        ("params = 1e-2", 'norm = "a"', "tolerance.norm must be a finite number at least 0; got 'a'"),
        ("params = 1e-2", "params = -1", "tolerance: tolerance.params must be a finite number at least 0"),
        ("params = 1e-2", "loss = nan", "tolerance: tolerance.loss must be a finite number at least 0"),
        ("params = 1e-2", "why = 3", "tolerance: tolerance.why must be a sentence; got 3"),
        ("skips = 2", 'skips = "0"', "expected: expected.skips must be a whole number from 0"),
        ("skips = 2", "final_loss_scale = 0", "expected.final_loss_scale must be a finite number above 0"),
        ("steps = 30", 'steps = 30\nplain_clip = "x"', "plain_clip must be a finite number above 0; got 'x'"),
        ("steps = 30", "steps = 30\nstart = 1e300", "start must be a finite number at least -65504 and"),
        ("steps = 30", "steps = 30\nmost_moved = 0", "most_moved must be a finite number above 0; got 0"),
        ('dtype = "float16"', 'computed = "f16"', "tensors.computed must be one of float32"),
        ("clip = 1.0", 'clip = [{ rule = "AutoClip", quantile = 1.0 }]', "AutoClip.quantile must be"),
        ("clip = 1.0", 'clip = [{ rule = "ZClip", max_norm = "x" }]', "ZClip.max_norm must be"),
        ("clip = 1.0", 'clip = 1.0, spike = { rule = "SpikeGuard", window = 0 }', "SpikeGuard.window must"),
        ("clip = 1.0", 'clip = 1.0, spike = "drop"', "spike must be None, 'skip', 'clip', SpikeGuard(...)"),
        ("value = inf", f"value = {10**400}", "events.value must be a number that fits in float64"),
        ("value = inf", f"value = 1{'0' * 5000}", "mine.toml is not valid TOML"),
        ("[[scenario]]", "[scenario]", "scenario must be a list of tables"),
        ("clip = 1.0", 'clip = { rule = "AdaptiveGradClip", exclude = ["head.*"] }',
         "AdaptiveGradClip.exclude must be patterns that each match a parameter; got 'head.*'. The param"),
        ("steps = 30", "steps = 30\ncompiled_in = 3", "compiled_in must be the name of a scenario; got 3"),
        ("skips = 2", "moved = 0.1", "expected: expected.moved must be a list of numbers, one per tensor"),
        ("skips = 2", "moved = [0.1, -1]", "expected.moved must be a finite number at least 0; got -1"),
        ("skips = 2", "moved = [0.1]", "('mine'): expected.moved must be 2 numbers, one per tensor"),
    ],
)  # fmt: skip
def test_an_error_in_a_file_is_named_and_nothing_is_written(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    assert GOOD.count(old) >= 1
    file, out = tmp_path / "mine.toml", tmp_path / "out.json"
    file.write_text(GOOD.replace(old, new, 1))
    result = compare("--config", file, "--json", out, *FAST)
    assert result.exit_code == 2, result.output
    assert message in plain(result).replace("│ ", "")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.toml"]


# ----------------------------------------------------------------------- every rule in TOML

CLIP = {
    "AdaptiveGradClip": """{ rule = "AdaptiveGradClip", clipping = 0.05, exclude = ["1", "2*"],
                             output_axis = "last" }""",
    "AdaGC": '{ rule = "AdaGC", clip_ratio = 1.1, warmup_steps = 8 }',
    "AutoClip": '{ rule = "AutoClip", quantile = 0.5, window = 16 }',
    "ZClip": '{ rule = "ZClip", max_norm = "none", warmup_steps = 8 }',
    "ClipByGlobalNorm": '{ rule = "ClipByGlobalNorm", max_norm = 0.5 }',
    "ClipByNorm": '{ rule = "ClipByNorm", max_norm = 0.3 }',
    "ClipByValue": '{ rule = "ClipByValue", max_value = 0.1 }',
    "ClipUpdateRMS": '{ rule = "ClipUpdateRMS", max_rms = 0.05 }',
    "ClipUpdateRMS, absolute": '{ rule = "ClipUpdateRMS", max_rms = 0.005, per_lr = false }',
}
LOSS_SCALE = {
    "StaticLossScale": '{ rule = "StaticLossScale", scale = 256.0 }',
    "DynamicLossScale": """{ rule = "DynamicLossScale", growth_interval = 9, hysteresis = 2,
                             hysteresis_refill = "growth" }""",
    "LogMaxLossScale": '{ rule = "LogMaxLossScale", std_factor = 2.0 }',
    "UnderflowAwareLossScale": '{ rule = "UnderflowAwareLossScale", init_scale = 4.0 }',
}
SPIKE = {
    "SpikeGuard": """{ rule = "SpikeGuard", window = 16, min_samples = 8, watch = ["grad_norm"],
                       action = "clip" }""",
    "SpikeGuard, both": """{ rule = "SpikeGuard", window = 16, min_samples = 8,
                             watch = ["loss", "grad_norm"] }""",
    "MeanStdSpikeGuard": '{ rule = "MeanStdSpikeGuard", window = 16, min_samples = 8, watch = "grad_norm" }',
}
RULES = [
    *(f"clip = {text}" for text in CLIP.values()),
    "clip = [{}]".format(", ".join(text for name, text in CLIP.items() if "absolute" not in name)),
    *(f"loss_scale = {text}" for text in LOSS_SCALE.values()),
    *(f"spike = {text}" for text in SPIKE.values()),
]
OWN = """
[[scenario]]
name = "mine"
steps = 40
magnitude = 0.1
jitter = 0.2
optimizer = { name = "sgd", lr = 0.1 }
tensors = [{ shape = [4, 3] }, { shape = [2] }, { shape = [3] }]
events = [
  { step = 12, tensor = 0, value = nan },
  { step = 20, until = 21, tensor = "all", factor = 100.0 },
]
"""
THREE = ["--backend", "numpy", "--backend", "torch", "--backend", "jax-jit"]


# One rule of each kind; the built-in streams have every rule too.
ALWAYS = ("ClipByValue", "AutoClip", "ClipUpdateRMS", "UnderflowAwareLossScale", "SpikeGuard")


def rule_of(text: str) -> str:
    """The rule's name; all of them together are ``all``."""
    return text.split('"')[1] if "[{" not in text else "all"


@pytest.mark.parametrize(
    "text", only({rule_of(t): t for t in RULES if rule_of(t) in ALWAYS}.values(), RULES), ids=rule_of
)
def test_every_rule_runs_from_a_file(tmp_path: Path, text: str) -> None:
    """A rule works in [guard] and in a scenario's guard; all frameworks agree, and the rule has an effect."""
    text = " ".join(text.split())
    over, own, out = tmp_path / "over.toml", tmp_path / "own.toml", tmp_path / "out.json"
    over.write_text(f"[guard]\n{text}\n{OWN}")
    own.write_text(f"{OWN}guard = {{ {text} }}\n")
    (one,), (two,) = (read_scenario_file(file).scenarios for file in (over, own))
    assert repr(one) == repr(two)  # NaN is not equal to itself
    assert GuardConfig.from_dict(one.guard.to_dict()) == one.guard
    result = compare("--config", own, "--json", out, *THREE)
    assert result.exit_code == 0, result.output
    (scenario,) = strict(out.read_text())["scenarios"]
    assert scenario["guard"] == one.guard.to_dict()
    assert set(scenario["guarded"]) == {"numpy", "torch", "jax-jit"}
    bare = run_guarded(dataclasses.replace(one, guard=GuardConfig()), BACKENDS["numpy"])
    ruled = run_guarded(one, BACKENDS["numpy"])
    assert bare.skipped == 1
    static = "StaticLossScale" in text
    assert (
        static
        or not all(map(np.array_equal, bare.params, ruled.params))
        or (ruled.final_loss_scale != bare.final_loss_scale)
    )


def test_the_files_above_have_every_rule() -> None:
    for listed, rules in (
        (CLIP, CLIP_RULES),
        (LOSS_SCALE, LOSS_SCALES),
        (SPIKE, (SpikeGuard, MeanStdSpikeGuard)),
    ):
        assert {rule.__name__ for rule in rules} == {name.split(",")[0] for name in listed}


def test_a_rule_over_the_built_in_streams(tmp_path: Path) -> None:
    file = tmp_path / "rule.toml"
    file.write_text(
        '[guard]\nspike = "skip"\nclip = [{ rule = "ZClip", max_norm = "none" }, { rule = "AdaGC" }]\n'
    )
    asked = [part for name in ("clean", "bad-200", "fp16-leaves") for part in ("--scenario", name)]
    result = compare("--config", file, *asked, *FAST)
    assert result.exit_code == 0, result.output
    assert "all backends agree" in result.output


def test_scenarios_whose_tensors_the_guard_does_not_fit_are_left_out(tmp_path: Path) -> None:
    file, out = tmp_path / "rule.toml", tmp_path / "out.json"
    file.write_text(
        '[guard]\nclip = [{ rule = "AdaptiveGradClip", exclude = ["3"], output_axis = "last" }]\n'
    )
    asked = [part for name in ("clean", "digits-mlp", "empty-tree") for part in ("--scenario", name)]
    result = compare("--config", file, *asked, "--json", out, "--backend", "numpy")
    assert result.exit_code == 0, result.output
    reason = "AdaptiveGradClip.exclude must be patterns that each match a parameter; got '3'. The parameters"
    assert f"left out: clean. {reason} are 0, 1, 2." in plain(result)
    assert f"left out: empty-tree. {reason} are none." in plain(result)
    document = strict(out.read_text())
    assert [s["name"] for s in document["scenarios"]] == ["digits-mlp"]
    assert list(document["unfit"]) == ["clean", "empty-tree"]
    result = compare("--config", file, "--scenario", "clean", "--backend", "numpy")
    assert result.exit_code == 2
    assert f"[guard] fits none of the requested scenarios; for clean: {reason}" in plain(result).replace(
        "│ ", ""
    )
    # For scenarios of the file this is an error of the file.
    file.write_text(file.read_text() + '[[scenario]]\nname = "mine"\n')
    result = compare("--config", file, "--backend", "numpy")
    assert result.exit_code == 2
    assert f"scenario 1 ('mine'): {reason}" in plain(result).replace("│ ", "")


@pytest.mark.slow(reason="runs every scenario; what is compiled once is for the time of `make conformance`")
def test_a_run_of_all_does_not_compile_the_same_rules_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = {name: SCENARIOS[name] for name in ("agc", "zclip", "level-shift")}
    monkeypatch.setattr(session, "SCENARIOS", some)
    asked = ["--backend", "numpy", "--backend", "torch-compiled"]
    out = tmp_path / "out.json"
    result = compare(*asked, "--json", out)
    assert result.exit_code == 0, result.output
    assert "agc, zclip, level-shift: not on torch-compiled, because all-rules compiles the same" in plain(
        result
    )
    document = strict(out.read_text())
    assert [list(s["guarded"]) for s in document["scenarios"]] == [["numpy"]] * 3
    # By name it is run.
    result = compare(*asked, "--scenario", "agc", "--json", out)
    assert result.exit_code == 0, result.output
    (scenario,) = strict(out.read_text())["scenarios"]
    assert list(scenario["guarded"]) == ["numpy", "torch-compiled"]


def test_another_distance_than_the_expected_one_exits_1(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(GOOD.replace("skips = 2", "moved = [0.25, 0.25]"))
    result = compare("--config", file, "--backend", "numpy")
    assert result.exit_code == 1
    assert "mine, numpy: expected that the tensors move by 0.25, 0.25, got 0." in plain(result)


def test_the_streams_of_the_rules_as_text_read_back_equal(tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"
    file.write_text(to_toml(RULE_STREAMS), encoding="utf-8")
    assert list(map(repr, read_scenario_file(file).scenarios)) == list(map(repr, RULE_STREAMS))


# ---------------------------------------------------------------------- disagreement, output


@pytest.fixture
def liar(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend ``torch-foreach`` that computes as NumPy does but reports a wrong scale from step 7 on."""

    class Liar(numpy_run.GuardedRun):
        @property
        def last(self) -> Any:
            seen = dict(super().last)
            return seen | {"loss_scale": seen["loss_scale"] * (2.0 if seen["step"] >= 7 else 1.0)}

    module = types.ModuleType("stablenum_test_liar")
    module.start = lambda setup, mode: (  # type: ignore[attr-defined]
        numpy_run.PlainRun(setup) if setup.guard is None else Liar(setup)
    )
    monkeypatch.setitem(sys.modules, module.__name__, module)
    backend = backends_module.Backend(
        name="torch-foreach", about="", framework="liar", module=module.__name__, mode="", needs=()
    )
    monkeypatch.setitem(BACKENDS, "torch-foreach", backend)


@pytest.fixture
def zero_stepper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend ``torch-foreach`` that takes an optimizer step on zero gradients where it should skip."""

    class ZeroStepper(torch_run.GuardedRun):
        def _finish_step(self, loss: float | None) -> None:
            super()._finish_step(loss)
            if not self.last["applied"]:
                for p in self._params:
                    p.grad = torch.zeros_like(p)
                self._guarded.inner.step()

    module = types.ModuleType("stablenum_test_zero_stepper")
    module.start = lambda setup, mode: (  # type: ignore[attr-defined]
        torch_run.PlainRun(setup, mode) if setup.guard is None else ZeroStepper(setup, mode)
    )
    monkeypatch.setitem(sys.modules, module.__name__, module)
    backend = backends_module.Backend(
        name="torch-foreach", about="", framework="zero", module=module.__name__, mode="foreach", needs=()
    )
    monkeypatch.setitem(BACKENDS, "torch-foreach", backend)


@pytest.mark.usefixtures("zero_stepper")
@pytest.mark.parametrize("name", only(["single-inf"], ["single-inf", "single-nan"]))
def test_a_step_on_zero_gradients_is_no_skip(name: str) -> None:
    result = compare("--scenario", name, *FAST)
    assert result.exit_code == 1
    expected = (
        f"{name}, torch-foreach, step 20, params[0] after a skip: numpy has unchanged, "
        "torch-foreach has changed"
    )
    assert expected in plain(result)


@pytest.mark.usefixtures("liar")
def test_a_disagreement_is_shown_and_exits_1(tmp_path: Path) -> None:
    out, figure, page = tmp_path / "out.json", tmp_path / "out.png", tmp_path / "out.html"
    result = compare("--scenario", "single-inf", "--json", out, "--plot", figure, "--html", page, *FAST)
    assert result.exit_code == 1
    expected = "single-inf, torch-foreach, step 7, loss_scale: numpy has 1, torch-foreach has 2"
    assert expected in plain(result)
    assert "backends disagree in 1" in result.output
    document = strict(out.read_text())
    assert document["ok"] is False
    assert document["scenarios"][0]["guarded"]["torch-foreach"]["disagreement"] == expected
    assert figure.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    html = page.read_text(encoding="utf-8")
    assert f'<td class="no" title="{expected}">✗ disagrees</td>' in html
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html)
    (runs,) = strict(data)["scenarios"]
    assert [run["name"] for run in runs] == [
        "with the guard, numpy", "with the guard, torch-foreach", "without a guard",
    ]  # fmt: skip


def test_json_is_strict_and_complete_and_the_plot_is_a_png(tmp_path: Path) -> None:
    out, figure = tmp_path / "out.json", tmp_path / "out.png"
    names = ["deep-1-to-10-overflow", "bce-saturated", "empty-tree"]
    asked = [part for name in names for part in ("--scenario", name)]
    result = compare(*asked, "--json", out, "--plot", figure, *FAST)
    assert result.exit_code == 0, result.output
    document = strict(out.read_text())
    assert document["ok"] is True
    assert {"python", "stablenum", "numpy", "torch", "jax", "optax"} <= set(document["versions"])
    assert [s["name"] for s in document["scenarios"]] == names
    overflow, saturated, empty = document["scenarios"]
    assert overflow["numpy_steps"][0]["grad_norm"] == "inf"
    assert overflow["guarded"]["numpy"]["outcome"] == "stops"
    assert saturated["plain"]["torch-foreach"]["outcome"] == "dies"
    assert list(empty["left_out"]) == ["torch-foreach"]
    assert figure.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "out.png"]


def test_the_page_has_every_verdict_and_says_what_was_left_out(tmp_path: Path) -> None:
    page = tmp_path / "out.html"
    names = ["single-inf", "bce-saturated", "empty-tree"]
    asked = [part for name in names for part in ("--scenario", name)]
    result = compare(*asked, "--html", page, *FAST)
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1] == f"wrote {page}"
    html = page.read_text(encoding="utf-8")
    assert re.findall(r'<a href="#scenario-\d">([^<]+)</a>', html) == names
    assert html.count("✓</span>") == 2
    why = "torch.optim rejects an empty parameter list"
    assert f'<td class="soft" title="{why}">–</td>' in html
    assert f"empty-tree: not on torch-foreach, because {why}." in html
    for name in names:
        assert SCENARIOS[name].about in html
    assert "Skipped: steps 20 to 21, 40 (<code>NONFINITE_LOSS</code>" in html
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html)
    for runs in strict(data)["scenarios"]:
        assert [(run["name"], run.get("bare", False)) for run in runs] == [
            ("with the guard", False), ("without a guard", True),
        ]  # fmt: skip


def test_wall_times_are_rounded_to_milliseconds() -> None:
    backends = [BACKENDS["numpy"]]
    result = run_scenario(SCENARIOS["single-inf"], backends)
    for trace in (*result.plain.values(), *result.guarded.values()):
        trace.seconds = 1.23456
    plain = to_plain([result], backends=backends, absent={}, unfit={}, versions={}, seconds=2.46912)
    document = strict(json.dumps(plain))
    (scenario,) = document["scenarios"]
    assert scenario["plain"]["numpy"]["seconds"] == scenario["guarded"]["numpy"]["seconds"] == 1.235
    assert document["seconds"] == 2.5


def test_accuracies_are_shown_where_the_goal_is_relative_to_training_without_faults() -> None:
    backends = [BACKENDS["numpy"]]
    model, stream = (run_scenario(SCENARIOS[name], backends) for name in ("bce-saturated", "single-inf"))

    def printed(*results: Any) -> str:
        console = Console(file=io.StringIO(), width=120)
        print_report(console, results, backends, {})
        return console.file.getvalue()

    assert "Accuracy" not in printed(model, stream)
    model.clean = model.plain
    _, accuracies = printed(model, stream).split("Accuracy on held-out digits")
    assert "bce-saturated" in accuracies
    assert "single-inf" not in accuracies


def test_an_interrupted_run_keeps_the_old_file_and_leaves_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.json"
    out.write_text("old")

    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    result = compare("--scenario", "single-inf", "--json", out, *FAST)
    assert result.exit_code != 0
    assert out.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_adapters_warnings_are_kept(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    compare("--scenario", "adam-1e-50-fp16", "--json", out, *FAST)
    (scenario,) = strict(out.read_text())["scenarios"]
    assert any("eps" in warning for warning in scenario["guarded"]["torch-foreach"]["warnings"])


def test_adam_and_adamw_have_the_usual_tolerance_of_adam(tmp_path: Path) -> None:
    for name, params in (("sgd", 1e-5), ("adam", 1e-4), ("adamw", 1e-4)):
        file = tmp_path / f"{name}.toml"
        file.write_text(f'[[scenario]]\nname = "x"\noptimizer = "{name}"\n')
        (stream,) = read_scenario_file(file).scenarios
        assert stream.tolerance.params == params


def test_text_from_a_file_is_not_markup(tmp_path: Path) -> None:
    file, figure = tmp_path / "mine.toml", tmp_path / "out.png"
    file.write_text('[[scenario]]\nname = "[/x]$\\\\y$"\nabout = "see [/foo] and [bold]"\nsteps = 3\n')
    result = compare("--config", file, "--list")
    assert result.exit_code == 0, result.output
    assert "see [/foo] and [bold]" in plain(result)
    result = compare("--config", file, "--plot", figure, *FAST)
    assert result.exit_code == 0, result.output
    assert "[/x]$" in result.output
    assert figure.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


# ------------------------------------------------------------------------------------ targets

SHORT = ["--scenario", "empty-tree", "--backend", "numpy"]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_a_result_has_the_permissions_of_a_new_file(tmp_path: Path, umask: int, mode: int) -> None:
    out, before = tmp_path / "out.json", os.umask(umask)
    try:
        result = compare(*SHORT, "--json", out)
        assert os.umask(umask) == umask  # the command leaves the process's own as it was
    finally:
        os.umask(before)
    assert result.exit_code == 0, result.output
    assert out.stat().st_mode & 0o777 == mode


@pytest.mark.parametrize("there", [True, False])
def test_a_link_is_kept_and_its_target_is_written(tmp_path: Path, there: bool) -> None:
    (tmp_path / "far").mkdir()
    target, link = tmp_path / "far" / "real.json", tmp_path / "link.json"
    if there:
        target.write_text("old")
    link.symlink_to(target)
    result = compare(*SHORT, "--json", link)
    assert result.exit_code == 0, result.output
    assert link.is_symlink()
    assert strict(target.read_text())["ok"] is True
    assert [path.name for path in target.parent.iterdir()] == ["real.json"]


def test_each_column_of_the_plot_has_its_scenario_above_and_the_steps_below(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stablenum.commands.compare import plot

    figures: list[Any] = []
    monkeypatch.setattr(plot.plt, "close", figures.append)
    names = ["single-inf", "hysteresis"]
    plot.draw([run_scenario(SCENARIOS[n], [BACKENDS["numpy"]]) for n in names], tmp_path / "plot.png")
    monkeypatch.undo()
    (figure,) = figures
    panels = figure.axes
    assert [panel.get_title() for panel in panels] == [*names, *[""] * 6]
    assert [panel.get_xlabel() for panel in panels] == [*[""] * 6, "step", "step"]
    assert [panel.get_ylabel() for panel in panels[::2]] == [
        "loss", "gradient norm", "loss scale", "skipped so far",
    ]  # fmt: skip
    for panel in panels[-2:]:  # steps are skipped as a whole
        assert all(tick == round(tick) for tick in panel.get_yticks())
    plot.plt.close(figure)


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_named_pipe_is_written_to(tmp_path: Path, option: str) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()), daemon=True)
    reader.start()
    result = compare(*SHORT, option, pipe)
    reader.join(timeout=30)
    assert result.exit_code == 0, result.output
    assert pipe.is_fifo()
    assert got[0].startswith(b"{" if option == "--json" else b"\x89PNG")


def test_dev_null_stays(tmp_path: Path) -> None:
    assert compare(*SHORT, "--json", "/dev/null").exit_code == 0
    assert Path("/dev/null").is_char_device()


def test_dev_stdout_as_a_pipe_and_as_a_file(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "stablenum", "compare", *SHORT, "--json", "/dev/stdout"]
    piped = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    file = tmp_path / "out.txt"
    with file.open("w") as out:
        subprocess.run(command, stdout=out, check=True)
    for text in (piped, file.read_text()):
        before, _, rest = text.partition("{\n")
        body, _, after = rest.partition("\n}\n")
        assert "nothing to compare" in before
        assert strict("{" + body + "}")["ok"] is True
        assert after == "wrote /dev/stdout\n"


def test_a_folder_that_is_not_writable_is_reported_before_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("nothing should run")

    # Permissions do not apply to the superuser, so the check is replaced instead of setting them.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    monkeypatch.setattr(session, "run_scenario", never)
    result = compare(*SHORT, "--json", tmp_path / "out.json")
    assert result.exit_code == 2
    assert "cannot be written to" in plain(result).replace("│ ", "")


def test_a_cycle_of_links_is_a_usage_error_or_replaced(tmp_path: Path) -> None:
    link = tmp_path / "circle"
    link.symlink_to(link)
    result = compare(*SHORT, "--json", link)
    assert result.exit_code in (0, 2)  # Python 3.13 resolves it to itself
    assert result.exception is None or isinstance(result.exception, SystemExit)
