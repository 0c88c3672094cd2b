"""The spike rule forgets the norms of gradients without parameters that have joined the training."""

from __future__ import annotations

import logging

import pytest
import torch

import stablenum_torch as st
from stablenum import SpikeGuard

N = 12  # steps before a change: more than the rule's least number


def _told(caplog):
    return [r.getMessage() for r in caplog.records if "joined" in r.getMessage()]


def _run(opt, params, factors, n=N):
    for i in range(n):
        for p, factor in zip(params, factors, strict=True):
            p.grad = None if factor is None else torch.full_like(p, factor * (1 + 0.01 * (i % 3)))
        opt.step()


@pytest.mark.parametrize("change", ["add_param_group", "into the inner one", "unfreeze", "config"])
def test_healthy_steps_after_a_change_of_parameters_are_not_skipped(change, path, caplog):
    params = [torch.nn.Parameter(torch.zeros(4)) for _ in range(2)]
    joins = change != "unfreeze"
    inner = torch.optim.SGD(params[:1] if joins else params, lr=1e-3)
    opt = st.wrap(inner, spike=SpikeGuard(window=16, min_samples=6), names=zip("ab", params, strict=True))
    _run(opt, params, [1.0, None])
    if change == "into the inner one":
        inner.add_param_group({"params": params[1]})
    elif joins:
        opt.add_param_group({"params": params[1]})
    if change == "config":
        opt.config = opt.config
    _run(opt, params, [1.0, 100.0], 25)
    assert opt.last["skipped_total"] == 0
    (message,) = _told(caplog)
    assert "joined the training: b" in message
    assert "none of the next 6 steps" in message
    _run(opt, params, [1.0, 1e4], 1)  # a spike is one again
    assert opt.last["reason"].name == "SPIKE_GRAD_NORM"


def test_experts_that_rest_for_a_while_do_not_restart_the_statistic(caplog):
    params = [torch.nn.Parameter(torch.zeros(4)) for _ in range(3)]
    opt = st.wrap(torch.optim.SGD(params, lr=1e-3), spike=SpikeGuard(window=16, min_samples=6))
    for i in range(60):
        _run(opt, params, [1.0, *(0.01 if i % 5 == k else None for k in range(2))], 1)
    before = opt.guard_state.spike.grad_norm.clone()
    assert before.isfinite().sum() == 16
    assert not _told(caplog)
    _run(opt, params, [100.0, None, None], 1)
    assert opt.last["reason"].name == "SPIKE_GRAD_NORM"


def test_a_rule_of_losses_keeps_its_statistic(caplog):
    caplog.set_level(logging.INFO)
    params = [torch.nn.Parameter(torch.zeros(4)) for _ in range(2)]
    opt = st.wrap(
        torch.optim.SGD(params[:1], lr=1e-3), spike=SpikeGuard(window=16, min_samples=6, watch="loss")
    )
    _run(opt, params, [1.0, None])
    opt.add_param_group({"params": params[1]})
    _run(opt, params, [1.0, 100.0])
    assert not _told(caplog)
    assert opt.last["skipped_total"] == 0


def test_the_last_step_names_one_parameter_as_the_history_does():
    params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(5)]
    groups = [{"params": params[:2]}, {"params": params[2:4]}, {"params": params[4:]}]
    for named in (None, [("x", params[3])]):
        opt = st.wrap(torch.optim.SGD(groups, lr=1e-3), names=named)
        for i in range(5):
            _run(opt, params, [100.0 if k == i else 1.0 for k in range(5)], 1)
            assert opt.last["worst"] == opt.history()[-1]["worst"]
            assert opt.last["worst"].name == opt.parameter_names()[i]
