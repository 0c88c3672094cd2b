"""Settings that are replaced during training, and states that were saved under other settings."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as distributed
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from stablenum import (
    AutoClip,
    DynamicLossScale,
    EscalatePrecision,
    GuardConfig,
    LogMaxLossScale,
    SpikeGuard,
    StatisticsNotLoadedWarning,
    ZClip,
)
from stablenum.arrays import leaves
from stablenum_torch import wrap

LEVELS = ("float16", "bfloat16", "float32")


def _guarded(config: GuardConfig) -> tuple[torch.nn.Parameter, Any]:
    w = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    return w, wrap(torch.optim.SGD([w], lr=0.125), config)


def _step(w: torch.nn.Parameter, opt: Any) -> dict[str, Any]:
    opt.zero_grad()
    opt.backward((w * w).sum())
    opt.step()
    return dict(opt.last)


@pytest.mark.parametrize(
    ("before", "after", "scale"),
    [
        ({"loss_scale": "dynamic"}, {}, 1.0),
        ({"loss_scale": 8.0}, {"loss_scale": 16.0}, 16.0),
        ({}, {"loss_scale": "dynamic"}, 65536.0),
        ({"loss_scale": LogMaxLossScale()}, {"loss_scale": DynamicLossScale(max_scale=2.0**17)}, None),
        ({"clip": ZClip()}, {}, 1.0),
        ({}, {"clip": AutoClip(), "spike": "skip"}, 1.0),
        ({"spike": SpikeGuard(window=100)}, {"spike": SpikeGuard(window=70)}, 1.0),
    ],
)
def test_settings_can_be_replaced_between_two_steps(before: Any, after: Any, scale: float | None) -> None:
    w, opt = _guarded(GuardConfig(**before))
    _step(w, opt)
    opt.config = GuardConfig(**after)
    norm = 2.0 * float(w.detach().norm())
    seen = _step(w, opt)
    assert (seen["step"], seen["applied"]) == (1, True)
    assert seen["grad_norm"] == pytest.approx(norm)
    assert scale is None or opt.loss_scale == scale
    fresh = _guarded(GuardConfig(**after))[1]
    fresh.load_state_dict(opt.state_dict())  # without a warning: the statistics are those of the new rules
    assert fresh.last == opt.last


def test_a_rule_that_stays_keeps_its_statistics_when_settings_are_replaced() -> None:
    w, opt = _guarded(GuardConfig(clip=ZClip(), max_skips_in_a_row=3))
    _step(w, opt)
    opt.config = GuardConfig(clip=[ZClip(), 1.0], spike="skip")
    assert int(opt.guard_state.clip[0].seen) == 1


def test_tensors_taken_from_the_guard_follow_when_settings_or_parameters_change() -> None:
    w, opt = _guarded(GuardConfig(clip=ZClip(), loss_scale="dynamic"))
    _step(w, opt)
    held = opt.guard_state
    opt.config = GuardConfig(clip=[ZClip(), 1.0], loss_scale=8.0, spike="skip")
    assert held.loss_scale.scale.item() == 8.0
    opt.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    opt.config = GuardConfig(clip=ZClip(), loss_scale=4.0)
    _step(w, opt)
    for mine, theirs in zip(leaves(held), leaves(opt.guard_state), strict=True):
        assert mine is theirs
    assert (held.step.item(), held.clip[0].seen.item(), held.loss_scale.scale.item()) == (2, 2, 4.0)


def test_a_scale_cannot_be_replaced_while_gradients_are_multiplied_by_it() -> None:
    w, opt = _guarded(GuardConfig(loss_scale="dynamic"))
    opt.backward((w * w).sum())
    with pytest.raises(RuntimeError, match=r"config\.loss_scale .* after step\(\)"):
        opt.config = GuardConfig(loss_scale=8.0)
    opt.step()
    assert opt.last["grad_norm"] == 10.0


def test_a_loaded_scale_is_within_the_bounds_of_the_guard_that_loads_it() -> None:
    _, high = _guarded(GuardConfig(loss_scale=DynamicLossScale(init_scale=2.0**20)))
    for bounds, expected in (((1.0, 2.0**10), 2.0**10), ((2.0**22, 2.0**24), 2.0**22)):
        rule = DynamicLossScale(init_scale=bounds[0], min_scale=bounds[0], max_scale=bounds[1])
        w, opt = _guarded(GuardConfig(loss_scale=rule))
        opt.load_state_dict(high.state_dict())
        assert opt.loss_scale == expected
        assert _step(w, opt)["grad_norm"] == 10.0


def test_a_guard_without_a_limit_does_not_stay_halted() -> None:
    _, strict = _guarded(GuardConfig(max_skips_in_a_row=1))
    strict.guard_state.halted.fill_(1)  # as on an accelerator, where nothing raises in the step that halts
    _, opt = _guarded(GuardConfig())
    opt.load_state_dict(strict.state_dict())
    assert int(opt.guard_state.halted) == 0


def test_a_level_beyond_the_formats_of_the_guard_that_loads_it_is_the_widest() -> None:
    w, opt = _guarded(GuardConfig(escalate=EscalatePrecision(after=1, formats=LEVELS)))
    w.data.fill_(float("nan"))
    for _ in range(2):
        _step(w, opt)
    assert int(opt.guard_state.escalation.level) == 2
    _, narrow = _guarded(GuardConfig(escalate=EscalatePrecision(formats=LEVELS[1:])))
    narrow.load_state_dict(opt.state_dict())
    with narrow.autocast():
        assert not torch.is_autocast_enabled("cpu")  # float32


def _trained(steps: int, **settings: Any) -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 2)
    opt = wrap(torch.optim.AdamW(net.parameters(), fused=True), GuardConfig(**settings), names=net)
    for _ in range(steps):
        _train_once(net, opt)
    return net, opt


def _train_once(net: torch.nn.Module, opt: Any) -> None:
    opt.zero_grad()
    opt.backward(net(torch.ones(4, 3)).square().mean())
    opt.step()


LEARNING = {"clip": ZClip(), "loss_scale": "dynamic", "spike": "skip"}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_distributed_checkpoint_resumes_exactly_with_the_guards_own_state_beside_it(tmp_path: Any) -> None:
    net, opt = _trained(3, **LEARNING)
    distributed.save(
        {"optim": get_optimizer_state_dict(net, opt), "guard": opt.guard_state_dict()}, checkpoint_id=tmp_path
    )
    other, resumed = _trained(0, **LEARNING)
    other.load_state_dict(net.state_dict())
    state = {"optim": get_optimizer_state_dict(other, resumed), "guard": resumed.guard_state_dict()}
    distributed.load(state, checkpoint_id=tmp_path)
    set_optimizer_state_dict(other, resumed, state["optim"])
    resumed.load_guard_state_dict(state["guard"])
    for model, optimizer in ((net, opt), (other, resumed)):
        _train_once(model, optimizer)
    assert resumed.guard_state_dict() == opt.guard_state_dict()
    assert torch.equal(net.weight, other.weight)


FORMS = {"plain": {}, "flat": {"flatten_optimizer_state_dict": True}, "full": {"full_state_dict": True}}


# Torch cannot load a full state dict of SGD without momentum, whose parameters have no state.
@pytest.mark.parametrize(
    ("inner", "form"),
    [*((torch.optim.AdamW, form) for form in FORMS), *((torch.optim.SGD, f) for f in FORMS if f != "full")],
)
def test_state_dicts_of_torch_distributed_checkpoint_carry_the_guards_state(inner: Any, form: str) -> None:
    """Two groups, as where biases do not decay, and a step that only learnt statistics skip."""
    options = StateDictOptions(**FORMS[form])  # type: ignore[arg-type]

    def start(seed: int) -> tuple[torch.nn.Module, Any]:
        torch.manual_seed(seed)
        net = torch.nn.Linear(3, 2)
        groups = [{"params": [net.weight]}, {"params": [net.bias], "weight_decay": 0.0}]
        return net, wrap(inner(groups, lr=1e-2), GuardConfig(**LEARNING), names=net)

    def train(net: torch.nn.Module, opt: Any, steps: range) -> list[dict[str, Any]]:
        for step in steps:
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
            opt.zero_grad()
            opt.backward(net(1e3 * x if step == spike else x).square().mean())
            opt.step()
        return [row for row in opt.history() if row["step"] in steps]

    judged = SpikeGuard().min_samples  # steps before the first verdict
    break_at, spike, end = judged - 10, judged + 5, judged + 15
    net, opt = start(0)
    train(net, opt, range(break_at))
    model, saved = copy.deepcopy(get_state_dict(net, opt, options=options))
    wanted = train(net, opt, range(break_at, end))
    assert [row["step"] for row in wanted if not row["applied"]] == [spike]
    other, resumed = start(1)
    set_state_dict(other, resumed, model_state_dict=model, optim_state_dict=saved, options=options)
    assert train(other, resumed, range(break_at, end)) == wanted
    assert resumed.guard_state_dict() == opt.guard_state_dict()
    assert torch.equal(net.weight, other.weight)


def test_an_optimizer_without_a_guard_loads_what_one_with_a_guard_has_saved() -> None:
    net, opt = _trained(3, **LEARNING)
    plain = torch.optim.AdamW(net.parameters(), fused=True)
    set_optimizer_state_dict(net, plain, get_optimizer_state_dict(net, opt))
    assert torch.equal(plain.state[net.weight]["exp_avg"], opt.state[net.weight]["exp_avg"])
    _train_once(net, wrap(plain, names=net))
    again = wrap(plain, names=net)  # what the plain optimizer carries is no longer the state of a guard
    again.load_state_dict(plain.state_dict())
    assert again.guard_state_dict()["state"]["step"] == 0


INNER = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "adamw, fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),  # counts no steps
    "bfloat16 moments": lambda params: torch.optim.Adafactor(params),
}


def _saved(net: torch.nn.Module, opt: torch.optim.Optimizer, form: str) -> dict[str, Any]:
    return opt.state_dict() if form == "torch" else get_optimizer_state_dict(net, opt)


def _restored(net: torch.nn.Module, opt: torch.optim.Optimizer, form: str, saved: dict[str, Any]) -> None:
    if form == "torch":
        opt.load_state_dict(saved)
    else:
        set_optimizer_state_dict(net, opt, saved)


@pytest.mark.parametrize(
    "form", ["torch", "distributed"]
)  # a plain optimizer drops the entry from a flat one
@pytest.mark.parametrize("steps", [0, 1, 50])
@pytest.mark.parametrize("inner", INNER)
def test_a_guards_state_is_not_taken_behind_steps_without_it(inner: str, steps: int, form: str) -> None:
    def wrapped() -> tuple[torch.nn.Module, Any]:
        net = torch.nn.Linear(3, 4)
        return net, wrap(INNER[inner](net.parameters()), names=net)

    net, opt = wrapped()
    for _ in range(3):
        _train_once(net, opt)
    plain: Any = INNER[inner](net.parameters())
    _restored(net, plain, form, _saved(net, opt, form))
    for _ in range(steps):
        plain.zero_grad()
        net(torch.ones(4, 3)).square().mean().backward()
        plain.step()
    other, again = wrapped()
    for _ in range(7):
        _train_once(other, again)
    _restored(other, again, form, copy.deepcopy(_saved(net, plain, form)))
    assert again.guard_state_dict()["state"]["step"] == (7 if steps else 3)
    assert torch.equal(
        torch.stack([x.sum() for x in again.state[other.weight].values() if torch.is_tensor(x)]),
        torch.stack([x.sum() for x in plain.state[net.weight].values() if torch.is_tensor(x)]),
    )


def test_code_that_formats_the_settings_as_numbers_formats_the_entry_too() -> None:
    net = torch.nn.Linear(3, 4)
    bare = torch.optim.SGD(net.parameters(), lr=0.1)
    settings = set(bare.param_groups[0])
    opt: Any = wrap(bare)
    for form in ("torch", "distributed"):
        _train_once(net, opt)
        (name,) = set(opt.param_groups[0]) - settings
        assert f"{opt.param_groups[0][name]:.3g}" == "0"
        _restored(net, opt, form, _saved(net, opt, form))


@pytest.mark.parametrize("text", ["not JSON", "{}", "[1, 2]", '{"guard": {}, "progress": 3}'])
def test_what_a_group_carries_is_checked_before_anything_changes(text: str) -> None:
    _, opt = _trained(3, **LEARNING)
    saved = opt.state_dict()
    del saved["stablenum"]
    saved["param_groups"][0]["stablenum"] = text
    before = opt.state_dict()
    with pytest.raises(ValueError, match=r"param_groups'\]\[0\]\['stablenum'\] must be .* got "):
        opt.load_state_dict(saved)
    assert opt.state_dict()["stablenum"] == before["stablenum"]


@pytest.mark.parametrize("flat", [False, True])
def test_a_distributed_checkpoint_without_the_guards_state_is_reported_once(flat: bool) -> None:
    net = _trained(0)[0]
    plain = torch.optim.AdamW(net.parameters(), fused=True)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    saved = get_optimizer_state_dict(net, plain, options=options)
    if flat:  # torch reads each entry that a group has
        saved["param_groups.weight.stablenum"] = None
    other, resumed = _trained(0, **LEARNING)
    set_optimizer_state_dict(other, resumed, saved, options=options)
    said = r"scratch: ZClip, SpikeGuard, DynamicLossScale\..*nothing is lost"
    with pytest.warns(StatisticsNotLoadedWarning, match=said):
        _train_once(other, resumed)
    _train_once(other, resumed)  # warnings are errors here


@pytest.mark.parametrize("use", ["step", "step under a scheduler", "load", "wrap"])
def test_a_warning_points_at_the_line_of_the_user(use: str) -> None:
    net, opt = _trained(0, **LEARNING)
    if use == "step under a scheduler":
        torch.optim.lr_scheduler.ConstantLR(opt)  # it wraps `step`
    saved, half = _trained(1)[1].state_dict(), torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    if use.startswith("step"):
        groups = [{**group, "stablenum": None} for group in saved["param_groups"]]
        opt.load_state_dict({"state": saved["state"], "param_groups": groups})
    acts = {
        "load": lambda: opt.load_state_dict(saved),
        "wrap": lambda: wrap(torch.optim.Adam([half], eps=1e-8)),
    }
    with pytest.warns(UserWarning, match="statistics|scratch|eps") as caught:
        acts.get(use, lambda: _train_once(net, opt))()
    assert {w.filename for w in caught} == {__file__}


@pytest.mark.parametrize("order", ["guard first", "no rule that learns"])
def test_nothing_is_reported_if_nothing_was_lost(order: str) -> None:
    settings = LEARNING if order == "guard first" else {"clip": 1.0, "loss_scale": 8.0}
    net, opt = _trained(3, **settings)
    other, resumed = _trained(0, **settings)
    if order == "guard first":
        resumed.load_guard_state_dict(opt.guard_state_dict())
    set_optimizer_state_dict(other, resumed, get_optimizer_state_dict(net, opt))
    _train_once(other, resumed)


def test_a_plain_optimizers_checkpoint_in_a_guard_that_learns_is_reported() -> None:
    _, opt = _trained(3)
    other, resumed = _trained(0, clip=AutoClip())
    resumed.load_state_dict(opt.inner.state_dict())
    with pytest.warns(StatisticsNotLoadedWarning, match=r"scratch: AutoClip\."):
        _train_once(other, resumed)


def test_the_loss_scale_cannot_change_while_scaled_gradients_wait_for_their_step() -> None:
    """The scale may have been taken without a loss."""
    w = torch.nn.Parameter(torch.ones(2))
    opt = wrap(torch.optim.SGD([w], lr=0.1), loss_scale=1024.0)
    w.grad = torch.ones(2) * opt.scale()
    with pytest.raises(RuntimeError, match="cannot change between the scaling of a loss and its step"):
        opt.config = dataclasses.replace(opt.config, loss_scale=2.0)
    opt.step()
    torch.testing.assert_close(w.detach(), torch.full((2,), 0.9))
    opt.zero_grad()
    opt.config = dataclasses.replace(opt.config, loss_scale=2.0)
    assert opt.loss_scale == 2.0
