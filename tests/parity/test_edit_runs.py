"""Remedies of ``stablenum explain``, tried by another run of the script with the user's own line changed."""

import json
import subprocess
import sys

import pytest

from stablenum.commands.explain import edit_runs
from stablenum.commands.explain.runner import explain
from stablenum.diagnosis.watch.plan import Plan

TORCH = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 3)
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(40):
    x = torch.randn(8, 4)
    mask = torch.rand(8) > 0.3
    if step == 12:
        mask[:] = False
    per = model(x).square().mean(-1)
    loss = (per * mask).sum() / mask.sum()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
JAX = """
import jax, jax.numpy as jnp, optax
from losses import masked_mean
w = jax.random.normal(jax.random.key(9), (4, 3))
tx = optax.adam(1e-2)
state = tx.init(w)

@jax.jit
def train(w, state, x, mask):
    loss, g = jax.value_and_grad(lambda w: masked_mean(jnp.mean((x @ w) ** 2, -1), mask))(w)
    up, state = tx.update(g, state, w)
    return optax.apply_updates(w, up), state, loss

key = jax.random.key(0)
for step in range(40):
    key, k = jax.random.split(key)
    x = jax.random.normal(k, (8, 4))
    mask = (x[:, 0] > -0.5).astype(jnp.int32) * (step != 12)
    w, state, loss = train(w, state, x, mask)
"""
LOSSES = """
def masked_mean(per, mask):
    return (per * mask).sum() / mask.sum()
"""


def run(*arguments, cwd):
    command = [sys.executable, "-m", "stablenum", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=280)


RUNS = pytest.mark.slow(reason="runs a script several times")


def explained(tmp_path, source, *options):
    (tmp_path / "train.py").write_text(source)
    (tmp_path / "losses.py").write_text(LOSSES)
    done = run("explain", "train.py", "--json", "report.json", *options, cwd=tmp_path)
    return done, json.loads((tmp_path / "report.json").read_text())


def test_a_masked_mean_in_torch_is_mended_in_the_users_own_line(tmp_path):
    done, report = explained(tmp_path, TORCH)
    assert done.returncode == 1
    assert report["verdict"]["patch"] == [
        "+ import stablenum_torch",
        "- loss = (per * mask).sum() / mask.sum()",
        "+ loss = stablenum_torch.numerics.divide((per * mask).sum(), mask.sum(), fill=0.0)",
    ]
    said = report["verdict"]["trial"]
    assert said.startswith(
        "tried: with this change step 12 is finite, and so are the 12 steps after it; the 12 losses before "
        "it are the same; the loss is"
    )
    assert (tmp_path / "train.py").read_text() == TORCH
    assert "    + import stablenum_torch\n" in done.stdout


def test_a_masked_mean_in_a_module_of_jax_is_mended_where_it_is_written(tmp_path):
    done, report = explained(tmp_path, JAX)
    assert done.returncode == 1
    assert report["evidence"]["findings"][0]["place"]["file"] == "losses.py"
    assert report["verdict"]["patch"][-1] == (
        "+ return stablenum_jax.numerics.divide((per * mask).sum(), mask.sum(), fill=0.0)"
    )
    assert "call 12 is finite, and so are the 12 calls after it" in report["verdict"]["trial"]
    assert (tmp_path / "losses.py").read_text() == LOSSES


@RUNS
def test_a_safe_form_that_does_not_help_is_not_offered(tmp_path):
    """The next line fails for another reason."""
    more = "    loss = loss + (float('nan') if step == 12 else 0.0)\n    opt.zero_grad"
    _, report = explained(tmp_path, TORCH.replace("    opt.zero_grad", more))
    assert report["verdict"]["patch"] == []
    assert report["verdict"]["code"] == ""
    said = report["verdict"]["trial"]
    assert said.startswith(
        "not tried; a change of the line was, without success: with stablenum_torch.numerics.divide("
    )
    assert said.endswith("step 12 still fails")


@RUNS
def test_two_lines_that_fail_in_one_step_are_changed_together(tmp_path):
    more = "    loss = loss + per.mean() / mask.sum()\n    opt.zero_grad"
    _, report = explained(tmp_path, TORCH.replace("    opt.zero_grad", more))
    assert [line for line in report["verdict"]["patch"] if line.startswith("+")] == [
        "+ import stablenum_torch",
        "+ loss = stablenum_torch.numerics.divide((per * mask).sum(), mask.sum(), fill=0.0)",
        "+ loss = loss + stablenum_torch.numerics.divide(per.mean(), mask.sum(), fill=0.0)",
    ]
    assert report["verdict"]["trial"].startswith("tried: with these 2 changes step 12 is finite, and so are")


GROWING = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(30):
    x = torch.randn(16, 4)
    rate = (model(x) * (200 if step == 9 else 1)).exp()
    loss = (rate - x[:, :1].abs()).square().mean().clamp(max=50.0)
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
ANGLES = """
import jax, jax.numpy as jnp, optax
w = jnp.array([0.2, 0.1])
tx = optax.adam(1e-2)
state = tx.init(w)
@jax.jit
def train(w, state, x):
    loss, g = jax.value_and_grad(lambda w: jnp.mean((jnp.arcsin(x @ w) - x[:, 0]) ** 2))(w)
    up, state = tx.update(g, state)
    return optax.apply_updates(w, up), state, loss
for step in range(30):
    x = jax.random.uniform(jax.random.key(step), (16, 2))
    w, state, loss = train(w, state, x * (20.0 if step == 9 else 1.0))
"""


@RUNS
@pytest.mark.parametrize(
    ("source", "after"),
    [
        (GROWING, "torch.clamp(model(x) * (200 if step == 9 else 1), max=44)"),
        (ANGLES, "jnp.arcsin(jnp.clip(x @ w, min=-0.999999, max=0.999999))"),
    ],
    ids=["torch", "jax"],
)
def test_an_argument_is_clamped_where_there_is_no_safe_function(source, after, tmp_path):
    done, report = explained(tmp_path, source)
    assert after in report["verdict"]["patch"][-1], done.stdout
    assert report["verdict"]["trial"].startswith("tried: with this change")


@RUNS
def test_a_change_after_which_the_loss_runs_away_is_not_offered(tmp_path):
    source = TORCH.replace(
        "    opt.zero_grad", "    loss = loss * (1 + 1e6 * (step > 12))\n    opt.zero_grad"
    )
    _, report = explained(tmp_path, source)
    assert report["verdict"]["patch"] == []
    assert "step 12 is finite" in report["verdict"]["trial"]


@RUNS
def test_a_trial_that_does_not_end_is_ended(tmp_path, monkeypatch):
    """Newton's method ended at a NaN; a safe quotient lets it go on without end."""
    source = """
import torch
w = torch.tensor(0.5, requires_grad=True)
opt = torch.optim.SGD([w], lr=0.1)
for step in range(3):
    x = w * 1.0
    while (x * x - 2.0).abs() > 1e-3:
        x = x - (x * x - 2.0) / (x - 1.0).clamp(min=0.0)
    opt.zero_grad()
    x.square().backward()
    opt.step()
"""
    (tmp_path / "train.py").write_text(source)
    monkeypatch.setattr(edit_runs, "_MORE_SECONDS", 1.0)
    monkeypatch.setattr(edit_runs, "_TIMES_AS_LONG", 0)
    found = explain(Plan(script=str(tmp_path / "train.py")), lambda text: None)
    assert found.report.verdict.patch == ()
    assert "nothing is known, because the script did not get there in 1 s" in found.report.verdict.trial


@RUNS
def test_words_alone_are_not_said_to_be_tried(tmp_path):
    source = TORCH.replace("mask[:] = False", "x[0, 0] = float('nan')")
    _, report = explained(tmp_path, source)
    assert report["verdict"]["trial"] == "not tried: it is not a change of one expression"


def test_once_leaves_the_remedy_untried(tmp_path):
    _, report = explained(tmp_path, TORCH, "--once")
    assert report["verdict"]["trial"] == "not tried: --once allows one run"


@pytest.mark.parametrize("option", [pytest.param("--json", marks=RUNS), "--html"])
def test_the_reports_are_written_when_nothing_was_found(tmp_path, option):
    """A report of yesterday would say that something is wrong."""
    name = f"report.{option.removeprefix('--')}"
    (tmp_path / name).write_text('{"ok": false}')
    (tmp_path / "train.py").write_text(TORCH.replace("mask[:] = False", "pass"))
    done = run("explain", "train.py", option, name, "--seed", "3", cwd=tmp_path)
    text = (tmp_path / name).read_text()
    assert done.returncode == 0
    if option == "--json":
        report = json.loads(text)
        assert report["ok"]
        assert report["summary"] == "nothing went wrong in 40 optimizer steps"
        made_by = report["about"]
        assert (made_by["format"], made_by["tool"], made_by["seed"]) == (1, "explain", 3)
        assert made_by["frameworks"]["torch"].startswith("2.")
        assert made_by["command"][:3] == ["stablenum", "explain", "train.py"]
    else:
        assert "<h1>Nothing found</h1>" in text
        assert "explain train.py" in text


@pytest.mark.parametrize("command", ["explain", "checkup"])
def test_a_script_that_fails_has_its_own_exit_code_and_reports(tmp_path, command):
    (tmp_path / "train.py").write_text("import torch\nraise SystemExit(7)\n")
    (tmp_path / "report.json").write_text('{"ok": true}')
    done = run(command, "train.py", "--json", "report.json", cwd=tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    assert done.returncode == 3
    assert (report["ok"], report["exit_code"]) == (False, 7)
    assert report["about"]["tool"] == command


@RUNS
def test_a_relative_import_is_hinted_at_and_places_are_relative_under_m(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "losses.py").write_text(LOSSES)
    source = TORCH.replace("(per * mask).sum() / mask.sum()", "masked_mean(per, mask)")
    (tmp_path / "package" / "train.py").write_text(f"from .losses import masked_mean\n{source}")
    done = run("explain", "package/train.py", cwd=tmp_path)
    assert done.returncode == 3
    assert "run it by its module's name, with -m package.module" in done.stderr
    done = run("explain", "-m", "package.train", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout.startswith("package/losses.py:3: div gives NaN")
    assert str(tmp_path) not in done.stdout


@pytest.mark.parametrize("command", ["explain", "checkup", "diff", "report", "verify"])
def test_a_missing_file_is_one_sentence(tmp_path, command):
    done = run(command, "missing.py", cwd=tmp_path)
    assert done.returncode == 2
    said = " ".join(done.stderr.replace("│", " ").split())
    assert "there is no file" in said
    assert "'missing.py'" in said


def test_a_notebook_is_not_run_and_the_way_is_said(tmp_path):
    (tmp_path / "train.ipynb").write_text("{}")
    done = run("explain", "train.ipynb", cwd=tmp_path)
    assert done.returncode == 2
    assert "jupyter nbconvert --to script train.ipynb" in " ".join(done.stderr.replace("│", " ").split())
