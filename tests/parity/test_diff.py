"""``stablenum.diff`` on programs of both frameworks: verdicts, places, causes, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from torch import nn

import stablenum
import stablenum_jax
import stablenum_torch

X = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
Y = np.arange(6) % 3


class Net(nn.Module):
    def __init__(self, eps: float = 1e-5, approximate: str = "none") -> None:
        super().__init__()
        self.hidden = nn.Linear(5, 8)
        self.norm = nn.LayerNorm(8, eps=eps)
        self.out = nn.Linear(8, 3)
        self.approximate = approximate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.hidden(x))
        return self.out(nn.functional.gelu(x, approximate=self.approximate))


def torch_program(*, rate: float = 1e-2, **options: Any) -> Any:
    torch.manual_seed(0)
    model = Net(**options)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    x, y = torch.from_numpy(X), torch.from_numpy(Y)
    adam = torch.optim.Adam(model.parameters(), lr=rate)
    return stablenum_torch.program(
        lambda a, b: nn.functional.cross_entropy(model(a), b), x, y, model=model, optimizer=adam
    )


def parameters() -> dict[str, Any]:
    rng = np.random.default_rng(1)
    shapes = {"hidden": (5, 8), "hidden_b": (8,), "gain": (8,), "shift": (8,), "out": (8, 3), "out_b": (3,)}
    return {k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in shapes.items()}


def jax_program(
    *, epsilon: float = 1e-5, approximate: bool = False, rate: float = 1e-2, stop: bool = False
) -> Any:
    def loss_fn(p: dict[str, Any], x: Any, y: Any) -> Any:
        h = x @ p["hidden"] + p["hidden_b"]
        spread = jnp.var(h, axis=-1, keepdims=True)
        h = (h - jnp.mean(h, axis=-1, keepdims=True)) / jnp.sqrt(spread + epsilon) * p["gain"] + p["shift"]
        h = jax.nn.gelu(h, approximate=approximate)
        h = jax.lax.stop_gradient(h) if stop else h
        logits = h @ p["out"] + p["out_b"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    tx = optax.adam(rate)
    return stablenum_jax.program(loss_fn, parameters(), jnp.asarray(X), jnp.asarray(Y), optimizer=tx)


def test_two_programs_that_agree_are_the_same_in_exact_arithmetic() -> None:
    report = stablenum.diff(torch_program(), jax_program())
    assert report.ok
    assert report.first is None
    assert report.causes == ()
    assert report.verdict == "the same in exact arithmetic"
    assert report.weights["out"] == "out.weight, transposed"
    for off in (report.left_off, report.right_off):
        assert off is not None
        assert 0 < off.error < 1e-5
        assert off.operation
    assert json.loads(report.to_json())["ok"] is True


def test_the_twin_agrees_where_float32_would_not_show_it() -> None:
    # Epsilons of 1e-5 and 1.001e-5 move the loss by less than float32's rounding.
    report = stablenum.diff(torch_program(), jax_program(epsilon=1.001e-5))
    assert report.first is not None
    assert report.first.error < 1e-6
    assert report.first.right is not None
    assert "jnp.sqrt(spread + epsilon)" in report.first.right.code


def test_an_epsilon_is_named_and_confirmed() -> None:
    report = stablenum.diff(torch_program(), jax_program(epsilon=1e-3))
    first = report.first
    assert first is not None
    assert first.left is not None
    assert first.right is not None
    assert first.left.operation == "layer_norm"
    assert first.left.module == "norm"
    assert first.left.phase == "forward"
    assert first.result == "loss"
    assert report.causes[0].code == "epsilon_value"
    assert report.causes[0].confirmed
    assert "0.001" in report.causes[0].sentence


def test_a_variant_of_an_activation_is_named_and_confirmed() -> None:
    report = stablenum.diff(torch_program(), jax_program(approximate=True))
    assert (report.causes[0].code, report.causes[0].confirmed) == ("gelu_variant", True)
    assert report.first is not None
    assert report.first.right is not None
    assert "jax.nn.gelu(h" in report.first.right.code


def test_a_stopped_gradient_is_a_difference_of_the_backward_pass() -> None:
    report = stablenum.diff(torch_program(), jax_program(stop=True))
    first = report.first
    assert first is not None
    assert first.result.startswith("gradient of")
    assert report.causes[0].code == "stopped_gradient"
    assert report.causes[0].confirmed


def test_a_rate_is_a_difference_of_the_update_where_the_optimizer_was_made() -> None:
    report = stablenum.diff(torch_program(), jax_program(rate=2e-2))
    first = report.first
    assert first is not None
    assert first.left is not None
    assert first.right is not None
    assert first.left.phase == "update"
    assert "torch.optim.Adam(" in first.left.code
    assert "optax.adam(rate)" in first.right.code
    assert report.causes[0].code == "scale"


def test_several_steps_stay_together_and_part_at_the_first_that_differs() -> None:
    assert stablenum.diff(torch_program(), jax_program(), steps=3).ok
    report = stablenum.diff(torch_program(), jax_program(rate=2e-2), steps=3)
    assert report.first is not None
    assert report.first.step == 1


@pytest.mark.parametrize(("momentum", "same"), [(0.9, True), (0.1, False)])
def test_running_statistics_of_nnx_are_carried_from_step_to_step(momentum: float, same: bool) -> None:
    """In evaluation mode after an update, as a normalization by running statistics reads them."""

    class Running(nnx.Module):
        def __init__(self) -> None:
            self.mean = nnx.BatchStat(jnp.zeros(5))
            self.w = nnx.Param(jnp.ones((5, 3)))

        def __call__(self, x: jax.Array) -> jax.Array:
            y = (x - self.mean[...]) @ self.w[...]
            self.mean[...] = momentum * self.mean[...] + (1 - momentum) * x.mean(0)
            return y

    class Original(nn.Module):
        mean: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(5))
            self.w = nn.Parameter(torch.ones(5, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = (x - self.mean) @ self.w
            self.mean.lerp_(x.mean(0), 0.1)
            return y

    model = Original()
    left = stablenum_torch.program(
        lambda x: model(x).square().mean(),
        torch.from_numpy(X),
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    )
    port = Running()
    right = stablenum_jax.program(lambda m, x: jnp.square(m(x)).mean(), port, X, optimizer=optax.sgd(0.1))
    assert stablenum.diff(left, right).ok
    assert stablenum.diff(left, right, steps=3).ok == same
    assert float(jnp.abs(port.mean[...]).max()) == 0.0  # the user's model stays as it was


def test_a_scheduler_that_a_hook_steps_is_as_it_was_before_each_run() -> None:
    schedulers = []

    def scheduled(rate: float) -> Any:
        torch.manual_seed(0)
        model = Net()
        sgd = torch.optim.SGD(model.parameters(), lr=rate)
        scheduler = torch.optim.lr_scheduler.StepLR(sgd, 1, gamma=0.5)
        schedulers.append(scheduler)
        sgd.register_step_post_hook(lambda *_: scheduler.step())
        x, y = torch.from_numpy(X), torch.from_numpy(Y)
        return stablenum_torch.program(
            lambda a, b: nn.functional.cross_entropy(model(a), b), x, y, model=model, optimizer=sgd
        )

    report = stablenum.diff(scheduled(0.1), scheduled(0.2), steps=3)
    assert not report.ok
    assert not any("runs again" in note for note in report.notes), report.notes
    assert [scheduler.last_epoch for scheduler in schedulers] == [0, 0]


def test_programs_of_one_framework_are_compared_too() -> None:
    assert stablenum.diff(torch_program(), torch_program()).ok
    assert stablenum.diff(jax_program(), jax_program()).ok
    assert stablenum.diff(torch_program(), torch_program(approximate="tanh")).causes[0].code == "gelu_variant"
    assert not stablenum.diff(jax_program(), jax_program(epsilon=1e-6)).ok


def test_jax_may_be_the_reference() -> None:
    assert stablenum.diff(jax_program(), torch_program()).ok


def test_the_users_objects_stay_as_they_were() -> None:
    torch.manual_seed(3)
    model = Net()
    adam = torch.optim.Adam(model.parameters())
    x, y = torch.from_numpy(X), torch.from_numpy(Y)
    program = stablenum_torch.program(
        lambda a, b: nn.functional.cross_entropy(model(a), b), x, y, model=model, optimizer=adam
    )
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    stablenum.diff(program, jax_program())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not adam.state
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


# --- weights -----------------------------------------------------------------------------------

NAMES = {
    "hidden": "hidden.weight", "hidden_b": "hidden.bias", "gain": "norm.weight",
    "shift": "norm.bias", "out": "out.weight", "out_b": "out.bias",
}  # fmt: skip


def test_the_weights_can_be_given_by_name_or_by_a_function() -> None:
    assert stablenum.diff(torch_program(), jax_program(), weights=NAMES).ok

    def convert(left: dict[str, Any]) -> dict[str, Any]:
        return {name: left[source].T for name, source in NAMES.items()}

    assert stablenum.diff(torch_program(), jax_program(), weights=convert).ok
    assert not stablenum.diff(torch_program(), jax_program(), weights="as they are").ok


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"hidden": "nowhere"}, "'nowhere', which is not a parameter of the left program"),
        ({"nowhere": "out.bias"}, "'nowhere', which is not a parameter of the right program"),
        ({"hidden": "out.bias"}, "no transposition or reshape does that"),
        ("similar", "weights must be 'match'"),
        (lambda left: {"hidden": np.zeros(3)}, "with the shape"),
        (lambda left: {"nowhere": np.zeros(3)}, "'nowhere', which the right program does not have"),
    ],
)
def test_weights_that_do_not_fit_are_refused(weights: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stablenum.diff(torch_program(), jax_program(), weights=weights)


def test_other_arguments_are_checked() -> None:
    with pytest.raises(TypeError, match="left must be a program"):
        stablenum.diff(Net(), jax_program())
    with pytest.raises(ValueError, match="steps must be at least 1"):
        stablenum.diff(torch_program(), jax_program(), steps=0)
    with pytest.raises(TypeError, match="optimizer"):
        stablenum_torch.program(lambda: None, optimizer="adam")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="optimizer"):
        stablenum_jax.program(lambda p: p, {}, optimizer="adam")


# --- outputs, compute, saving ------------------------------------------------------------------


def test_outputs_are_compared_where_there_is_no_loss() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(5, 3)
    left = stablenum_torch.program(lambda x: layer(x).softmax(-1), torch.from_numpy(X), model=layer)
    p = {"w": jnp.ones((5, 3)), "b": jnp.ones(3)}

    def port(axis: int) -> Any:
        return stablenum_jax.program(
            lambda p, x: jax.nn.softmax(x @ p["w"] + p["b"], axis=axis), p, jnp.asarray(X)
        )

    assert stablenum.diff(left, port(-1)).ok
    report = stablenum.diff(left, port(0))
    assert report.first is not None
    assert report.first.result == "output"
    assert (report.causes[0].code, report.causes[0].confirmed) == ("softmax_axis", True)


def test_a_convolution_is_opened_once() -> None:
    torch.manual_seed(0)
    for bias in (True, False):
        layer = nn.Conv1d(1, 2, 3, bias=bias)
        program = stablenum_torch.program(layer, torch.from_numpy(X)[:, None], model=layer)
        made = program.play(lambda index, data: None).trace.steps
        assert sum(s.operation == "conv" for s in made) <= 4, [s.primitive for s in made]
        assert len(made) < 8


def test_autocast_changes_no_formula() -> None:
    torch.manual_seed(0)
    model = Net()
    x, y = torch.from_numpy(X), torch.from_numpy(Y)

    def loss_fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(a).float(), b)

    whole = stablenum_torch.program(loss_fn, x, y, model=model)
    half = stablenum_torch.program(loss_fn, x, y, model=model, compute=torch.bfloat16)
    report = stablenum.diff(whole, half)
    assert report.verdict == "the same in exact arithmetic"
    assert report.left_off is not None
    assert report.right_off is not None
    assert report.right_off.error > 100 * report.left_off.error


def test_a_report_is_saved_by_its_suffix(tmp_path: Path) -> None:
    report = stablenum.diff(torch_program(), jax_program(approximate=True))
    for name in ("report.html", "report.json", "report.txt"):
        report.save(tmp_path / name)
    assert (tmp_path / "report.html").read_text() == report.to_html()
    assert json.loads((tmp_path / "report.json").read_text())["differences"][0]["causes"]
    assert "gelu_variant" in (tmp_path / "report.txt").read_text()
    with pytest.raises(ValueError, match="path must end in"):
        report.save(tmp_path / "report.pdf")


# --- the command -------------------------------------------------------------------------------

PAIR = """
import torch
from torch import nn
import stablenum_torch

x = torch.linspace(-2, 2, 12).reshape(3, 4)

def made(function):
    torch.manual_seed(0)
    layer = nn.Linear(4, 2)
    return stablenum_torch.program(lambda x: function(layer(x)).square().mean(), x, model=layer)

def left():
    return made(nn.functional.silu)

def right():
    return made(nn.functional.{right})
"""


def run(folder: Path, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "pair.py").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "stablenum", "diff", "pair.py", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


def test_the_command_says_where_and_exits_with_1(tmp_path: Path) -> None:
    result = run(
        tmp_path, PAIR.replace("{right}", "hardswish"), "--json", "report.json", "--html", "report.html"
    )
    assert result.returncode == 1, result.stdout + result.stderr
    assert "First difference, forward" in result.stdout
    assert "pair.py:11" in result.stdout
    assert "confirmed, silu_variant" in result.stdout
    assert json.loads((tmp_path / "report.json").read_text())["ok"] is False
    assert "silu_variant" in (tmp_path / "report.html").read_text()


def test_the_command_exits_with_0_where_programs_agree(tmp_path: Path) -> None:
    result = run(tmp_path, PAIR.replace("{right}", "silu"))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "the same in exact arithmetic" in result.stdout or "the same." in result.stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "must define a function left()"),
        ("def left(): return 3\ndef right(): return 3", "it returns int"),
        ("def left(): return 1 / 0\ndef right(): return 3", "line 1: ZeroDivisionError"),
        ("import nothing_of_the_kind", "ModuleNotFoundError"),
    ],
)
def test_a_pair_that_cannot_be_run_ends_with_2(text: str, message: str, tmp_path: Path) -> None:
    result = run(tmp_path, text)
    assert result.returncode == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())


def test_independent_differences_are_found_in_one_run() -> None:
    report = stablenum.diff(torch_program(), jax_program(epsilon=1e-3, approximate=True, rate=2e-2))
    assert [d.causes[0].code for d in report.differences] == ["epsilon_value", "gelu_variant", "scale"]
    assert [d.left.phase for d in report.differences if d.left] == ["forward", "forward", "update"]
    assert report.notes == ()
    assert "Difference 2, independent of those before" in str(report)


def test_one_difference_is_named_once_although_its_derivative_differs_too() -> None:
    for options in ({"epsilon": 1e-3}, {"approximate": True}):
        assert len(stablenum.diff(torch_program(), jax_program(**options)).differences) == 1


@pytest.mark.parametrize("weights", ["match", "as they are"])
def test_a_square_kernel_stays_as_it_is_within_a_framework(weights: str) -> None:
    def program() -> Any:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 3, 1), torch.nn.Tanh(), torch.nn.Conv2d(3, 3, 1))
        x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(1))
        return stablenum_torch.program(lambda x: model(x).square().mean(), x, model=model)

    report = stablenum.diff(program(), program(), weights=weights)
    assert report.ok
    assert report.weights["2.weight"] == "2.weight"


def test_a_square_matrix_that_is_given_by_name_stays_as_it_is_within_a_framework() -> None:
    def program() -> Any:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        return stablenum_torch.program(lambda x: model(x).square().mean(), torch.ones(3, 4), model=model)

    names = {name: name for name in program().parameters()}
    assert stablenum.diff(program(), program(), weights=names).ok


def test_gradients_are_compared_as_a_function_of_the_weights_rearranges_them() -> None:
    x = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
    model = nn.Linear(5, 5, bias=False)
    left = stablenum_torch.program(lambda x: model(x).square().mean(), torch.tensor(x), model=model)
    right = stablenum_jax.program(
        lambda p, x: jnp.square(x[:, ::-1] @ p["w"]).mean(), {"w": jnp.ones((5, 5))}, jnp.asarray(x)
    )
    report = stablenum.diff(left, right, weights=lambda a: {"w": a["weight"].T[::-1]})
    assert report.ok
    assert report.weights == {"w": "weight, by the function given as weights"}


def test_a_row_that_is_masked_whole_hides_no_difference() -> None:
    # finfo.min is added to every score of the row; relative noise on that number would swamp the loss.
    scores = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    hidden = np.zeros((4, 4), bool)
    hidden[0] = True

    def loss_fn(p: Any, scores: Any, masked: Any) -> Any:
        filled = jnp.where(masked, scores + jnp.finfo(jnp.float32).min, scores * p["gain"])
        return jnp.square(jax.nn.softmax(filled, axis=-1) * jnp.arange(4.0)).sum()

    def program(masked: Any) -> Any:
        return stablenum_jax.program(loss_fn, {"gain": jnp.asarray(1.3)}, scores, masked)

    assert stablenum.diff(program(hidden), program(hidden)).ok
    assert not stablenum.diff(program(hidden), program(hidden ^ np.eye(4, dtype=bool)[3])).ok


def test_conjugated_views_and_calls_without_a_format_are_widened() -> None:
    w = torch.randn(6, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def loss_fn(w: torch.Tensor) -> torch.Tensor:
        turned = torch.polar(torch.ones(6), torch.linspace(0.1, 1.0, 6)) * torch.complex(w, w * w)
        halves = torch.arange(6) / 6  # float32 if nothing else is asked for
        return (torch.view_as_real(turned * turned.conj())[:, 0] * halves).sum()

    def port(p: Any) -> Any:
        return ((p["w"] ** 2 + p["w"] ** 4) * (jnp.arange(6) / 6)).sum()

    left = stablenum_torch.program(loss_fn, w)
    report = stablenum.diff(left, stablenum_jax.program(port, {"w": jnp.asarray(w.detach())}))
    assert report.ok, str(report)
    assert torch.get_default_dtype() == torch.float32


def test_parameters_of_jax_are_named_as_those_of_pytorch_are() -> None:
    params = {"layers": [{"w": jnp.ones((2, 2))}], "head.bias": jnp.ones(2), "n": {"x": jnp.ones(2)}}
    loss_fn = lambda p: (p["layers"][0]["w"] @ p["head.bias"] * p["n"]["x"]).sum()  # noqa: E731
    assert list(stablenum_jax.program(loss_fn, params).parameters()) == ["head.bias", "layers.0.w", "n.x"]
    taken = {**params, "n.x": jnp.ones(2)}
    names = list(stablenum_jax.program(loss_fn, taken).parameters())
    assert names == ["['head.bias']", "['layers'][0]['w']", "['n']['x']", "['n.x']"]


class Gates(nn.Module):
    """A recurrent cell whose gates are kept in one matrix: forget, output, new."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.states = nn.Linear(3, 12), nn.Linear(4, 12, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros(x.shape[0], 4)
        for t in range(x.shape[1]):
            f, o, n = (self.inputs(x[:, t]) + self.states(h)).chunk(3, dim=1)
            h = f.sigmoid() * h + o.sigmoid() * n.tanh()
        return h


def gates_apart(p: Any, x: Any) -> Any:
    """The same cell; its gates are used in the order new, forget, output."""
    h = jnp.zeros((x.shape[0], 4))
    for t in range(x.shape[1]):
        n, f, o = (x[:, t] @ p[f"x_{g}"] + p[f"b_{g}"] + h @ p[f"h_{g}"] for g in "nfo")
        h = jax.nn.sigmoid(f) * h + jax.nn.sigmoid(o) * jnp.tanh(n)
    return jnp.square(h).mean()


def test_the_order_of_gates_is_settled_by_trial() -> None:
    x = np.random.default_rng(2).normal(size=(5, 3, 3)).astype(np.float32)
    model = Gates()
    left = stablenum_torch.program(lambda x: model(x).square().mean(), torch.tensor(x), model=model)
    shapes = {"x": (3, 4), "b": (4,), "h": (4, 4)}
    params = {f"{part}_{g}": jnp.ones(shape) for part, shape in shapes.items() for g in "fno"}
    report = stablenum.diff(left, stablenum_jax.program(gates_apart, params, x))
    assert report.ok, str(report)
    assert report.weights["x_o"] == "inputs.weight, part 2 of 3, transposed"
    assert report.weights["h_n"] == "states.weight, part 3 of 3, transposed"
    assert any("order of the parts" in note for note in report.notes)


def test_square_matrices_are_laid_out_so_that_the_programs_agree() -> None:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(5, 4)).astype(np.float32)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    left = stablenum_torch.program(lambda x: model(x).square().mean(), torch.tensor(x), model=model)

    def as_in_torch(p: Any, x: Any) -> Any:
        h = jnp.tanh(x @ p["a"].T + p["a_b"])
        return jnp.square(h @ p["b"].T + p["b_b"]).mean()

    params = {"a": jnp.eye(4) + 0.1, "a_b": jnp.ones(4), "b": jnp.eye(4) - 0.2, "b_b": jnp.ones(4)}
    assert stablenum.diff(left, stablenum_jax.program(as_in_torch, params, x)).ok
    one_transposed = lambda p, x: as_in_torch({**p, "b": p["b"].T}, x)  # noqa: E731
    assert not stablenum.diff(left, stablenum_jax.program(one_transposed, params, x)).ok


def test_numbers_that_arrays_of_float32_hold_are_restored() -> None:
    x = torch.linspace(-1, 1, 6)

    def left(x: torch.Tensor) -> torch.Tensor:
        signs = x.sign()
        signs[signs.gt(0)] = 1.2
        return signs * x * 3.4445

    def right(_: Any, x: Any) -> Any:
        return jnp.where(x > 0, 1.2, jnp.sign(x)) * x * jnp.asarray((3.4445, -4.775))[0]

    a, b = stablenum_torch.program(left, x), stablenum_jax.program(right, {}, jnp.asarray(x.numpy()))
    assert stablenum.diff(a, b).ok


def test_a_table_in_a_buffer_is_the_one_that_the_other_program_computes() -> None:
    class Radial(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("centres", torch.linspace(0.0, 5.0, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.exp(-((x[..., None] - self.centres) ** 2)) * torch.cos(x * np.pi / 5)[..., None]

    model = Radial()
    left = stablenum_torch.program(lambda x: model(x), torch.from_numpy(X), model=model)

    def radial(_: Any, x: Any) -> Any:
        return (
            jnp.exp(-jnp.square(x[..., None] - jnp.linspace(0.0, 5.0, 8))) * jnp.cos(np.pi / 5 * x)[..., None]
        )

    report = stablenum.diff(left, stablenum_jax.program(radial, {}, X), weights="as they are")
    assert report.ok, str(report)


def test_scalars_that_an_optimizer_reads_are_kept_in_float64() -> None:
    x = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
    model = nn.Linear(5, 3, bias=False)
    optimizer = torch.optim.NAdam(model.parameters(), momentum_decay=1e9)
    left = stablenum_torch.program(
        lambda x: model(x).cos().mean(), torch.tensor(x), model=model, optimizer=optimizer
    )
    right = stablenum_jax.program(
        lambda p, x: jnp.cos(x @ p["w"]).mean(), {"w": jnp.ones((5, 3))}, x, optimizer=optax.nadam(2e-3)
    )
    assert stablenum.diff(left, right, steps=3).ok
    assert torch.get_default_dtype() == torch.float32


def test_an_update_of_torch_is_placed_where_the_optimizer_was_made(tmp_path: Path) -> None:
    # In a process of its own: torch wraps the step of SGD as soon as an SGD was made.
    (tmp_path / "pair.py").write_text(
        "import torch, stablenum_torch\n"
        "class Mine(torch.optim.SGD):\n"
        "    def step(self, closure=None):\n"
        "        return super().step(closure)\n"
        "def made(rate):\n"
        "    torch.manual_seed(0)\n"
        "    m, x = torch.nn.Linear(3, 2), torch.ones(4, 3)\n"
        "    return stablenum_torch.program(lambda: m(x).exp().mean(), model=m,\n"
        "        optimizer=Mine(m.parameters(), lr=rate))  # here\n"
        "def left(): return made(0.1)\n"
        "def right(): return made(0.2)\n"
    )

    done = subprocess.run(
        [sys.executable, "-m", "stablenum", "diff", "pair.py"],
        capture_output=True, text=True, cwd=tmp_path, check=False,
    )  # fmt: skip

    assert done.returncode == 1
    assert "pair.py:9  torch.optim.SGD" in done.stdout


class BothWays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(4, 6, bidirectional=True)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Any) -> Any:
        return self.head(self.rnn(x)[0].mean(0)).square().mean()


def gru(p: Any, xs: Any) -> Any:
    def step(h: Any, x: Any) -> Any:
        given, held = x @ p["wi"] + p["bi"], h @ p["wh"] + p["bh"]
        (r, z, n), (hr, hz, hn) = jnp.split(given, 3, -1), jnp.split(held, 3, -1)
        z = jax.nn.sigmoid(z + hz)
        h = (1 - z) * jnp.tanh(n + jax.nn.sigmoid(r + hr) * hn) + z * h
        return h, h

    return jax.lax.scan(step, jnp.zeros((xs.shape[1], 6)), xs)[1]


def both_ways(p: Any, x: Any) -> Any:
    states = gru(p["there"], x), gru(p["back"], x[::-1])[::-1]
    return jnp.mean((jnp.concatenate(states, -1).mean(0) @ p["w"] + p["b"]) ** 2)


def test_what_follows_from_a_state_is_not_put_before_it() -> None:
    torch.manual_seed(0)
    x, model = np.random.default_rng(2).normal(size=(5, 3, 4)).astype(np.float32), BothWays()
    shapes = {"wi": (4, 18), "wh": (6, 18), "bi": (18,), "bh": (18,)}
    cell = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    params = {"there": cell, "back": cell, "w": jnp.zeros((12, 3)), "b": jnp.zeros(3)}
    left = stablenum_torch.program(lambda x: model(x), torch.tensor(x), model=model)
    assert stablenum.diff(left, stablenum_jax.program(both_ways, params, jnp.asarray(x))).ok
