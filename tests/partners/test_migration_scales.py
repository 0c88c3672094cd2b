"""The guard's loss scale beside those of apex and DeepSpeed, which record_scales.py recorded."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stablenum_torch
from stablenum import DynamicLossScale, NonFiniteError
from tests.partners.migration import BLOCKS, PAGE, Run

RECORDED = json.loads((Path(__file__).parent / "recorded_scales.json").read_text(encoding="utf-8"))
TEXT = PAGE.read_text(encoding="utf-8")


class GuardedScale:
    """A guard that sees good steps and overflows."""

    def __init__(self, rule: DynamicLossScale, **settings: Any) -> None:
        self.p = torch.nn.Parameter(torch.zeros(()))
        self.opt = stablenum_torch.wrap(torch.optim.SGD([self.p], lr=0.0), loss_scale=rule, **settings)

    def step(self, event: str) -> int:
        """Log2 of the scale after the step."""
        self.p.grad = self.opt.scale() * (1.0 if event == "." else float("inf"))
        self.opt.step()
        return int(np.log2(self.opt.loss_scale))

    def take_over(self, **fields: int) -> None:
        """Set fields of the loss scale's state, as the page shows."""
        state = self.opt.guard_state_dict()
        state["state"]["loss_scale"].update(fields)
        self.opt.load_guard_state_dict(state)


def without_uncounted(row: dict[str, Any]) -> tuple[str, list[int]]:
    """DeepSpeed's events and scales without the good steps it does not count: each one after an overflow."""
    pairs = zip("o" + row["events"], row["events"], row["exponents"], strict=False)
    kept = [(event, exponent) for last, event, exponent in pairs if (last, event) != ("o", ".")]
    return "".join(event for event, _ in kept), [exponent for _, exponent in kept]


def test_the_scale_of_apex_is_that_of_the_guard_without_a_floor():
    row = RECORDED["apex"]
    events, expected, start = row["events"], row["exponents"], row["taken_over"]
    guard = GuardedScale(DynamicLossScale(growth_interval=row["window"], min_scale=2.0**-100))
    assert [guard.step(event) for event in events] == expected
    assert (max(expected), min(expected)) == (24, min(expected[-30:]))
    assert min(expected) < 0  # the guard's default stays at 1
    default = GuardedScale(DynamicLossScale(growth_interval=row["window"]))
    assert [default.step(event) for event in events] == [max(e, 0) for e in expected]

    fields = row["fields"]
    assert fields["unskipped"] > 0
    rule = DynamicLossScale(init_scale=fields["loss_scale"], growth_interval=row["window"])
    for good_steps, same in ((fields["unskipped"], True), (0, False)):
        guard = GuardedScale(rule)
        guard.take_over(good_steps=good_steps)
        found = [guard.step(event) for event in events[start:-30]]
        assert (found == expected[start:-30]) is same


def rule_of_the_page() -> DynamicLossScale:
    (program,) = BLOCKS["apex and DeepSpeed"]
    run = Run("torch")
    exec(program, run.names)
    return run.names["opt"].config.loss_scale


def test_the_settings_for_deepspeed_are_those_of_its_config():
    config = json.loads(re.search(r"^```json\n(.*?)^```", TEXT, re.M | re.S)[1])
    fp16 = config["fp16"]
    assert rule_of_the_page() == DynamicLossScale(
        init_scale=2.0 ** fp16["initial_scale_power"],
        growth_interval=fp16["loss_scale_window"],
        hysteresis=fp16["hysteresis"],
        hysteresis_refill="growth",
        min_scale=fp16["min_loss_scale"],
        max_scale=2.0**100,
    )
    assert f"clip={config['gradient_clipping']}" in BLOCKS["apex and DeepSpeed"][0]


@pytest.mark.parametrize(
    ("name", "refill"), [("deepspeed", "growth"), ("deepspeed, consecutive", "good_step")]
)
def test_the_scale_of_deepspeed_grows_a_step_later_after_an_overflow_and_is_else_the_same(name, refill):
    row = RECORDED[name]
    settings = {"hysteresis": 2, "hysteresis_refill": refill, "max_scale": 2.0**100}
    rule = DynamicLossScale(growth_interval=row["window"], **settings)
    guard = GuardedScale(rule)
    assert [guard.step(event) for event in row["events"]] != row["exponents"]
    events, expected = without_uncounted(row)
    guard = GuardedScale(rule)
    assert [guard.step(event) for event in events] == expected
    assert max(expected) > 24

    fields, start = row["fields"], row["taken_over"]
    names = {**fields, "loss_scale_window": row["window"]}
    (formula,) = re.findall(r"`(max\(cur_iter.*?)`", TEXT)
    good_steps = eval(formula, names)
    assert good_steps > 0
    tail = {key: row[key][start - 1 :] for key in ("events", "exponents")}
    assert tail["events"][0] == "."  # the step before, which is left out like each first one
    events, expected = without_uncounted(tail)
    for steps in (good_steps, 0):
        guard = GuardedScale(
            DynamicLossScale(init_scale=fields["cur_scale"], growth_interval=row["window"], **settings)
        )
        guard.take_over(good_steps=steps, hysteresis_left=fields["cur_hysteresis"])
        assert ([guard.step(event) for event in events] == expected) is (steps == good_steps)


def test_the_scale_of_deepspeed_first_grows_with_step_window_plus_1():
    row = RECORDED["deepspeed"]
    steps = [i + 1 for i, (a, b) in enumerate(itertools.pairwise([16, *row["exponents"][:40]])) if b > a]
    assert steps == [row["window"] * k + 1 for k in range(1, 10)]


def test_an_overflow_at_the_smallest_scale_ends_the_run_in_both():
    assert "already at minimum" in RECORDED["deepspeed"]["at_the_floor"]
    guard = GuardedScale(DynamicLossScale(init_scale=4.0), on_nonfinite="raise")
    assert [guard.step("o"), guard.step("o")] == [1, 0]
    with pytest.raises(NonFiniteError):
        guard.step("o")
    guard = GuardedScale(DynamicLossScale(init_scale=4.0), on_nonfinite="raise")
    guard.opt.scale(torch.tensor(float("nan")))
    guard.p.grad = torch.tensor(float("nan"))
    with pytest.raises(NonFiniteError):
        guard.opt.step()
