"""The checkup of scripts: each small script has one fault, or an oddity that is none."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.checkups import assert_fault, assert_healthy, checked
from tests.selection import thinned

START = """
import torch
from torch import nn

torch.manual_seed(1)
x = torch.randn(64, 8)
y = x @ torch.randn(8, 1)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
"""
LOOP = """
for step in range({steps}):
    opt.zero_grad()
    loss = {loss}
    loss.backward()
    {between}
    opt.step()
"""
MSE = "(model(x) - y).square().mean()"


def script(make: str = "", *, opt: str = "", loss: str = MSE, between: str = "pass", steps: int = 30) -> str:
    """Return a script; ``make`` comes after the model, ``opt`` is the optimizer."""
    opt = opt or "torch.optim.Adam(model.parameters(), lr=1e-2)"
    return f"{START}{make}\nopt = {opt}\n{LOOP.format(steps=steps, loss=loss, between=between)}"


BIG = "for p in model.parameters():\n    p.data.uniform_(1, 10)"
DEEP = "model = nn.Sequential(nn.Linear(8, 16), *[nn.Linear(16, 16) for _ in range(6)], nn.Linear(16, 1))\n"
RELU = "model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))\n"
SGD = "torch.optim.SGD(model.parameters(), lr=1e-2)"
ALL = "[p.grad.mul_(1e-50) for p in model.parameters()]"
FAST = """
import torch
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(0)
digits = load_digits()
x, y = torch.tensor(digits.data).float() / 16, torch.tensor(digits.target)
model = nn.Sequential(
    nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(),
    nn.Linear(64, 10),
)
opt = torch.optim.AdamW(model.parameters(), lr={rate})
for step in range(200):
    i = torch.randint(0, len(x), (64,))
    loss = nn.functional.cross_entropy(model(x[i]), y[i])
    opt.zero_grad()
    loss.backward()
    opt.step()
"""

FAULTY: dict[str, tuple[str, str, str]] = {
    "a loss that is maximised": (
        script(opt="torch.optim.Adam(model.parameters(), lr=1e-2, maximize=True)"),
        "uphill_updates",
        "maximize=True",
    ),
    "a product that flushes the gradients": (script(between=ALL), "flushed_gradients", ALL),
    "weights that start far too large": (script(DEEP + BIG, opt=SGD), "exploding_activations", "uniform_"),
    "weights that start far too small": (
        script(
            f"{DEEP}for p in model.parameters():\n    nn.init.normal_(p, std=1e-2 if p.ndim > 1 else 1e-9)"
        ),
        "vanishing_activations",
        "nn.init.normal_",
    ),
    "a loss without a graph": (script(loss="torch.tensor(1.0)"), "no_graph", "loss.backward()"),
    "a part that is detached": (
        script(loss="(model[2](model[1](model[0](x)).detach()) - y).square().mean()"),
        "no_gradient",
        "detach",
    ),
    "a layer that no optimizer has": (
        script(opt="torch.optim.Adam(model[0].parameters(), lr=1e-2)"),
        "not_in_optimizer",
        "opt = ",
    ),
    "a rate of 0": (script(opt="torch.optim.Adam(model.parameters(), lr=0.0)"), "rate_zero", "opt = "),
    "a rate that batch normalisations cannot follow": (FAST.format(rate=10.0), "steps_too_large", "opt = "),
    "a rate by which a usual weight decay shrinks weights": (
        FAST.format(rate=30.0),
        "steps_too_large",
        "opt = ",
    ),
    "a rate that is far too large": (
        script(opt="torch.optim.Adam(model.parameters(), lr=5.0)"),
        "steps_too_large",
        "opt = ",
    ),
    "gradients that are never cleared": (
        script(opt=SGD, steps=20).replace("    opt.zero_grad()\n", ""),
        "gradients_kept",
        "loss.backward()",
    ),
    "a new optimizer in every step": (
        script(steps=20, between="opt = torch.optim.Adam(model.parameters(), lr=1e-2)"),
        "optimizer_renewed",
        "torch.optim.Adam",
    ),
    "bfloat16 weights and small steps": (
        script(
            "model = model.bfloat16()\nx, y = x.bfloat16(), y.bfloat16()", opt=SGD.replace("1e-2", "1e-4")
        ),
        "lost_updates",
        "opt = ",
    ),
    "targets that broadcast": (script("y = y[:, 0]"), "broadcast_loss", "loss = "),
    "inputs that are not scaled": (script("x = x * 1000 + 500", opt=SGD), "unscaled_input", "loss = "),
    "a sigmoid before the loss on logits": (
        script(
            "t = (y > 0).float()",
            loss="nn.functional.binary_cross_entropy_with_logits(torch.sigmoid(model(x)), t)",
        ),
        "activation_before_loss",
        "loss = ",
    ),
    "a part that goes through NumPy": (
        script(
            loss="(model[2](torch.from_numpy(model[1](model[0](x)).detach().numpy())) - y).square().mean()"
        ),
        "no_gradient",
        "numpy",
    ),
    "a schedule that is stepped too often": (
        script(
            "y = y * 10",
            opt="torch.optim.SGD(model.parameters(), lr=1e-3)\n"
            "schedule = torch.optim.lr_scheduler.StepLR(opt, step_size=4, gamma=0.1)",
            steps=60,
        ).replace("opt.step()", "opt.step(); schedule.step()"),
        "rate_zero",
        "schedule = ",
    ),
    "a moment that is infinite": (
        script(between="if step == 5: opt.state[model[0].weight]['exp_avg_sq'][0, 0] = float('inf')"),
        "bad_state",
        "opt = ",
    ),
    "a loss scale that falls without end": (
        script("scaler = torch.amp.GradScaler('cpu')", between="model[0].weight.grad[0, 0] = float('inf')")
        .replace("loss.backward()", "scaler.scale(loss).backward()")
        .replace("opt.step()", "scaler.step(opt); scaler.update()"),
        "loss_scale",
        "backward()",
    ),
    "decay that eats the weights": (
        script("y = y * 0", opt="torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=20)", steps=60),
        "weight_decay",
        "opt = ",
    ),
    "logits where log-probabilities belong": (
        script(
            "model, t = nn.Linear(8, 4), torch.arange(64) % 4", loss="nn.functional.nll_loss(model(x), t)"
        ),
        "activation_before_loss",
        "nll_loss",
    ),
    "a softmax over the batch": (
        script(
            "model, t = nn.Linear(8, 4), torch.arange(64) % 4",
            loss="nn.functional.nll_loss(torch.log_softmax(model(x), 0), t)",
        ),
        "wrong_axis",
        "log_softmax",
    ),
    "targets that the last activation cannot give": (
        script("model.append(nn.Sigmoid())"),
        "unscaled_target",
        "loss = ",
    ),
    "attention that takes the batch for time": (
        script(
            "x = x[:, None] + torch.randn(64, 5, 8)\n"
            "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            "        self.attention, self.out = nn.MultiheadAttention(8, 2), nn.Linear(8, 1)\n"
            "    def forward(self, x):\n        return self.out(self.attention(x, x, x)[0].mean(1))\n"
            "model = Net()"
        ),
        "wrong_axis",
        "nn.MultiheadAttention",
    ),
    "steps that are forgotten": (
        script().replace("    opt.step()\n", ""),
        "not_in_optimizer",
        "opt = ",
    ),
    "weights that all begin alike": (
        script("for p in model.parameters():\n    nn.init.constant_(p, 0.1)"),
        "alike_units",
        "nn.init.constant_",
    ),
    "weights that are a plain tensor": (
        script(
            "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            "        self.w, self.out = torch.randn(8, 16), nn.Linear(16, 1)\n"
            "    def forward(self, x):\n        return self.out(torch.sin(5 * x @ self.w))\nmodel = Net()",
            opt=SGD,
        ),
        "no_gradient",
        "self.w",
    ),
    "weights that are a tensor with a gradient, but no parameter": (
        script(
            "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            "        self.w, self.out = torch.randn(8, 16, requires_grad=True), nn.Linear(16, 1)\n"
            "    def forward(self, x):\n        return self.out(x @ self.w)\nmodel = Net()"
        ),
        "not_in_optimizer",
        "opt = ",
    ),
    "layers in a plain list": (
        script(
            "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            "        self.layers = [nn.Linear(8, 8) for _ in range(3)]\n        self.out = nn.Linear(8, 1)\n"
            "    def forward(self, x):\n        for layer in self.layers:\n"
            "            x = torch.tanh(layer(x))\n        return self.out(x)\nmodel = Net()"
        ),
        "not_in_optimizer",
        "for _ in range(3)",
    ),
    "the second of two models with parameters of the same names": (
        script(
            "other = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))\n"
            "mine = torch.optim.Adam(other.parameters(), lr=1e-2)",
            loss="(model(other(x).detach()) - y).square().mean()",
            between="mine.step()",
        ),
        "no_gradient",
        "detach",
    ),
    "running statistics that hardly move": (
        script(
            "model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16, momentum=1e-3), nn.Tanh(), "
            "nn.Linear(16, 1))\nx = 5 * x",
            steps=80,
        ),
        "batch_norm",
        "momentum=1e-3",
    ),
    "an eps above every gradient": (
        script(opt="torch.optim.Adam(model.parameters(), lr=1e-3, eps=100.0)"),
        "eps_dominates",
        "opt = ",
    ),
}
HEALTHY: dict[str, str] = {
    "a likelihood that is maximised": script(
        opt="torch.optim.Adam(model.parameters(), lr=1e-2, maximize=True)",
        loss="-(model(x) - y).square().mean()",
    ),
    "a loss scale that stays": script("scaler = torch.amp.GradScaler('cpu')")
    .replace("loss.backward()", "scaler.scale(loss).backward()")
    .replace("opt.step()", "scaler.step(opt); scaler.update()"),
    "a rate that is annealed to almost nothing at the end": script(
        opt="torch.optim.Adam(model.parameters(), lr=1e-2)\n"
        "schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)",
        steps=100,
    ).replace("opt.step()", "opt.step(); schedule.step()"),
    "a plain training": script(),
    "ReLU with half of the units inactive": script(RELU),
    "warm-up from a rate of 0": script(
        between="opt.param_groups[0]['lr'] = 1e-2 * min(1, step / 10)", steps=60
    ),
    "a frozen first layer": script(
        "model[0].requires_grad_(False)", opt="torch.optim.Adam(model[2].parameters(), lr=1e-2)"
    ),
    "two batches to a step": script(loss=MSE, between="(model(x) - y).square().mean().backward()"),
    "clipping that is rarely active": script(between="nn.utils.clip_grad_norm_(model.parameters(), 5.0)"),
    "targets around 100 and a bias that knows it": script(
        "y = y + 100\nwith torch.no_grad():\n    model[2].bias.fill_(100)"
    ),
    "master weights of the script's own, in no module": script(
        "master = [p.detach().clone() for p in model.parameters()]\nfor m in master:\n    m.requires_grad_()",
        opt="torch.optim.Adam(master, lr=1e-2)",
        between="for m, p in zip(master, model.parameters()):\n        m.grad, p.grad = p.grad, None",
    )
    + "    with torch.no_grad():\n        for m, p in zip(master, model.parameters()):\n"
    + "            p.copy_(m)\n",
    "a bad batch that is skipped": script(
        "bad = torch.full_like(x, float('nan'))",
        loss="(model(bad if step == 9 else x) - y).square().mean()",
        between="if not loss.isfinite():\n        continue",
    ),
    "an episode without gradients before each loss": script(
        loss="(model(x) - y).square().mean()",
        between="with torch.no_grad():\n        [model(x) for _ in range(6)]",
    ),
    "sparse gradients": (
        "import torch\nfrom torch import nn\ntorch.manual_seed(0)\n"
        "e, h = nn.Embedding(1000, 8, sparse=True), nn.Linear(8, 1)\n"
        "a, b = torch.optim.SparseAdam(e.parameters(), lr=1e-2), torch.optim.Adam(h.parameters(), lr=1e-2)\n"
        "i = torch.randint(0, 50, (64,))\ny = (i % 2).float()\n"
        "for step in range(60):\n    a.zero_grad()\n    b.zero_grad()\n"
        "    loss = nn.functional.binary_cross_entropy_with_logits(h(e(i))[:, 0], y)\n"
        "    loss.backward()\n    a.step()\n    b.step()\n"
    ),
}


@pytest.mark.parametrize("fault", thinned(FAULTY))
def test_the_fault_is_the_first_finding_with_its_line(fault: str, tmp_path: Path) -> None:
    assert_fault(FAULTY[fault], tmp_path)


@pytest.mark.parametrize("oddity", thinned(HEALTHY))
def test_a_healthy_training_is_not_blamed(oddity: str, tmp_path: Path) -> None:
    assert_healthy(HEALTHY[oddity], tmp_path)


def test_statistics_that_follow_from_large_steps_stand_under_them(tmp_path: Path) -> None:
    _, report = checked(FAST.format(rate=10.0), tmp_path)
    (first,) = report["complaints"]
    assert "batch_norm" in [c["symptom"] for c in first["consequences"]]
    assert first["tried"].startswith("with 0.1 times the rate")


def test_steps_end_the_script_early(tmp_path: Path) -> None:
    result, report = checked(script(steps=1000) + "print('the end')", tmp_path, "--steps", "5")
    assert report["steps"] == 5
    assert "the end" not in result.stdout


GUARD = "stablenum_torch.wrap({}, clip=1.0)"
NAN_AT_7 = f"{MSE} * (float('nan') if step == 7 else 1)"


def guarded(*, opt: str = "torch.optim.AdamW(model.parameters(), lr=1e-2)", **rest: Any) -> str:
    return "import stablenum_torch" + script(opt=GUARD.format(opt), **rest)


def with_closure(text: str) -> str:
    """Return the script with the guard's step as Lightning calls it."""
    head, begin, body = text.partition("    opt.zero_grad()\n")
    body = (begin + body).replace("    opt.step()\n", "    return loss\n")
    return head + "    def closure():\n" + textwrap.indent(body, "    ") + "    opt.step(closure=closure)\n"


@pytest.mark.parametrize("change", [str, with_closure])
def test_a_step_of_a_guard_counts_once_skipped_or_applied(change: Any, tmp_path: Path) -> None:
    _, report = checked(change(guarded(loss=NAN_AT_7)), tmp_path)
    assert report["steps"] == 30
    assert [(c["symptom"], c["since"]) for c in report["complaints"]] == [("loss_not_finite", 7)]
    assert "`stablenum explain --strict`" in report["complaints"][0]["cure"]


def test_a_loss_that_is_not_finite_sends_to_explain(tmp_path: Path) -> None:
    _, report = checked(script(loss=NAN_AT_7, between="if not loss.isfinite():\n        continue"), tmp_path)
    assert "`stablenum explain` on the script" in report["complaints"][0]["cure"]


def test_each_of_two_guards_counts_its_own_steps(tmp_path: Path) -> None:
    halves = [GUARD.format(f"torch.optim.SGD(model[{i}].parameters(), lr=1e-2)") for i in (0, 2)]
    text = script(opt=f"{halves[0]}\nother = {halves[1]}", between="other.step(); other.zero_grad()")
    assert checked("import stablenum_torch" + text, tmp_path)[1]["steps"] == 60


def test_a_guard_beside_a_plain_optimizer_is_told_apart(tmp_path: Path) -> None:
    first, second = (f"torch.optim.SGD(model[{i}].parameters(), lr=1e-2)" for i in (0, 2))
    text = script(opt=f"{GUARD.format(first)}\nother = {second}", between="other.step(); other.zero_grad()")
    assert checked("import stablenum_torch" + text, tmp_path)[1]["steps"] == 60


def test_steps_end_a_guarded_script_early(tmp_path: Path) -> None:
    text = guarded(steps=1000, between="print(f'step {step}')")
    result, report = checked(text, tmp_path, "--steps", "5")
    assert report["steps"] == 5
    assert "step 4" in result.stdout
    assert "step 5" not in result.stdout


def test_gradients_that_a_guard_never_clears_are_found(tmp_path: Path) -> None:
    text = guarded(opt=SGD, steps=20).replace("    opt.zero_grad()\n", "")
    assert_fault((text, "gradients_kept", "loss.backward()"), tmp_path)


@pytest.mark.parametrize(
    "fault", ["a rate of 0", "an eps above every gradient", "a rate that is far too large"]
)
def test_the_fault_is_found_behind_a_guard_too(fault: str, tmp_path: Path) -> None:
    text, symptom, line = FAULTY[fault]
    opt = next(t for t in text.splitlines() if t.startswith("opt = ")).removeprefix("opt = ")
    assert_fault(("import stablenum_torch" + text.replace(opt, GUARD.format(opt)), symptom, line), tmp_path)


def test_a_script_that_trains_nothing_is_not_blamed(tmp_path: Path) -> None:
    result, report = checked("import torch\nprint(torch.ones(2))", tmp_path)
    assert report["ok"]
    assert report["summary"] == "nothing was measured: no training was seen"
    assert result.returncode == 0
    assert "nothing was measured" in result.stderr


def test_the_generators_are_seeded(tmp_path: Path) -> None:
    text = "import random, numpy, torch\nprint(random.random(), numpy.random.rand(), torch.rand(()).item())"
    said = [checked(text, tmp_path, "--seed", seed)[0].stdout for seed in ("3", "3", "4")]
    assert said[0] == said[1] != said[2]


def test_a_wrong_number_of_steps_is_a_usage_error(tmp_path: Path) -> None:
    result, _ = checked("import torch", tmp_path, "--steps", "0")
    assert result.returncode == 2


def test_the_report_is_a_page_and_comes_back_from_json(tmp_path: Path) -> None:
    from stablenum.diagnosis.checkup.report import Checkup

    text, _, _ = FAULTY["a rate of 0"]
    result, report = checked(text, tmp_path, "--html", "r.html")
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "rate_zero" in page
    assert "<script" not in page
    again = Checkup.from_dict(report)
    assert json.loads(again.to_json()) == report
    assert str(again).splitlines()[0] in result.stdout


def test_explain_ends_with_the_findings_if_nothing_failed(tmp_path: Path) -> None:
    text, symptom, _ = FAULTY["a rate of 0"]
    (tmp_path / "train.py").write_text(text, encoding="utf-8")
    line = [sys.executable, "-m", "stablenum", "explain", "train.py"]
    result = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, timeout=280)
    assert result.returncode == 0, result.stderr
    assert "nothing went wrong in 30 optimizer steps" in result.stderr
    assert "but the training may not learn" in result.stderr
    assert symptom in result.stdout


def test_explain_says_nothing_more_of_a_sound_training(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(script(), encoding="utf-8")
    line = [sys.executable, "-m", "stablenum", "explain", "train.py"]
    result = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, timeout=280)
    assert "may not learn" not in result.stderr
    assert result.stdout == ""


def test_the_other_sign_is_tried_for_updates_that_climb(tmp_path: Path) -> None:
    _, report = checked(FAULTY["a loss that is maximised"][0], tmp_path)
    assert report["complaints"][0]["tried"].startswith("with -1 times the rate, the loss goes from")
    assert "no better" not in report["complaints"][0]["tried"]


CHECKPOINTED = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
torch.manual_seed(0)
inner, head = nn.Sequential(nn.Linear(8, 16), nn.Tanh()), nn.Linear(16, 1)
opt = torch.optim.Adam([*inner.parameters(), *head.parameters()], 1e-2)
for step in range(20):
    x = torch.randn(32, 8{needs})
    loss = (head(checkpoint(inner, x, use_reentrant={reentrant})) - x[:, :1]).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


def test_a_reentrant_checkpoint_that_stops_gradients_is_named(tmp_path: Path) -> None:
    text = CHECKPOINTED.format(needs="", reentrant=True)
    assert_fault((text, "no_gradient", "checkpoint(inner, x"), tmp_path)


@pytest.mark.parametrize(("needs", "reentrant"), [(", requires_grad=True", True), ("", False)])
def test_a_checkpoint_that_passes_gradients_is_not(needs: str, reentrant: bool, tmp_path: Path) -> None:
    assert_healthy(CHECKPOINTED.format(needs=needs, reentrant=reentrant), tmp_path)


AUXILIARY = """
import torch
torch.manual_seed(0)
class MomentumWithAuxAdam(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, dict(lr=0.02, betas=(0.9, 0.95), eps=1e-10))
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                m = state.setdefault("momentum_buffer", torch.zeros_like(p))
                m.lerp_(p.grad, 0.1)
                p.sub_(m, alpha=group["lr"])
model = torch.nn.Linear(8, 4)
opt = MomentumWithAuxAdam(model.parameters())
for step in range(60):
    x = torch.randn(64, 8)
    loss = (0.03 * (model(x) - x[:, :4])).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


def test_a_parameter_without_a_second_moment_has_no_stale_one(tmp_path: Path) -> None:
    _, report = checked(AUXILIARY, tmp_path, "--once")
    assert "stale_state" not in [c["symptom"] for c in report["complaints"]]
