"""``stablenum explain``: its report on scripts that fail, and that other scripts run unchanged."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import stablenum
from stablenum import cli
from stablenum.commands.explain import child
from stablenum.commands.explain.runner import Explained, explain
from stablenum.diagnosis import Cause, Report
from stablenum.diagnosis.replay.judge import Evidence
from stablenum.diagnosis.watch.imports import AfterImport
from stablenum.diagnosis.watch.plan import Failure, Outcome, Plan
from stablenum.diagnosis.watch.session import Session
from tests.forking import FRESH
from tests.selection import only

SCRIPTS = Path(__file__).parents[1] / "scripts"


def command(*arguments: object, cwd: Path = SCRIPTS) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "stablenum", "explain", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, cwd=cwd, timeout=280)


def test_a_script_finds_the_packages_where_they_are_not_installed(monkeypatch):
    monkeypatch.setattr(sys, "path", ["elsewhere"])
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    child._as_python_would(Plan(script=str(SCRIPTS / "torch_log.py")))
    assert sys.path == [str(SCRIPTS), str(Path(stablenum.__file__).parents[1])]


def bad_line(script: str, which: str = "") -> int:
    lines = (SCRIPTS / script).read_text(encoding="utf-8").splitlines()
    (line,) = (i for i, line in enumerate(lines, 1) if line.rstrip().endswith(f"# BAD {which}".rstrip()))
    return line


def explained(script: str, *arguments: str, **plan: Any) -> tuple[Explained, list[str]]:
    said: list[str] = []
    made = Plan(script=str(SCRIPTS / script), arguments=arguments, **plan)
    return explain(made, said.append), said


def assert_found(report: Report | None, script: str, cause: Cause, operation: str, which: str = "") -> None:
    assert report is not None
    assert report.verdict.cause is cause, str(report)
    assert report.findings[0].operation == operation
    first = re.search(r"(\S+\.py):(\d+)", str(report))
    assert first is not None
    assert Path(first[1]).name == script
    assert int(first[2]) == bad_line(script, which), str(report)


# ---------------------------------------------------------------------------------- scripts that fail


def test_the_failing_step_of_a_torch_script_is_recorded_in_a_second_run(tmp_path):
    page, data = tmp_path / "report.html", tmp_path / "report.json"
    result = command("torch_log.py", "--json", data, "--html", page, "--", "0.3")
    assert result.returncode == 1, result.stderr
    # The first run's own output, once, up to the step after the failing one; then the report.
    assert result.stdout.splitlines()[:4] == [
        "step 1 True",
        "step 2 True",
        "step 3 True",
        f"torch_log.py:{bad_line('torch_log.py')}: the derivative of log gives -inf (backward)",
    ]
    assert result.stdout.count("step 1") == 1
    assert "gradients of 0.weight, 0.bias are not finite in step 2; running the script again" in result.stderr
    report = Report.from_dict(json.loads(data.read_text(encoding="utf-8")))
    assert_found(report, "torch_log.py", Cause.BOUNDARY_DERIVATIVE, "log")
    assert report.evidence.reproduced is True
    assert report.evidence.bad_gradients == ("0.weight", "0.bias")
    assert str(report) in result.stdout
    assert page.read_text(encoding="utf-8") == report.to_html()


def test_a_jitted_call_is_replayed_at_once_although_it_donates():
    result = command("jax_train.py")
    assert result.returncode == 1, result.stderr
    assert f"jax_train.py:{bad_line('jax_train.py')}: log gives -inf" in result.stdout
    assert result.stdout.count("loss 1.09") == 1
    assert "the result of step() is not finite in call" in result.stderr
    assert "running the script again" not in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "arguments", "cause", "operation", "what", "step"),
    [
        ("torch_where.py", (), Cause.WHERE_TRAP, "sqrt", "gradient", 2),
        ("torch_adam.py", (), Cause.OPTIMIZER_STATE, "div", "parameter", 0),
        ("torch_gives_up.py", (), Cause.BATCH, "input", "loss", 2),
        ("torch_library_raises.py", (), Cause.DOMAIN, "div", "error", 1),
        ("torch_two_optimizers.py", (), Cause.BOUNDARY_DERIVATIVE, "sqrt", "gradient", 5),
        ("torch_exploded.py", (), Cause.EXPLODED, "pow", "loss", 4),
        ("jax_eager.py", ("gradient",), Cause.BOUNDARY_DERIVATIVE, "sqrt", "output", 0),
        ("jax_eager.py", ("update",), Cause.OPTIMIZER_STATE, "div", "output", 1),
    ],
)
def test_the_line_and_the_cause_of_a_script_are_right(script, arguments, cause, operation, what, step):
    found, _ = explained(script, *arguments)
    which = arguments[0] if script == "jax_eager.py" else ""
    assert_found(found.report, script, cause, operation, which)
    failure = found.outcome.failure
    assert failure is not None
    assert (failure.what, failure.step) == (what, step)
    assert found.runs == (2 if script.startswith("torch") else 1)


@pytest.mark.slow
def test_once_records_from_the_start_and_needs_no_second_run():
    found, said = explained("torch_where.py", record_from=0)
    assert_found(found.report, "torch_where.py", Cause.WHERE_TRAP, "sqrt")
    assert found.runs == 1
    assert not said
    assert found.report.evidence.reproduced is None


@pytest.mark.slow
def test_a_script_that_catches_everything_and_never_ends_is_left():
    found, _ = explained("torch_never_ends.py")
    assert_found(found.report, "torch_never_ends.py", Cause.DOMAIN, "log")


def test_leaving_a_script_calls_what_ends_the_process():
    session, ended = Session(Plan(script="script.py")), []
    session.leave()  # there is nothing to call yet
    session.on_leave = lambda: ended.append(True)
    session.leave()
    assert ended == [True]


@pytest.mark.slow
def test_a_failure_that_does_not_recur_is_transient(tmp_path):
    found, _ = explained("torch_once_only.py", str(tmp_path / "marker"))
    assert found.report is not None
    assert found.report.verdict.cause is Cause.TRANSIENT
    text = " ".join(str(found.report).split())
    assert text.index("generators that the script does not seed") < text.index("device")
    assert "Not reproduced" in text
    assert "the loss of step 1 is not finite" in str(found.report)


# ---------------------------------------------------------------------------------- scripts that do not


def test_masks_and_a_falling_loss_scale_are_not_failures():
    result = command("torch_healthy.py")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "nothing went wrong in 3 optimizer steps" in result.stderr


@pytest.mark.slow
def test_a_watched_jitted_function_otherwise_behaves_like_one():
    found, _ = explained("jax_healthy.py")
    assert found.outcome.exit_code == 0, found
    assert found.report is None
    assert found.outcome.calls == 7


def written(folder: Path, text: str) -> str:
    (folder / "script.py").write_text(text, encoding="utf-8")
    return "script.py"


def test_a_script_has_the_environment_that_python_gives_it(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "beside.py").write_text("x = 5", encoding="utf-8")
    text = """
import atexit, os, pickle, sys
import beside
class Thing: pass
atexit.register(lambda: print("at exit", beside.x))
print(__name__, __file__, sys.argv, os.getcwd(), sys.path[0])
print(type(pickle.loads(pickle.dumps(Thing()))) is Thing, sys.modules["__main__"].Thing is Thing)
print(sorted({"torch", "jax", "numpy", "rich", "typer"} & set(sys.modules)))
"""
    script = f"sub/{written(tmp_path / 'sub', text)}"
    ours = command(script, "--", "-x", "--json", "a b", cwd=tmp_path)
    theirs = [sys.executable, script, "-x", "--json", "a b"]
    plain = subprocess.run(theirs, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert ours.stdout == plain.stdout
    assert ours.returncode == 0
    assert "nothing was watched" in ours.stderr


def test_a_script_that_seeds_nothing_is_seeded(tmp_path):
    script = written(
        tmp_path, "import random\nimport numpy\nprint(random.random(), numpy.random.rand(), {*'abcd'})"
    )
    runs = [command(script, *seed, cwd=tmp_path).stdout for seed in ((), (), ("--seed", "5"))]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("import sys\nsys.exit(7)", 3, "ended with exit code 7"),
        ("import sys\nsys.exit('no data')", 3, "no data"),
        ("raise ValueError('broken')", 3, "ended with ValueError: broken"),
        (
            "import jax\n@jax.jit\ndef f(x): raise ValueError('broken in a trace')\nf(1.0)",
            3,
            "ended with ValueError: broken in a trace",
        ),
        ("raise SystemExit", 0, "nothing was watched"),
        ("import os\nos._exit(9)", 3, "a sudden exit of its process (exit code 9)"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", 3, "exit code 137"),
        ("x = (", 3, "SyntaxError"),
    ],
)
def test_a_script_that_ends_by_itself_and_fails_is_exit_code_3(tmp_path, text, code, said):
    result = command(written(tmp_path, text), cwd=tmp_path)
    assert result.returncode == code, result.stderr
    assert said in result.stderr


@pytest.mark.parametrize("text", ["", "raise SystemExit"])
def test_a_script_that_ends_without_a_code_has_exit_code_0(tmp_path, text):
    found, _ = explained(str(tmp_path / written(tmp_path, text)))
    assert found.outcome.exit_code == 0


def test_a_traceback_begins_with_the_script(tmp_path):
    result = command(written(tmp_path, "def f():\n    raise KeyError(3)\nf()\n"), cwd=tmp_path)
    frames = re.findall(r'File "(.*)", line', result.stderr)
    assert frames == [str(tmp_path / "script.py")] * 2  # as Python names it


# What a script sees of the process it runs in.
CURIOUS = """
import atexit, inspect, os, signal, sys, threading, traceback, warnings
import {framework}
value: int = 3
class Thing: pass
def shown(kind, error, tb):
    print("hook", kind.__name__, error, [frame.name for frame in traceback.extract_tb(tb)])
sys.excepthook = shown
atexit.register(lambda: print("at exit", __name__, value))
print(sorted(k for k in globals() if k.startswith("__")), __annotations__, type(__loader__).__name__)
print(inspect.getsource(Thing), inspect.getsourcefile(Thing), __file__, sys.argv)
def alarm(*_): raise TimeoutError("alarm")
signal.signal(signal.SIGALRM, alarm)
try:
    signal.setitimer(signal.ITIMER_REAL, 0.2, 10)
    while True: {busy}
except TimeoutError as error:
    signal.setitimer(signal.ITIMER_REAL, 0)
    print(error)
thread = threading.Thread(target=lambda: {busy})
thread.start(); thread.join()
warnings.warn("of the script")
def last():
    {fails}
last()
"""
TRIES = {
    "torch": ("torch.ones(2, requires_grad=True).sum().item()", "torch.ones(2).sum().backward()"),
    "jax": ("sum(range(9))", "jax.jit(lambda x: x.nothing)(1.0)"),
}


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="the script sets an alarm")
@pytest.mark.parametrize("framework", only(["jax"], TRIES))
def test_a_script_sees_and_prints_the_same_as_without_watching(tmp_path, framework):
    busy, fails = TRIES[framework]
    script = written(tmp_path, CURIOUS.format(framework=framework, busy=busy, fails=fails))
    plain = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    ours = command(script, cwd=tmp_path)
    assert ours.returncode == plain.returncode == 1
    assert ours.stdout == plain.stdout
    assert "hook" in ours.stdout
    said = [line for line in ours.stderr.splitlines() if not line.startswith("stablenum: ")]
    assert said == plain.stderr.splitlines()


@pytest.mark.parametrize("framework", only(["torch"], TRIES))
def test_a_watcher_that_cannot_begin_leaves_the_script_alone(tmp_path, monkeypatch, framework):
    monkeypatch.setattr(sys, "executable", FRESH)  # a fork reads no sitecustomize
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys\nsys.modules['stablenum_{framework}._diagnosis.watch'] = None\n", encoding="utf-8"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{Path(stablenum.__file__).parents[1]}")
    result = command(written(tmp_path, f"import sys, {framework}\nprint('ran')\nsys.exit(3)"), cwd=tmp_path)
    assert (result.returncode, result.stdout) == (3, "ran\n"), result.stderr
    text = " ".join(result.stderr.split())
    assert "watching failed once and left the script alone there, first in watch in step 0" in text
    assert f"ImportError: watching {framework}" in text


COPES = """
import math, torch
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(4):
    loss = model(torch.full((1, 2), math.nan if i == 1 else 1.0)).square().sum()
    if math.isfinite(loss.item()):
        optimizer.zero_grad(); loss.backward(); optimizer.step()
"""
COPES_IN_JAX = """
import jax, jax.numpy as jnp
step = jax.jit(jax.value_and_grad(lambda w: jnp.log(w - 1.0).sum()))
for i in range(12):
    step(jnp.full(2, 0.5 if i == 4 else 2.0))
"""
# The first steps overflow because of their loss scale. In step 6 the logarithm is that of 0.
GUARDED = """
import stablenum_torch, torch
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
opt = stablenum_torch.wrap(torch.optim.SGD(model.parameters(), lr=1e-36), loss_scale="dynamic")
for i in range(12):
    x = torch.full((1, 2), -1.0 if i == 6 else 1.0)
    loss = 1e34 * model(torch.log(x + 1.0)).square().sum()
    opt.zero_grad(); opt.backward(loss); opt.step()
"""
# In step 12 a row has no spread, and the guard's windows of 128 losses and norms have 116 unused places.
GUARDED_IN_JAX = """
import jax, jax.numpy as jnp, optax, stablenum_jax
tx = stablenum_jax.guard(optax.adamw(1e-2), clip=1.0, spike="skip")
w = jnp.full((8, 1), 0.1)
state = tx.init(w)
def loss_fn(w, x):
    x = x / jnp.std(x, axis=1, keepdims=True)
    return jnp.mean((x @ w - x.sum(1, keepdims=True)) ** 2)
@jax.jit
def step(w, state, x):
    value, grads = stablenum_jax.value_and_grad(loss_fn, state)(w, x)
    updates, state = tx.update(grads, state, w, value=value)
    return optax.apply_updates(w, updates), state
for i in range(20):
    x = jax.random.normal(jax.random.key(i), (16, 8))
    w, state = step(w, state, x.at[3].set(0.0) if i == 12 else x)
"""


def test_what_was_passed_by_is_mentioned_at_the_end(tmp_path):
    result = command(written(tmp_path, COPES), cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (
        "passed over, because training went on without it: the loss of step 1 is not finite" in result.stderr
    )
    assert "although not every number in them was finite" in result.stderr
    assert "nothing went wrong" not in result.stderr
    assert "--strict reports where that came from, and why" in result.stderr


def test_what_was_passed_by_in_jax_is_mentioned_with_its_line(tmp_path):
    script = written(tmp_path, COPES_IN_JAX)
    result = command(script, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    line = f"the result of <lambda>() is not finite in call 4 ({script}:3: log gives NaN (forward))"
    assert line in result.stderr


@pytest.mark.parametrize(
    ("text", "line", "failure"),
    [
        (COPES, 7, "the loss of step 1 is not finite"),
        (COPES_IN_JAX, 3, "the result of <lambda>() is not finite in call 4"),
        (GUARDED, 8, "the loss of step 6 is not finite"),
        (GUARDED_IN_JAX, 7, "the result of step() is not finite in call 12"),
    ],
    ids=["torch", "jax", "a guard", "a guard in jax"],
)
def test_strict_reports_the_first_value_that_the_script_copes_with(tmp_path, text, line, failure):
    script = written(tmp_path, text)
    result = command("--strict", script, cwd=tmp_path)
    assert result.returncode == 1, result.stdout + result.stderr
    assert failure in result.stderr
    assert result.stdout.startswith(f"{script}:{line}: ")
    assert "Cause:" in result.stdout


def test_a_module_runs_by_its_name(tmp_path):
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("", encoding="utf-8")
    text = "import sys\nfrom . import __name__ as n\nprint(n, __name__, sys.argv[1:])"
    (package / "train.py").write_text(text, encoding="utf-8")
    result = command("-m", "pack.train", "--", "1", cwd=tmp_path)
    assert result.stdout == "pack __main__ ['1']\n", result.stderr


# ---------------------------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.py"], "there is no file 'nowhere.py'"),
        ([str(SCRIPTS / "torch_log.py"), "--json", "no/such/folder.json"], "does not exist"),
        ([], "Usage"),
        (["--what"], "No such option"),
    ],
)
def test_a_usage_error_is_exit_code_2(arguments, said):
    result = CliRunner().invoke(cli.app("explain"), ["explain", *arguments])
    assert result.exit_code == 2
    assert said in " ".join((result.output + result.stderr).split())


@pytest.mark.parametrize("command", ["explain", "checkup"])
@pytest.mark.parametrize(
    ("arguments", "example"),
    [
        (["train.py", "--name", "my run"], " -- --name 'my run'"),
        (["train.py", "--name=x", "--seed", "1"], " -- --name=x --seed 1"),
        (["--seed", "1", "train.py", "-zx"], None),
        (["--name", "x", "train.py"], None),
    ],
)
def test_an_unknown_option_may_be_one_of_the_script(command, arguments, example):
    result = CliRunner().invoke(cli.app("explain", "checkup"), [command, *arguments], prog_name="stablenum")
    said = " ".join((result.output + result.stderr).split())
    assert result.exit_code == 2
    assert "No such option" in said
    assert "Arguments of the script go after '--'" in said
    assert f"'--': stablenum {command} train.py{example}" in said if example else "'--'." in said


def test_other_commands_have_no_script_whose_options_there_could_be():
    result = CliRunner().invoke(cli.app("report", "verify"), ["report", "run.jsonl", "--name"])
    assert "the script" not in result.output + result.stderr


@pytest.mark.parametrize("ending", ["json", "html"])
def test_only_the_files_that_were_asked_for_are_written(tmp_path, monkeypatch, ending):
    report = Report.of(Evidence(framework="jax", loss_finite=True))
    failure = Failure(step=2, what="loss")
    monkeypatch.setattr(
        importlib.import_module("stablenum.commands.explain.command"),
        "run_and_explain",
        lambda plan, say: Explained(outcome=Outcome(failure=failure), report=report, runs=1),
    )
    line = ["explain", str(SCRIPTS / "torch_log.py"), f"--{ending}", str(tmp_path / f"report.{ending}")]
    result = CliRunner().invoke(cli.app("explain"), line)
    assert result.exit_code == 0, result.exception
    assert [path.name for path in tmp_path.iterdir()] == [f"report.{ending}"]


def test_it_is_listed_next_to_the_other_command():
    result = CliRunner().invoke(cli.app("compare", "explain"), ["--help"])
    assert re.search(r"^\s*compare .*\n(.*\n)*\s*explain ", result.output, re.MULTILINE)


# ---------------------------------------------------------------------------------- parts


def test_a_callback_follows_the_import_and_the_package_keeps_its_loader(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "late_package.py").write_text("ready = True", encoding="utf-8")
    seen: list[bool] = []
    finder = AfterImport(
        {
            "late_package": lambda: seen.append(sys.modules["late_package"].ready),
            "json": lambda: seen.append(False),
            "never_there": lambda: seen.append(False),
        }
    )
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    finder.install()
    assert seen == [False]  # json is loaded already
    module = importlib.import_module("late_package")
    assert seen == [False, True]
    assert type(module.__spec__.loader).__name__ == "SourceFileLoader"
    assert module.__loader__ is module.__spec__.loader
    importlib.reload(module)
    assert seen == [False, True]
    with pytest.raises(ModuleNotFoundError, match="never_there"):
        importlib.import_module("never_there")
    del sys.modules["late_package"]


def test_plans_and_outcomes_survive_being_passed_between_processes(tmp_path):
    plan = Plan(
        script="a.py", arguments=("1", "ü"), module=True, seed=3, record_from=7, again=True, ignore=("b",)
    )
    plan.write(tmp_path / "plan.json")
    assert Plan.read(tmp_path / "plan.json") == plan
    outcome = Outcome(steps=3, failure=Failure(step=4, what="loss", names=("a",)), error="x", watched=["jax"])
    assert Outcome.from_dict(json.loads(json.dumps(outcome.to_dict()))) == outcome
    assert Outcome.from_dict(Outcome().to_dict()) == Outcome()


def test_a_failure_says_what_and_when():
    many = tuple(f"layer{i}" for i in range(5))
    assert str(Failure(step=2, what="gradient", names=many)) == (
        "gradients of layer0, layer1, layer2 and 2 more are not finite in step 2"
    )
    assert str(Failure(step=2, what="parameter")) == "parameters are not finite after step 2"
    assert str(Failure(step=2, what="loss")) == "the loss of step 2 is not finite"


def test_a_closure_that_returns_nothing_is_what_a_script_is_told(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "w = torch.nn.Parameter(torch.ones(2))\n"
        "optimizer = torch.optim.LBFGS([w])\n"
        "def closure():\n"
        "    w.grad = torch.ones(2)\n"
        "optimizer.step(closure)\n",
        encoding="utf-8",
    )
    result = command(script)
    assert result.returncode == 3
    assert (
        "the closure given to the optimizer's step returns None: end it with `return loss`" in result.stderr
    )
