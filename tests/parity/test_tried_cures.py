"""The cure of a checkup's first finding is tried in a second run, which is the training that an edit of the
script would have given."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from stablenum.diagnosis.checkup.remedies import Change, Remedy, outcome_of, resumed
from tests.checkups import checked
from tests.selection import thinned

TORCH = """
import torch
from torch import nn

torch.manual_seed(1)
x = torch.randn(64, 8)
y = x @ torch.randn(8, 1)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
losses = []
for step in range(40):
    opt.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    losses.append(loss.item())
    opt.step()
print(*losses)
"""
JAX = """
import jax, jax.numpy as jnp, optax

x = jax.random.normal(jax.random.key(1), (64, 8))
y = x @ jax.random.normal(jax.random.key(2), (8, 1))
keys = jax.random.split(jax.random.key(0))
params = {"a": jax.random.normal(keys[0], (8, 16)) / 3, "b": jax.random.normal(keys[1], (16, 1)) / 4}
tx = optax.adam(1e-2)
state = tx.init(params)

def loss_fn(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"] - y) ** 2)

@jax.jit
def train(params, state, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss

losses = []
for i in range(40):
    params, state, loss = train(params, state, x, y)
    losses.append(float(loss))
print(*losses)
"""


class Case(NamedTuple):
    """A part of a script, the fault that is put in its place, the cure, and how the trial is described."""

    text: str
    part: str
    fault: str
    cure: str
    words: str


ADAM, ADAMW, SGD = (
    "Adam(model.parameters(), lr=1e-2)",
    "AdamW(model.parameters(), lr={})",
    "SGD(model.parameters(), {})",
)
BACKWARD, CLIP = (
    "    loss.backward()\n",
    "    loss.backward()\n    nn.utils.clip_grad_norm_(model.parameters(), {})\n",
)
CLIPPED = "optax.chain(optax.clip_by_global_norm({}), optax.sgd(1e-2))"
CASES = {
    "torch: rate": Case(TORCH, "1e-2", "50.0", "0.5", "0.01 times the rate"),
    "torch: eps": Case(TORCH, "lr=1e-2", "lr=1e-2, eps=100.0", "lr=1e-2", "eps 1e-08"),
    "torch: decay": Case(
        TORCH,
        ADAM,
        ADAMW.format("1e-2, weight_decay=20"),
        ADAMW.format("1e-2, weight_decay=0"),
        "no weight decay",
    ),
    "torch: clipping": Case(
        TORCH.replace(ADAM, SGD.format("lr=1e-2")), BACKWARD, CLIP.format("1e-5"), BACKWARD, "no clipping"
    ),
    "torch: zero_grad": Case(
        TORCH.replace(ADAM, SGD.format("lr=1e-2")),
        "    opt.zero_grad()\n",
        "",
        "    opt.zero_grad()\n",
        "gradients cleared after each step",
    ),
    "torch: inputs": Case(
        TORCH.replace(ADAM, SGD.format("lr=1e-2")),
        "losses = []",
        "x = x * 1000 + 500\nlosses = []",
        "x = x * 1000 + 500\nx = (x - x.mean(0)) / x.std(0, correction=0)\nlosses = []",
        "inputs of mean 0 and standard deviation 1",
    ),
    "jax: rate": Case(JAX, "1e-2", "50.0", "0.5", "0.01 times the rate"),
    "jax: eps": Case(JAX, "adam(1e-2)", "adam(1e-2, eps=100.0)", "adam(1e-2)", "eps 1e-08"),
    "jax: decay": Case(
        JAX, "adam(1e-2)", "adamw(1e-2, weight_decay=20.0)", "adamw(1e-2, weight_decay=0)", "no weight decay"
    ),
    "jax: clipping": Case(
        JAX, "optax.adam(1e-2)", CLIPPED.format("1e-5"), CLIPPED.format("float('inf')"), "no clipping"
    ),
}


def losses_of(text: str, folder: Path) -> list[float]:
    """The losses that a script prints when it runs by itself."""
    (folder / "own.py").write_text(text, encoding="utf-8")
    line = [sys.executable, "own.py"]
    result = subprocess.run(line, capture_output=True, text=True, cwd=folder, timeout=120, check=True)
    return [float(word) for word in result.stdout.split()]


@pytest.mark.parametrize("name", thinned(CASES))
def test_a_trial_is_the_training_of_the_edited_script(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    assert case.text.count(case.part) == 1
    _, report = checked(case.text.replace(case.part, case.fault), tmp_path)
    tried = report["complaints"][0]["tried"]
    cured, faulty = (
        losses_of(case.text.replace(case.part, part), tmp_path) for part in (case.cure, case.fault)
    )
    steps = 40 if "rate" in name else 30  # a loss that grew is followed to its end
    part = steps // 4
    shown = [f"{v[0]:.4g} to {sum(v[steps - part : steps]) / part:.4g}" for v in (cured, faulty)]
    words = f"with {case.words}, the loss goes from {shown[0]} in {steps} steps; unchanged, from {shown[1]}"
    assert tried == words


MORE = {
    "torch: initialisation": (
        TORCH.replace(ADAM, SGD.format("lr=1e-2"))
        .replace("nn.Tanh(),", "nn.Tanh(), *[nn.Linear(16, 16) for _ in range(6)],")
        .replace(
            "losses = []",
            "for p in model.parameters():\n    nn.init.normal_(p, std=1e-2 if p.ndim > 1 else 1e-9)\n"
            "losses = []",
        ),
        "another initialisation of 16 parameters",
    ),
    "torch: float32": (
        TORCH.replace(
            "losses = []", "model, x, y = model.bfloat16(), x.bfloat16(), y.bfloat16()\nlosses = []"
        )
        .replace("range(40)", "range(200)")
        .replace(ADAM, "Adam(model.parameters(), lr=1e-4)"),
        "parameters kept in float32 for the updates",
    ),
    "jax: initialisation": (
        JAX.replace("optax.adam", "optax.sgd")
        .replace('"b": jax', '"c": 1e-2 * jax.random.normal(keys[1], (4, 16, 16)), "b": jax')
        .replace('jnp.tanh(x @ params["a"])', "deep(x, params)")
        .replace("/ 3", "/ 300")
        .replace(
            "def loss_fn",
            'def deep(x, p):\n    x = jnp.tanh(x @ p["a"])\n    for w in p["c"]:\n'
            "        x = jnp.tanh(x @ w)\n    return x\n\ndef loss_fn",
        ),
        "another initialisation of",
    ),
}


@pytest.mark.parametrize("name", thinned(MORE))
def test_the_loss_falls_further_with_the_cure(name: str, tmp_path: Path) -> None:
    text, words = MORE[name]
    _, report = checked(text, tmp_path)
    tried = report["complaints"][0]["tried"]
    assert tried.startswith(f"with {words}"), (tried, report["complaints"][0])
    ends = [float(part.split(" to ")[1].split()[0].rstrip(";")) for part in tried.split("unchanged")]
    assert ends[0] < ends[1], tried


def test_with_once_the_script_runs_once(tmp_path: Path) -> None:
    text = "print('started', file=open('log', 'a'))\n" + TORCH.replace("1e-2", "50.0")
    _, report = checked(text, tmp_path, "--once")
    assert report["complaints"][0]["tried"] == ""
    assert (tmp_path / "log").read_text().split() == ["started"]
    checked(text, tmp_path)
    assert (tmp_path / "log").read_text().split() == ["started"] * 3


def resuming(text: str, held: str, restore: str, last: int) -> str:
    """The script with a rate far too high, which saves every fifth step up to the last and begins where it
    has saved last."""
    resume = f"    begin, *held = pickle.load(open('last', 'rb'))\n    {restore}\n"
    dump = f"pickle.dump((step + 1, {held}), open('last', 'wb'))"
    save = f"    if step % 5 == 4 and step < {last}:\n        {dump}\n"
    return (
        text.replace("1e-2", "50.0")
        .replace(
            "losses = []\n", f"import os, pickle\nlosses, begin = [], 0\nif os.path.exists('last'):\n{resume}"
        )
        .replace("for i in", "for step in")
        .replace("range(40)", "range(begin, 40)")
        .replace("print(*losses)", save)
    )


RESUMING = {
    "torch": (TORCH, "model.state_dict()", "model.load_state_dict(held[0])"),
    "jax": (JAX, "params, state", "params, state = held"),
}


@pytest.mark.parametrize("last", [6, 38, 40])
@pytest.mark.parametrize("framework", RESUMING)
def test_a_trial_that_resumes_from_the_first_run_tells_nothing(
    framework: str, last: int, tmp_path: Path
) -> None:
    _, report = checked(resuming(*RESUMING[framework], last), tmp_path)
    (first,) = report["complaints"]
    assert first["symptom"] == "steps_too_large"
    assert first["tried"].startswith("nothing is known")
    assert "resume" in first["tried"]


def test_a_shorter_trial_that_begins_like_the_first_run_has_not_resumed() -> None:
    remedy = Remedy(change=Change.RATE, number=0.1, steps=4)
    assert resumed(remedy, [2.0, 3.0, 4.0, 5.0], [2.0, 1.0], 4) == ""
    assert "1.99" in resumed(remedy, [2.0, 3.0, 4.0, 5.0], [1.99, 1.0], 4)
    assert (
        resumed(remedy, [2.0, 3.0, 4.0, 5.0], [1.99, 1.0, 1.0, 1.0], 4) == ""
    )  # a batch that was not seeded
    assert "no step" in resumed(remedy, [2.0, 3.0, 4.0, 5.0], [], 4)


def test_an_initialisation_begins_with_another_loss() -> None:
    remedy = Remedy(change=Change.INITIALISE, deviations={"w": 1.0}, steps=4)
    assert resumed(remedy, [2.0, 3.0, 4.0, 5.0], [9.0, 3.0, 4.0, 5.0], 4) == ""
    halved = [2.0, 4.0]  # the losses of one of two optimizers
    assert resumed(remedy, halved, [9.0, 4.0], 4) == ""
    assert "2 of 4" in resumed(remedy, [2.0, 3.0, 4.0, 5.0], [9.0, 3.0], 4)


@pytest.mark.parametrize("number", [float("nan"), 0.1])
def test_a_remedy_comes_back_from_its_plain_values(number: float) -> None:
    remedy = Remedy(change=Change.RATE, number=number, deviations={"w": 0.5}, steps=7)
    assert str(Remedy.from_dict(remedy.to_dict())) == str(remedy)


def test_a_trial_that_does_not_help_says_so() -> None:
    remedy, nan = Remedy(change=Change.NO_CLIP), float("nan")
    shown = outcome_of(remedy, [1.0, 2.0, 3.0, 4.0], [1.0, 9.0, nan, nan])
    assert "from 1 to nan in 4 steps (so far that is no better); unchanged, from 1 to 4" in shown.said
    assert shown.better is False
    same = outcome_of(remedy, [1.0, 2.0], [1.0, 2.0])
    assert ("no better" in same.said, same.better) == (True, False)
    finite = outcome_of(remedy, [1.0, nan], [1.0, 2.0])
    assert ("no better" in finite.said, finite.better) == (False, True)
    assert outcome_of(remedy, [1.0, nan], [1.0, nan]).better is False
    assert outcome_of(remedy, [1.0, 2.0], [1.0]) == ("", None)
