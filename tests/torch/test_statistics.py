"""Statistics of parameters that rules keep: they grow with added groups, and are saved and copied."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch

import stablenum
import stablenum_torch as st
from tests.selection import slow_unless
from tests.torch.conftest import PATHS, RULES, named, parameters, set_gradients, snapshot

RULE = stablenum.AdaGC(warmup_steps=3)
# The state is the same on both paths; on the device path, rules that together have every kind of array.
HOLD_ALL = ("autoclip", "adagc", "underflow scale", "all at once")
each_rule_on_the_host = pytest.mark.parametrize(
    ("rule", "path"),
    slow_unless(lambda rule, path: path == "host" or rule in HOLD_ALL, itertools.product(RULES, PATHS)),
    indirect=True,
)


def gammas(opt: st.GuardedOptimizer) -> list[float]:
    return opt.guard_state.clip[0].gamma.tolist()


def trained(params: list[torch.nn.Parameter], steps: int = 5, **settings) -> st.GuardedOptimizer:
    opt = st.wrap(torch.optim.AdamW(params, lr=0.01, fused=True), **{"clip": RULE, **settings})
    for i in range(steps):
        set_gradients(params, i)
        opt.step()
    return opt


@pytest.mark.parametrize("through", ["guard", "inner"])
def test_statistics_of_added_groups_start_when_they_are_added(path, through):
    params = parameters()
    opt = trained(params[:2])
    known = gammas(opt)
    assert all(g > 0 for g in known)
    target = opt if through == "guard" else opt.inner
    target.add_param_group({"params": params[2:], "lr": 0.1})
    assert gammas(opt) == [*known, 0.0]
    assert len(opt.guard_state_dict()["state"]["clip"][0]["gamma"]) == 3
    for i in range(3):
        set_gradients(params, 10 + i)
        opt.step()
        assert opt.last["applied"]
    assert opt.guard_state.clip[0].seen.tolist() == [3, 3, 3]
    assert gammas(opt)[2] > 0
    fresh = st.wrap(torch.optim.AdamW(parameters()[:2], fused=True), clip=RULE)
    fresh.inner.add_param_group({"params": parameters()[2:]})
    fresh.load_state_dict(opt.state_dict())
    assert fresh.guard_state_dict()["state"] == opt.guard_state_dict()["state"]


def test_added_groups_are_seen_by_the_rule_for_units(path):
    params = parameters()
    names = named(params)
    rule = stablenum.AdaptiveGradClip(clipping=1e-3, exclude="a")
    opt = st.wrap(torch.optim.SGD(params[:1], lr=1.0), clip=rule, names=names)
    opt.inner.add_param_group({"params": params[1:]})
    set_gradients(params, 0)
    before = [p.grad.norm().item() for p in params]
    opt.step()
    after = [p.grad.norm().item() for p in params]
    assert after[0] == before[0]
    assert after[1] < 0.1 * before[1]
    assert after[2] < 0.1 * before[2]


def test_an_added_group_without_a_learning_rate_raises_at_the_next_step():
    params = parameters()
    inner = torch.optim.SGD(params[:1], lr=1.0)
    opt = st.wrap(inner, clip=stablenum.ClipUpdateRMS(1.0))
    inner.add_param_group({"params": params[1:]})
    del inner.param_groups[1]["lr"]
    set_gradients(params, 0)
    with pytest.raises(ValueError, match=r"param_groups\[1\] of SGD has no 'lr'"):
        opt.step()


@each_rule_on_the_host
def test_copies_carry_every_statistic(rule, path):
    params = parameters()
    opt = st.wrap(torch.optim.AdamW(params, fused=True), names=named(params), **rule)
    for i in range(14):
        set_gradients(params, i)
        opt.scale(torch.tensor(1.0 + i % 3))
        opt.step()
    for twin in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        assert twin.guard_state_dict() == opt.guard_state_dict()
        before = snapshot(opt)
        twins = twin.param_groups[0]["params"]
        set_gradients(twins, 99)
        twin.step()
        assert snapshot(opt) == before
        assert twin.last["step"] == 14
        assert opt.last["step"] == 13


@pytest.mark.sampled
@each_rule_on_the_host
def test_training_from_a_checkpoint_continues_identically(rule, path):
    def go_on(opt, first, last):
        params = opt.param_groups[0]["params"]
        for i in range(first, last):
            set_gradients(params, i, 50.0 if i == 26 else 1.0)
            opt.scale(torch.tensor(1.0 + i % 3))
            opt.step()

    def make():
        params = parameters()
        return st.wrap(torch.optim.AdamW(params, fused=True), names=named(params), **rule)

    straight = make()
    go_on(straight, 0, 30)
    saved = make()
    go_on(saved, 0, 15)
    resumed = make()
    resumed.load_state_dict(copy.deepcopy(saved.state_dict()))
    for p, q in zip(resumed.param_groups[0]["params"], saved.param_groups[0]["params"], strict=True):
        p.data.copy_(q.data)
    go_on(resumed, 15, 30)
    assert snapshot(resumed) == snapshot(straight)
    assert resumed.guard_state_dict() == straight.guard_state_dict()


def test_statistics_follow_the_names_into_another_order():
    params = parameters()
    opt = trained(params, names=named(params))
    turned = dict(reversed(named(parameters(1)).items()))
    other = st.wrap(torch.optim.AdamW(list(turned.values())), clip=RULE, names=turned)
    other.load_guard_state_dict(opt.guard_state_dict())
    assert gammas(other) == gammas(opt)[::-1]
    for mine, theirs in zip(other.guard_state.clip[0], opt.guard_state.clip[0], strict=True):
        assert torch.equal(mine, theirs.flip(0))
    assert other.last["worst"].name == opt.last["worst"].name


def test_statistics_of_a_rule_added_since_the_checkpoint_start_again_with_a_warning():
    params = parameters()
    plain = trained(params, clip=1.0)
    other = st.wrap(torch.optim.AdamW(params), clip=(1.0, RULE), spike="skip")
    with pytest.warns(stablenum.StatisticsNotLoadedWarning) as caught:
        other.load_guard_state_dict(plain.guard_state_dict())
    assert {str(w.message).split(":")[0] for w in caught} == {"state.clip[1]", "state.spike"}
    assert other.guard_state.clip[1].gamma.tolist() == [0.0] * 3
    assert other.guard_state.step.item() == 5


def test_statistics_follow_parameters_that_are_moved_or_removed():
    params = parameters()
    opt = trained(params)
    first, second, third = gammas(opt)
    (group,) = opt.param_groups
    group["params"][:] = [params[2], params[0], params[1]]
    assert gammas(opt) == [third, first, second]
    del group["params"][1]
    assert gammas(opt) == [third, second]
    set_gradients(params, 9)
    opt.step()
    assert opt.last["applied"]


def test_without_names_statistics_are_loaded_by_position():
    opt = trained(parameters())
    named_ones = parameters()
    saved = trained(named_ones, names=named(named_ones)).guard_state_dict()
    for state in (opt.guard_state_dict(), saved):
        fresh = st.wrap(torch.optim.AdamW(parameters(), fused=True), clip=RULE)
        fresh.load_guard_state_dict(state)
        assert gammas(fresh) == gammas(opt)


def test_unknown_names_warn_and_are_not_matched_to_known_ones():
    params = parameters()
    saved = trained(params, names={f"module.{name}": p for name, p in named(params).items()})
    others = parameters()
    fresh = st.wrap(torch.optim.AdamW(others, fused=True), clip=RULE, names=named(others))
    with pytest.warns(
        stablenum.StatisticsNotLoadedWarning, match=r"no statistics were saved under the names of 3"
    ):
        fresh.load_guard_state_dict(saved.guard_state_dict())
    assert gammas(fresh) == [0.0] * 3
