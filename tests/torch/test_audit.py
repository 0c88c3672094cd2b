"""The audit of torch optimizers: updates match those of real steps, repairs touch only poisoned elements."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import stablenum_torch
from stablenum.diagnosis import Cause
from stablenum_torch._diagnosis.audit import audit, repair, state_problems
from tests.torch.conftest import parameters, set_gradients, snapshot

NAMES = ("a", "b", "c")
O = torch.optim  # noqa: E741

# Optimizers with a known update rule, with settings in which the state determines the last step's update.
KNOWN: dict[str, tuple[Any, dict[str, Any]]] = {
    "adam": (O.Adam, {}),
    "adam, foreach": (O.Adam, {"foreach": True}),
    "adam, fused": (O.Adam, {"fused": True}),
    "adam, amsgrad": (O.Adam, {"amsgrad": True}),
    "adam, weight decay": (O.Adam, {"weight_decay": 0.1}),
    "adam, upwards": (O.Adam, {"maximize": True}),
    "adam, rate in a tensor": (O.Adam, {"lr": torch.tensor(0.02, dtype=torch.float64)}),
    "adamw": (O.AdamW, {"weight_decay": 0.0, "betas": (0.8, 0.95), "eps": 1e-3}),
    "nadam": (O.NAdam, {"momentum_decay": 0.01}),
    "nadam, upwards": (O.NAdam, {"maximize": True}),
    "radam, early": (O.RAdam, {}),
    "radam, late": (O.RAdam, {"betas": (0.9, 0.9)}),
    "adamax": (O.Adamax, {}),
    "rmsprop": (O.RMSprop, {}),
    "rmsprop, momentum": (O.RMSprop, {"momentum": 0.9, "weight_decay": 0.1}),
    "rmsprop, centred": (O.RMSprop, {"centered": True}),
    "adagrad": (O.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.3}),
    "sgd": (O.SGD, {}),
    "sgd, momentum": (O.SGD, {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}),
    "sgd, nesterov": (O.SGD, {"momentum": 0.9, "nesterov": True}),
    "sgd, upwards": (O.SGD, {"momentum": 0.9, "nesterov": True, "maximize": True}),
}
# The state does not determine the update: a term is not stored, or the rule is unknown.
UNKNOWN: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd, weight decay": (O.SGD, {"weight_decay": 0.1}),
    "adagrad, weight decay": (O.Adagrad, {"weight_decay": 0.1}),
    "adadelta": (O.Adadelta, {}),
    "adafactor": (O.Adafactor, {}),
    "rprop": (O.Rprop, {}),
    "asgd": (O.ASGD, {}),
}


def trained(make: Any, settings: dict[str, Any], steps: int = 8, dtype: torch.dtype = torch.float32):
    """An optimizer after some steps, its parameters, and those from before the last one."""
    params = parameters(dtype=dtype)
    optimizer = make(list(zip(NAMES, params, strict=True)), **{"lr": 0.01, **settings})
    before = []
    for i in range(steps):
        set_gradients(params, i)
        before = [p.detach().clone() for p in params]
        optimizer.step()
    return optimizer, params, before


def by_name(report) -> dict[str, Any]:
    """The rows of the report by name."""
    return {row.name: row for row in report.rows}


@pytest.mark.parametrize("kind", list(KNOWN))
def test_the_update_is_that_of_the_last_step(kind: str) -> None:
    optimizer, params, before = trained(*KNOWN[kind], dtype=torch.float64)
    found = by_name(audit(optimizer))
    assert set(found) == set(NAMES)
    for name, p, old in zip(NAMES, params, before, strict=True):
        dw = (p.detach() - old).numpy()
        measured = found[name].measured
        assert measured.update_rms == pytest.approx(np.sqrt(np.mean(dw**2)), rel=1e-9)
        assert measured.update_max == pytest.approx(np.abs(dw).max(), rel=1e-9)
        assert measured.update_relative == pytest.approx(np.abs(dw / p.detach().numpy()).max(), rel=1e-6)
        assert measured.update_bad == measured.stalled == 0


def test_decoupled_weight_decay_is_not_part_of_the_update() -> None:
    plain = audit(trained(O.AdamW, {"weight_decay": 0.0})[0])
    decayed = audit(trained(O.AdamW, {"weight_decay": 0.5})[0])
    for name in NAMES:
        assert by_name(plain)[name].update_rms == by_name(decayed)[name].update_rms


@pytest.mark.parametrize("kind", list(UNKNOWN))
def test_updates_that_the_state_does_not_hold_are_not_guessed(kind: str) -> None:
    report = audit(trained(*UNKNOWN[kind])[0])
    assert all(row.update_rms is None and row.stalled is None for row in report.rows)
    assert report.ok
    assert "  -  " in str(report)


def test_statistics_of_the_state_against_float64() -> None:
    optimizer, params, _ = trained(O.Adam, {"eps": 0.5})
    found = by_name(audit(optimizer))
    for name, p in zip(NAMES, params, strict=True):
        v = optimizer.state[p]["exp_avg_sq"].numpy().astype(np.float64) / (1 - 0.999**8)
        g = p.grad.numpy().astype(np.float64)
        row = found[name]
        assert row.below_eps == np.mean(np.sqrt(v) < 0.5)
        ratio = np.sqrt(np.mean(g**2 / np.maximum(v, 0.25)))
        assert row.measured.gradient_ratio == pytest.approx(ratio, rel=1e-12)
        assert row.measured.parameter_rms == pytest.approx(
            np.sqrt(np.mean(p.detach().numpy().astype(np.float64) ** 2)), rel=1e-12
        )
        assert row.shape == tuple(p.shape)
        assert row.state_dtypes == {"exp_avg": "float32", "exp_avg_sq": "float32"}


@pytest.mark.parametrize("guarded", [False, True])
def test_an_audit_changes_nothing(guarded: bool) -> None:
    optimizer, params, _ = trained(O.Adam, {"amsgrad": True})
    untouched = torch.nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [("d", untouched)]})
    audited = stablenum_torch.wrap(optimizer) if guarded else optimizer
    before, grads = snapshot(optimizer), [p.grad.clone() for p in params]
    optimizer.state.pop(untouched, None)
    report = audit(audited)
    assert repair(audited, report) == 0
    assert snapshot(optimizer) == before
    assert all(torch.equal(p.grad, g) for p, g in zip(params, grads, strict=True))
    assert len(report.rows) == 4
    assert untouched not in {p for p, state in optimizer.state.items() if state}


def test_stalls_are_measured_in_the_format_of_the_parameter() -> None:
    optimizer, params, _ = trained(O.Adam, {"lr": 1e-4, "betas": (0.9, 0.99)}, dtype=torch.bfloat16)
    for name, p in zip(NAMES, params, strict=True):
        row = by_name(audit(optimizer))[name]
        state = {k: t.double() for k, t in optimizer.state[p].items()}
        m, v = state["exp_avg"] / (1 - 0.9**8), state["exp_avg_sq"] / (1 - 0.99**8)
        moved = p.detach().double() - 1e-4 * m / (v.sqrt() + 1e-8)
        same = float((moved.to(torch.bfloat16) == p).double().mean())
        assert row.stalled == pytest.approx(same)
        assert same > 0.5
    causes = {risk.cause for risk in audit(optimizer).risks}
    assert causes == {Cause.STALL}


@pytest.mark.parametrize("fused", [False, True])
def test_float16_state_loses_eps(fused: bool) -> None:
    """The audit predicts what a step with zero gradients will do."""
    optimizer, params, _ = trained(O.Adam, {"fused": fused}, steps=1, dtype=torch.float16)
    with torch.no_grad():
        params[0].grad[0, 0] = 0.0
        for key in ("exp_avg", "exp_avg_sq"):
            optimizer.state[params[0]][key][0, 0] = 0.0
    report = audit(optimizer, names=dict(zip(NAMES, params, strict=True)))
    assert by_name(report)["a"].eps_lost is (not fused)
    optimizer.step()
    assert bool(torch.isfinite(params[0]).all()) is fused
    problems = state_problems(optimizer)
    assert any("is 0 in float16" in problem for problem in problems) is (not fused)
    assert any(risk.cause is Cause.OPTIMIZER_STATE for risk in report.risks)


def test_a_vanished_second_moment() -> None:
    optimizer, params, _ = trained(O.Adam, {})
    optimizer.state[params[1]]["exp_avg_sq"][2] = 0.0
    row = by_name(audit(optimizer))["b"]
    assert row.vanished == 1 / 7
    assert row.measured.update_max > 1e3
    (problem,) = state_problems(optimizer)
    assert problem.startswith("b: v is 0 but m is not, in 1 of 7 elements")


def test_a_stale_second_moment() -> None:
    p = torch.nn.Parameter(torch.ones(100))
    optimizer = O.Adam([("w", p)], lr=0.01)
    for size in [1e-3] * 20 + [1.0]:
        p.grad = torch.full((100,), size)
        optimizer.step()
    (risk,) = audit(optimizer).risks
    assert risk.cause is Cause.STALE_SECOND_MOMENT
    assert state_problems(optimizer) == ()


# --- repair ----------------------------------------------------------------------------------

POISON = {
    "v inf": ("exp_avg_sq", math.inf),
    "v NaN": ("exp_avg_sq", math.nan),
    "v negative": ("exp_avg_sq", -1e-3),
    "m NaN": ("exp_avg", math.nan),
    "m inf": ("exp_avg", -math.inf),
    "maximum": ("max_exp_avg_sq", math.inf),
}


@pytest.mark.parametrize("kind", list(POISON))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.complex64], ids=str)
@pytest.mark.parametrize("guarded", [False, True])
def test_a_repair_resets_only_the_poisoned_elements(kind: str, dtype: torch.dtype, guarded: bool) -> None:
    optimizer, params, _ = trained(O.Adam, {"amsgrad": True, "eps": 1e-3}, dtype=dtype)
    key, value = POISON[kind]
    audited = stablenum_torch.wrap(optimizer) if guarded else optimizer
    state = optimizer.state[params[2]]
    parts = _parts(state[key])
    with torch.no_grad():
        parts.view(-1)[3] = value
    before = copy.deepcopy({i: optimizer.state[p] for i, p in enumerate(params)})
    report = audit(audited)
    assert report.poisoned == {"c": 1}
    assert state_problems(audited)[0].startswith("c: state of 1 of ")
    assert repair(optimizer, report) == 1
    for i, p in enumerate(params):
        for name, tensor in optimizer.state[p].items():
            now, then = _parts(tensor).reshape(-1), _parts(before[i][name]).reshape(-1)
            if i == 2 and name != "step":
                assert now[3] == 0
                now, then = torch.cat([now[:3], now[4:]]), torch.cat([then[:3], then[4:]])
            assert now.view(torch.uint8).numpy().tobytes() == then.view(torch.uint8).numpy().tobytes()
    assert audit(audited).poisoned == {}
    set_gradients(params, 99)
    if dtype is torch.complex64:
        params[2].grad = torch.complex(params[2].grad.real, torch.ones_like(params[2].grad.real))
    old = params[2].detach().clone()
    audited.step()
    step = _parts(params[2].detach() - old).reshape(-1)[3]
    assert torch.isfinite(step)
    # m = 0.1 g, v = 0.001 g^2, and no bias to correct: 0.1 / sqrt(0.001) = 3.2 learning rates.
    assert 0 < abs(float(step)) < 0.01 * 0.1 / math.sqrt(0.001 * (1 / (1 - 0.999**9))) / (1 - 0.9**9) * 1.2


@pytest.mark.parametrize(
    "make", [stablenum_torch.MasterWeights, stablenum_torch.KahanUpdate, stablenum_torch.StochasticRounding]
)
def test_narrow_parameters_are_audited_by_the_weights_they_represent(make: Any) -> None:
    """A step of 1e-4 stalls a bfloat16 weight of 1, but none of these."""
    p = torch.nn.Parameter(torch.ones(6, dtype=torch.bfloat16))
    optimizer = make([("w", p)], lambda params: O.AdamW(params, lr=1e-4))
    for step in range(8):
        p.grad = torch.ones_like(p) * (step + 1)
        optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    for audited in (optimizer, stablenum_torch.wrap(optimizer)):
        report = audit(audited)
        assert report.ok, str(report)
        (row,) = report.rows
        assert (row.name, row.shape, row.stalled, row.others) == ("w", (6,), 0.0, {})
        assert row.update_rms == pytest.approx(1e-4, rel=0.2)
        assert row.state_dtypes.get("compensation", "int16") == "int16"
    optimizer.state[p]["exp_avg_sq"][2] = math.inf
    assert audit(optimizer).poisoned == {"w": 1}
    assert repair(optimizer, audit(optimizer)) == 1
    assert audit(optimizer).poisoned == {}
    for key, now in optimizer.state_dict()["state"][0].items():
        then = before["state"][0][key]
        if key in ("exp_avg", "exp_avg_sq", "compensation"):
            assert (now[2], then[2] != 0) == (0, True)
            now, then = now[[0, 1, 3, 4, 5]], then[[0, 1, 3, 4, 5]]
        assert torch.equal(now, then)


def _parts(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def test_the_first_update_after_a_late_repair_is_three_learning_rates() -> None:
    p = torch.nn.Parameter(torch.zeros(2))
    optimizer = O.Adam([("w", p)], lr=0.01)
    p.grad = torch.ones(2)
    optimizer.step()
    optimizer.state[p]["step"].fill_(100_000.0)
    optimizer.state[p]["exp_avg_sq"].fill_(1.0)[1] = math.inf
    optimizer.state[p]["exp_avg"].fill_(1.0)
    assert repair(optimizer, audit(optimizer)) == 1
    old = p.detach().clone()
    optimizer.step()
    step = (old - p.detach()).tolist()
    assert step[0] == pytest.approx(0.01, rel=1e-3)
    assert step[1] == pytest.approx(0.01 * 0.1 / math.sqrt(0.001), rel=1e-3)
    for _ in range(300):
        optimizer.step()
    old = p.detach().clone()
    optimizer.step()
    assert (old - p.detach()).tolist()[1] == pytest.approx(0.01 / math.sqrt(1 - 0.999**302), rel=1e-2)


def test_a_fully_poisoned_tensor_keeps_its_step_count() -> None:
    optimizer, params, _ = trained(O.AdamW, {})
    state = optimizer.state[params[0]]
    state["exp_avg"].fill_(math.nan)
    state["exp_avg_sq"].fill_(math.nan)
    assert repair(optimizer, audit(optimizer)) == 12
    assert float(state["step"]) == 8.0
    assert not state["exp_avg"].any()
    assert not state["exp_avg_sq"].any()
    set_gradients(params, 9)
    optimizer.step()
    assert torch.isfinite(params[0]).all()


def test_bad_parameters_are_reported_but_not_replaced() -> None:
    optimizer, params, _ = trained(O.Adam, {})
    with torch.no_grad():
        params[1][0] = math.nan
    report = audit(optimizer)
    assert report.risks[0].cause is Cause.PARAMETERS
    assert repair(optimizer, report) == 0
    assert torch.isnan(params[1][0])
    assert state_problems(optimizer) == ()


@pytest.mark.parametrize(
    "kind", ["rmsprop, momentum", "rmsprop, centred", "adagrad", "adamax", "sgd, momentum"]
)
def test_repair_of_other_optimizers(kind: str) -> None:
    optimizer, params, _ = trained(*KNOWN[kind])
    entries = {k: t for k, t in optimizer.state[params[0]].items() if k != "step"}
    for key in entries:
        entries[key][1, 1] = math.inf
        assert repair(optimizer, audit(optimizer)) == 1
        assert all(t[1, 1] == 0 for t in entries.values())
        report = audit(optimizer)
        assert not any(risk.cause is Cause.OPTIMIZER_STATE for risk in report.risks)
    set_gradients(params, 9)
    optimizer.step()
    assert torch.isfinite(params[0]).all()


def test_unknown_state_is_reported_but_not_repaired() -> None:
    optimizer, params, _ = trained(O.Rprop, {})
    optimizer.state[params[0]]["prev"][0, 0] = math.nan
    report = audit(optimizer)
    assert report.rows[0].others["prev"] == 1
    assert "state entries of unknown meaning are not finite: prev (1)" in state_problems(optimizer)[0]
    assert repair(optimizer, report) == 0
    assert torch.isnan(optimizer.state[params[0]]["prev"][0, 0])


# --- odd tensors, odd optimizers ---------------------------------------------------------------


def test_empty_tensors_single_elements_and_missing_state() -> None:
    params = {"none": torch.zeros(0, 3), "one": torch.tensor(2.0), "frozen": torch.ones(2)}
    params = {name: torch.nn.Parameter(p) for name, p in params.items()}
    optimizer = O.Adam(params.items(), lr=0.1)
    for name in ("none", "one"):
        params[name].grad = torch.ones_like(params[name])
    optimizer.step()
    report = audit(optimizer)
    assert report.ok
    rows = by_name(report)
    assert rows["none"].measured.size == 0
    assert rows["one"].update_rms == pytest.approx(0.1)
    assert rows["frozen"].state_dtypes == {}
    json.loads(report.to_json(), parse_constant=pytest.fail)


@pytest.mark.parametrize("make", [O.SparseAdam, O.SGD])
def test_sparse_gradients(make: Any) -> None:
    table = torch.nn.Embedding(50, 4, sparse=True)
    optimizer = make(table.parameters(), lr=0.1)
    table(torch.tensor([1, 1, 3])).sum().backward()
    optimizer.step()
    report = audit(optimizer, names=table)
    row = by_name(report)["weight"]
    assert report.ok
    if make is O.SGD:
        assert row.update_rms == pytest.approx(math.sqrt((4 * 0.2**2 + 4 * 0.1**2) / 200))
        assert row.measured.moved == 8
    else:
        assert row.measured.gradient_ratio == pytest.approx(math.sqrt(8 / 200), rel=1e-4)


def test_extreme_states() -> None:
    p = torch.nn.Parameter(torch.ones(4))
    optimizer = O.Adam([("w", p)], lr=0.1)
    p.grad = torch.ones(4)
    optimizer.step()
    optimizer.state[p]["exp_avg_sq"].copy_(torch.tensor([3e38, 1e-45, 0.0, 1.0]))
    optimizer.state[p]["exp_avg"].copy_(torch.tensor([1e19, 1e-23, 0.0, 1.0]))
    row = audit(optimizer, grads=[torch.tensor([3e38, 1e-22, 0.0, 1.0])]).rows[0]
    v = np.asarray([3e38, 1.401298464324817e-45, 0.0, 1.0]) / 0.001
    g = np.asarray([float(np.float32(3e38)), 1e-22, 0.0, 1.0])
    expected = math.sqrt(np.mean((g / np.maximum(np.sqrt(v), 1e-8)) ** 2))
    assert row.measured.gradient_ratio == pytest.approx(expected, rel=1e-6)
    assert row.measured.alive == 3
    assert row.measured.below_eps == 1
    assert math.isfinite(row.update_rms)


class Subclass(O.Adam):
    """Keeps the update rule."""


class OtherFormula(O.Adam):
    """Has its own step."""

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Halve the parameters."""
        for group in self.param_groups:
            for p in group["params"]:
                p.data *= 0.5
                self.state[p]["exp_avg_sq"] = torch.ones_like(p)


def test_subclasses_are_recognised_by_their_step_method() -> None:
    report = audit(trained(Subclass, {})[0])
    assert report.rows[0].update_rms is not None
    assert report.optimizer == "Subclass"
    report = audit(trained(OtherFormula, {})[0])
    assert report.rows[0].update_rms is None
    assert report.rows[0].measured.second_inf == 0
    assert "update formula of OtherFormula is not known" in report.notes[0]


class HookedFirst(O.Adam):
    """Like AdamW created before any Adam: torch wraps the class's step for its profiler."""

    @functools.wraps(O.Adam.step)
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Wrapped a second time."""
        return super().step(closure)


def test_the_update_rule_is_recognised_behind_the_profiler_hook() -> None:
    assert HookedFirst.step is not O.Adam.step
    assert audit(trained(HookedFirst, {})[0]).rows[0].update_rms is not None


def test_an_unknown_update_rule_has_no_gradient_ratio() -> None:
    row = audit(trained(OtherFormula, {})[0]).rows[0]
    assert row.measured.gradient_ratio is None
    assert row.eps_lost is None


def test_the_page_shows_what_is_printed() -> None:
    page = (Path(__file__).parents[2] / "docs" / "audit.md").read_text(encoding="utf-8")
    code, shown = (
        re.search(rf"^```{language}\n(.*?)^```", page, re.M | re.S)[1] for language in ("python", "text")
    )
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, "<documentation>", "exec"), {"__name__": "example"})
    # The digits depend on the machine; the layout and the words do not.
    words = [re.sub(r"[0-9]\S*", "#", line).split() for line in output.getvalue().splitlines()]
    assert words == [re.sub(r"[0-9]\S*", "#", line).split() for line in shown.splitlines()]


def test_the_update_rule_is_recognised_behind_a_scheduler() -> None:
    optimizer = trained(O.Adam, {})[0]
    schedule = O.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    whole = by_name(audit(optimizer))["a"].update_rms
    optimizer.step()
    schedule.step()
    assert by_name(audit(optimizer))["a"].law.lr == 0.005
    assert by_name(audit(optimizer))["a"].update_rms < 0.8 * whole


def test_parameter_names_from_every_source() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = O.SGD(model.parameters(), lr=0.1)
    assert {r.name for r in audit(optimizer).rows} == {
        "param_groups[0].params[0]",
        "param_groups[0].params[1]",
    }
    assert {r.name for r in audit(optimizer, names=model).rows} == {"weight", "bias"}
    guarded = stablenum_torch.wrap(optimizer, names=model)
    assert {r.name for r in audit(guarded).rows} == {"weight", "bias"}
    own = O.SGD(model.named_parameters(), lr=0.1)
    assert {r.name for r in audit(own).rows} == {"weight", "bias"}
    assert audit(guarded).optimizer == "SGD"


def test_a_loss_scale_keeps_gradients_out() -> None:
    optimizer, params, _ = trained(O.Adam, {})
    guarded = stablenum_torch.wrap(optimizer, loss_scale="dynamic")
    report = audit(guarded)
    assert all(row.measured.gradient_ratio is None for row in report.rows)
    assert "loss scale" in report.notes[0]
    report = audit(guarded, grads=[p.grad for p in params])
    assert all(row.measured.gradient_ratio is not None for row in report.rows)
    report = audit(guarded, grads={"b": params[1].grad})
    assert by_name(report)["a"].measured.gradient_ratio is None
    assert by_name(report)["b"].measured.gradient_ratio is not None


def test_bad_gradients_are_noted_but_not_attributed_to_the_state() -> None:
    optimizer, params, _ = trained(O.Adam, {})
    params[0].grad[0, 0] = math.nan
    report = audit(optimizer)
    assert report.ok
    assert report.notes == ("gradients are not finite: a; replay the step to see why",)
    assert by_name(report)["a"].measured.gradient_bad == 1


def test_an_optimizer_inside_accelerate() -> None:
    import accelerate

    wrapped = accelerate.Accelerator(cpu=True).prepare(trained(O.Adam, {})[0])
    assert type(wrapped).__name__ == "AcceleratedOptimizer"
    assert audit(wrapped).optimizer == "Adam"
    assert audit(wrapped).rows[0].update_rms is not None


@pytest.mark.parametrize(
    ("grads", "error", "message"),
    [
        ([torch.ones(4, 3)], ValueError, "one gradient per parameter, 3; got 1"),
        ({"x": torch.ones(3)}, ValueError, "got 'x'; the parameters' names are a, b, c"),
        ([torch.ones(4), None, None], ValueError, r"grads\['a'\] must have the parameter's shape \(4, 3\)"),
        ([1.0, None, None], TypeError, r"grads\['a'\] must be a tensor or None; got float"),
        (3, TypeError, "a mapping of name to tensor, a sequence of tensors, or None; got int"),
    ],
)
def test_wrong_gradients(grads: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        audit(trained(O.Adam, {})[0], grads)


def test_wrong_optimizer_and_names() -> None:
    with pytest.raises(TypeError, match=r"must be a torch\.optim\.Optimizer, guarded or not; got Linear"):
        audit(torch.nn.Linear(1, 1))
    with pytest.raises(TypeError, match="names must be the model"):
        audit(trained(O.Adam, {})[0], names=3)
    with pytest.raises(TypeError, match=r"must be a torch\.optim\.Optimizer"):
        state_problems(None)


def test_one_block_and_many_blocks_give_the_same_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, _, _ = trained(O.Adam, {})
    whole = audit(optimizer).to_dict()
    monkeypatch.setattr("stablenum_torch._diagnosis.audit._ON_HOST", 5)
    for one, many in zip(whole["rows"], audit(optimizer).to_dict()["rows"], strict=True):
        for key, value in one.items():
            assert many[key] == (pytest.approx(value, rel=1e-12) if isinstance(value, float) else value), key


def test_a_repair_needs_an_up_to_date_audit() -> None:
    optimizer, params, _ = trained(O.Adam, {})
    with pytest.raises(TypeError, match=r"audit must be what stablenum_torch\.audit"):
        repair(optimizer, None)
    with pytest.raises(TypeError, match=r"optimizer must be a torch\.optim\.Optimizer"):
        repair(params, audit(optimizer))
    optimizer.state[params[0]]["exp_avg_sq"][0, 0] = math.inf
    report = audit(optimizer)
    assert repair(optimizer, report) == 1
    with pytest.raises(ValueError, match="it names 1 poisoned elements, but the optimizer's state has 0"):
        repair(optimizer, report)
