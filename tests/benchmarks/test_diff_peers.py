"""The tools that ``benchmarks.diff_peers`` runs see what they should, and nothing else."""

from __future__ import annotations

import importlib.metadata
import sys

import equinox as eqx
import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

import benchmarks.__main__ as command
import stablenum_jax
import stablenum_torch
from benchmarks import diff_peers
from benchmarks.peers.allclose import allclose, matched_modules
from benchmarks.peers.answers import Answer, figures, right_place
from benchmarks.peers.debug_mode import EXACT, NEAR, debug_mode, logged
from benchmarks.peers.jax_runs import jax_run
from benchmarks.peers.msprobe import answer_of
from benchmarks.peers.padiff import DEFAULT, README, padiff
from benchmarks.peers.runs import torch_run, torch_step
from stablenum.diagnosis.diff.weights.origins import Cut, Origin, Piece
from stablenum.diagnosis.diff.weights.weights import WeightMap

X = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)


class Block(nn.Module):
    def __init__(self, width, slope):
        super().__init__()
        self.slope = slope
        self.first, self.second = nn.Linear(4, width), nn.Linear(width, 4)

    def forward(self, x):
        return self.second(nn.functional.leaky_relu(self.first(x), self.slope))


class Model(nn.Module):
    def __init__(self, slope=0.1, scale=1.0):
        super().__init__()
        self.scale = scale
        self.blocks = nn.Sequential(Block(5, 0.1), nn.Sequential(Block(6, slope)))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.blocks(x)) * self.scale


def side(*args, power=2, rate=0.1, loss=None, **kwargs):
    def made():
        torch.manual_seed(0)
        model = Model(*args, **kwargs)
        measure = loss or (lambda out: out.abs().pow(power).mean())
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        return stablenum_torch.program(
            lambda x: measure(model(x)), torch.tensor(X), model=model, optimizer=optimizer
        )

    return made


def ran(*args, **kwargs):
    return torch_run(torch_step(side(*args, **kwargs)))


def identity(run):
    axes = {name: tuple(range(x.ndim)) for name, x in run.gradients.items()}
    return WeightMap({n: Origin(Piece(n), x.shape, axes[n]) for n, x in run.gradients.items()})


def by_allclose(left, right, **tolerance):
    return allclose(left, right, identity(left), **tolerance)


# --- tools of one framework -----------------------------------------------------------------------------


def test_equal_programs_agree_for_all_tools():
    left, right = ran(), ran()
    assert by_allclose(left, right) == Answer(False)
    for settings in (DEFAULT, README):
        assert padiff(left, right, **settings) == Answer(False)


def hashed(tolerance, **kwargs):
    file = __file__.rpartition("/")[2]
    return debug_mode(
        logged(torch_step(side())), logged(torch_step(side(**kwargs))), file, tolerance=tolerance
    )


def line_with(text):
    with open(__file__, encoding="utf-8") as file:
        return next(i for i, line in enumerate(file, 1) if text in line)


def test_debug_mode_names_the_line_of_the_first_operation_with_another_hash():
    assert hashed(EXACT) == Answer(False)
    assert hashed(EXACT, slope=0.3) == Answer(True, "forward", line=line_with("functional.leaky_relu(self"))
    assert hashed(EXACT, slope=0.1 + 1e-7) == Answer(
        True, "forward", line=line_with("functional.leaky_relu(self")
    )
    assert hashed(NEAR, slope=0.1 + 1e-7) == Answer(False)
    assert hashed(EXACT, rate=0.2)[:2] == (True, "update")


def test_debug_mode_takes_another_operation_for_a_difference():
    doubled = hashed(EXACT, loss=lambda out: (out.abs() * out.abs()).mean())  # which is the same
    assert doubled.differs


def test_the_first_module_whose_output_differs_is_named():
    left, right = ran(), ran(slope=0.3)
    named = ("forward", "blocks.1.0.second", "blocks.1.0.second")
    assert by_allclose(left, right)[1:4] == named
    assert padiff(left, right, **DEFAULT)[1:4] == named


def test_a_difference_after_all_submodules_is_their_parents():
    left, right = ran(), ran(scale=1.5)
    assert by_allclose(left, right) == Answer(True, "forward")
    assert padiff(left, right, **README) == Answer(True, "forward")


def test_the_loss_is_compared_after_the_modules_and_before_the_gradients():
    left, right = ran(), ran(power=3)
    assert by_allclose(left, right) == Answer(True, "forward")
    assert padiff(left, right, **DEFAULT) == Answer(True, "forward")


def test_a_gradient_that_differs_is_named_at_the_last_module():
    def other(out):
        loss = out.square().mean()
        return 2 * loss - loss.detach()

    left, right = ran(), ran(loss=other)
    assert by_allclose(left, right) == Answer(True, "backward")
    assert padiff(left, right, **DEFAULT) == Answer(True, "backward", "head", "head"), "opened from the top"


def test_an_update_is_compared_last():
    left, right = ran(), ran(rate=0.2)
    assert by_allclose(left, right)[:2] == (True, "update")
    assert padiff(left, right, **DEFAULT)[:2] == (True, "update")
    assert by_allclose(left, right, atol=1.0) == Answer(False), "within the tolerance"


def test_equal_means_hide_a_difference_of_the_elements():
    shuffled, plain = ran(), ran()
    for call in shuffled.calls:
        call.outputs[0] = call.outputs[0][::-1]
    assert padiff(plain, shuffled, **DEFAULT) == Answer(False)
    assert padiff(plain, shuffled, **README) == Answer(True, "forward")


def test_modules_with_other_submodules_cannot_be_opened():
    left, right = ran(), ran(slope=0.3)
    right.calls[0].children.pop()
    assert padiff(left, right, **DEFAULT) == Answer(True, "forward", "", "")


def test_weights_are_carried_over():
    step = torch_step(side())
    arrays = {name: np.full(p.shape, 2.0) for name, p in step.model.named_parameters()}
    given = torch_step(side(), arrays)
    assert all((p == 2).all() for p in given.model.parameters())


def test_modules_correspond_by_their_weights_and_else_by_name():
    left, right = ran(), ran()
    right.outputs = {name.replace("first", "up"): x for name, x in right.outputs.items()}
    weights = WeightMap({n.replace("first", "up"): o for n, o in identity(left).origins.items()})
    found = matched_modules(left, right, weights)
    assert found["blocks.0.first"] == "blocks.0.up"
    assert found["blocks.1.0"] == "blocks.1.0", "the innermost of two around the same weights"
    assert found["blocks.1"] == "blocks.1"
    assert matched_modules(left, right, WeightMap({}))["head"] == "head"
    assert "blocks.0.first" not in matched_modules(left, right, WeightMap({}))


def test_a_module_with_a_part_of_the_weights_is_not_the_same():
    left, right = ran(), ran()
    part = Piece("blocks.0.first.weight", (Cut(0, 2, 0, 0, 2),))
    right.outputs = {"half": right.outputs["blocks.0.first"]}
    weights = WeightMap(
        {
            "half.weight": Origin(part, (2, 4), (0, 1)),
            "half.bias": identity(left).origins["blocks.0.first.bias"],
        }
    )
    assert not matched_modules(left, right, weights)


def test_msprobe_names_a_line_and_for_modules_a_path():
    own = "/tmp/pair.py, line 12, in forward, \n h = f(x)"
    library = "/lib/site-packages/torch/f.py, line 3, in f"
    calls = {"0": [["Functional.gelu.0.forward"], [f"File {library}", f"File {own}"]]}
    assert answer_of({"op_name": "Functional.gelu.0.forward"}, calls, "pair.py") == Answer(
        True, "forward", line=12
    )
    assert answer_of({"op_name": "Functional.gelu.0.backward"}, calls, "pair.py")[1::3] == ("backward", 12)
    named = answer_of({"op_name": "Module.layers.0.up.Linear.forward.0"}, calls, "pair.py")
    assert named == Answer(True, "forward", "layers.0.up", "layers.0.up")
    named = answer_of({"op_name": "Module.layers.0.up.Linear.parameters_grad.0"}, calls, "pair.py")
    assert named[1:3] == ("backward", "layers.0.up")


# --- JAX ------------------------------------------------------------------------------------------------


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(2, name="head")(linen.tanh(linen.Dense(3, name="first")(x)))


class Nnx(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(4, 3, rngs=rngs), nnx.Linear(3, 2, rngs=rngs)])

    def __call__(self, x):
        return self.layers[1](jnp.tanh(self.layers[0](x)))


class Equinox(eqx.Module):
    layers: list

    def __init__(self):
        keys = jax.random.split(jax.random.key(0))
        self.layers = [eqx.nn.Linear(4, 3, key=keys[0]), eqx.nn.Linear(3, 2, key=keys[1])]

    def __call__(self, x):
        first, second = (jax.vmap(jax.vmap(layer)) for layer in self.layers)
        return second(jnp.tanh(first(x)))


def of_linen():
    params = Linen().init(jax.random.key(0), X)["params"]
    return stablenum_jax.program(lambda p, x: (Linen().apply({"params": p}, x) ** 2).mean(), params, X)


def of_model(kind):
    return lambda: stablenum_jax.program(lambda m, x: (m(x) ** 2).mean(), kind(), X)


@pytest.mark.parametrize(
    ("made", "first", "last"),
    [
        (of_linen, "first", "head"),
        (of_model(Nnx), "layers.0", "layers.1"),
        (of_model(Equinox), "layers.0", "layers.1"),
    ],
)
def test_outputs_of_modules_of_jax_and_their_gradients_are_captured(made, first, last):
    program = made()
    weights = {name: np.asarray(x) + 0.5 for name, x in program.parameters().items()}
    found = jax_run(made, weights)
    assert list(found.outputs) == [first, last, ""]
    assert list(found.cotangents) == ["", last, first]
    kernel, bias = sorted((x for n, x in weights.items() if n.startswith(first)), key=np.ndim, reverse=True)
    kernel = kernel if kernel.shape == (4, 3) else kernel.T
    np.testing.assert_allclose(found.outputs[first][0][0], X @ kernel + bias, rtol=1e-5)
    (out,) = found.outputs[""][0]
    np.testing.assert_allclose(found.loss, (out**2).mean(), rtol=1e-6)
    np.testing.assert_allclose(found.cotangents[""][0][0], 2 * out / out.size, rtol=1e-6)
    for kind in (nnx.Linear, eqx.nn.Linear, Nnx, Equinox):
        assert "called" not in kind.__call__.__qualname__, "the classes are as they were"


def test_a_model_that_is_an_argument_of_vmap_is_captured():
    def mapped():
        def loss(model, x):
            return (jax.vmap(lambda m, row: m(row[None])[0], in_axes=(None, 0))(model, x) ** 2).mean()

        return stablenum_jax.program(loss, Equinox(), X)

    found = jax_run(mapped, {})
    assert list(found.outputs) == ["layers.0", "layers.1", ""]
    assert found.outputs["layers.0"][0][0].shape == (2, 1, 3, 3)


def test_calls_within_a_scan_are_captured_one_by_one():
    class Cell(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

        def __call__(self, x):
            def step(h, _):
                h = jnp.tanh(self.linear(h))
                return h, None

            return jax.lax.scan(step, x, None, length=3)[0]

    found = jax_run(of_model(Cell), {})
    assert [x.shape for x in found.outputs["linear"][0]] == [X.shape] * 3
    assert len(found.cotangents["linear"][0]) == 3


def test_arrays_that_no_layout_makes_comparable_are_passed_over():
    left, right = ran(), ran()
    (x,) = left.outputs["head"][0]
    right.outputs["head"] = {0: [x.reshape(2, 6)]}
    assert by_allclose(left, right) == Answer(False), "only put together"
    right.outputs["head"] = {0: [x.reshape(4, 3) + 1]}
    assert by_allclose(left, right) == Answer(False), "4 x 3 is no layout of 2 x 3 x 2"


def test_the_gradients_of_several_calls_are_compared_in_either_order():
    left, right = ran(), ran()
    (x,) = left.cotangents["head"][0]
    left.cotangents["head"] = {0: [x, 2 * x]}
    right.cotangents["head"] = {0: [np.stack([2 * x, x])]}
    assert by_allclose(left, right) == Answer(False)
    right.cotangents["head"] = {0: [np.stack([3 * x, x])]}
    assert by_allclose(left, right)[1:3] == ("backward", "head")


def test_gradients_are_compared_only_where_all_outputs_have_a_counterpart():
    left, right = ran(), ran()
    right.cotangents["head"] = {0: [x + 1 for x in right.cotangents["head"][0]]}
    assert by_allclose(left, right)[1:3] == ("backward", "head")
    left.outputs["head"][1] = [np.zeros(5)]  # what a layer returns in addition, and a cell does not
    assert by_allclose(left, right) == Answer(False)


def test_another_layout_is_laid_on_the_first():
    left, right = ran(), ran()
    right.outputs["head"] = {0: [np.moveaxis(x, -1, 1) for x in right.outputs["head"][0]]}
    assert by_allclose(left, right) == Answer(False)
    right.outputs["head"] = {0: [x + 1 for x in right.outputs["head"][0]]}
    assert by_allclose(left, right)[1:3] == ("forward", "head")


# --- judging --------------------------------------------------------------------------------------------

MODULES = {"module_left": "blocks.0.attn", "module_right": "layer_0/attention"}
CASE = {"kind": "error", "phase": "forward", **MODULES}


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (Answer(True, "forward", "blocks.0.attn", "layer_0.attention"), True),
        (Answer(True, "forward", "blocks.0.attn.out", "layer_0.attention.out"), True),
        (Answer(True, "forward", "blocks.0.attn.out", "layer_0.mlp"), False),
        (Answer(True, "forward", "blocks.1.attn", "layer_1.attention"), False),
        (Answer(True, "forward", "blocks.0", "layer_0"), False),
        (Answer(True, "backward", "blocks.0.attn", "layer_0.attention"), False),
        (Answer(True, "backward", line=7), True),
        (Answer(True, "forward", line=8), False),
        (Answer(False), False),
    ],
)
def test_a_place_is_right_by_its_line_or_by_its_module(answer, right):
    assert right_place(answer, CASE, {6, 7}) == right


def test_figures_are_counted_by_phase():
    alike = {"kind": "equivalent"}
    update = CASE | {"phase": "update"}
    judged = [
        (alike, Answer(False), False),
        (alike, Answer(True, "forward"), False),
        (alike, Answer(True, "update"), False),
        (CASE, Answer(True, "forward"), True),
        (CASE, Answer(False), False),
        (update, Answer(True, "forward"), False),
    ]
    assert figures(judged) == {
        "equivalent": {"pairs": 3, "false_alarms": 1, "in_the_update": 1},
        "forward": {"pairs": 2, "seen": 1, "place": 1},
        "update": {"pairs": 1, "seen": 1, "place": 0},
    }


def test_a_missing_peer_ends_the_run(monkeypatch, tmp_path):
    def version(name):
        if name == "mindstudio-probe":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(command, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "diff-peers"])
    monkeypatch.setattr(diff_peers.importlib.metadata, "version", version)
    with pytest.raises(SystemExit, match="mindstudio-probe is not installed"):
        command.main()
    assert not list(tmp_path.iterdir())
