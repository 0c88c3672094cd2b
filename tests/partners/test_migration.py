"""What docs/migrate.md says of the programs before and after, on the same batches."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax.training.dynamic_scale import DynamicScale

import stablenum_jax
import stablenum_jax.policy
import stablenum_torch
from stablenum import DynamicLossScale, NonFiniteError, Reason
from tests.partners.migration import (
    BLOCKS,
    PAGE,
    USUAL,
    Run,
    data,
    judged,
    loop,
    pairs,
    replaced,
    ulps,
)

PAIRS = pairs()
RECORDED = json.loads((Path(__file__).parent / "recorded_scales.json").read_text(encoding="utf-8"))
TEXT = PAGE.read_text(encoding="utf-8")


def table(head: str) -> list[list[str]]:
    """The rows of the page's table whose head begins so."""
    lines = TEXT[TEXT.index(f"\n{head} |") + 1 :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_every_program_of_the_page_is_known():
    assert {head: len(programs) for head, programs in BLOCKS.items()} == {
        "PyTorch": 1,
        "GradScaler": 2,
        "Checks by hand": 1,
        "apex and DeepSpeed": 1,
        "JAX": 2,
        "apply_if_finite": 2,
        "jmp": 2,
        "flax": 2,
    }


def test_the_numbers_of_lines_are_those_of_the_programs():
    lines = {re.search(r"\(#(.*)\)", row[0])[1]: row[2] for row in table("| from") if row[2]}
    assert lines == {name.lower().replace(" ", "-"): pair.lines for name, pair in PAIRS.items()}


# The rows of the table: the batches whose last one is judged, and whether that needs a scale (None: either).
ROWS = {
    "a NaN in the batch": ("...n", None),
    "an overflow in float16": ("...o", True),
    "finite gradients, norm above 1e19": ("...h", False),
    "the tenth NaN batch in a row": ("..." + "n" * 10, None),
    "a good batch after 200 NaN batches": ("..." + "n" * 200 + ".", None),
}


@pytest.mark.parametrize("row", ROWS)
def test_what_each_program_does_is_in_the_table(row):
    events, with_scale = ROWS[row]
    (cells,) = [cells for cells in table("| | `GradScaler`") if cells[0] == row]
    for (name, pair), cell in zip(PAIRS.items(), cells[1:-1], strict=True):
        if with_scale in (None, pair.scale is not None):
            scale = None if pair.scale is None else (lambda run, of=pair.scale: of(run.names))
            assert judged(pair.library, pair.before, events, scale) == cell, name
            assert judged(pair.library, pair.after, events, Run.guards_scale) == cells[-1], name
        else:
            assert not cell


def test_the_table_has_these_rows():
    assert [cells[0] for cells in table("| | `GradScaler`")] == list(ROWS)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", PAIRS)
def test_the_weights_of_a_pair_agree_within_4_ulps(name, seed):
    pair = PAIRS[name]
    before, after = Run(pair.library, seed=seed), Run(pair.library, seed=seed)
    before.go(pair.before, data(USUAL, seed=seed))
    after.go(pair.after, data(USUAL, seed=seed))
    assert len(before.weights) == len(after.weights) == 21
    assert max(map(ulps, before.weights, after.weights)) <= 4
    assert ulps(before.weights[0], before.weights[-1]) > 1e5
    reasons = {row["reason"] for row in after.history()}
    assert {Reason.OK, Reason.CLIPPED, Reason.NONFINITE_LOSS} <= reasons


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("name", "events"), [("GradScaler", ".....o.......o......"), ("Checks by hand", USUAL)]
)
def test_without_clipping_the_weights_agree_bit_for_bit_in_torch(name, events, fused):
    pair = PAIRS[name]
    before, after = Run("torch", fused=fused), Run("torch", fused=fused)
    before.go(replaced(pair.before, "parameters(), 1.0", "parameters(), 1e6"), data(events))
    after.go(replaced(pair.after, "clip=1.0", "clip=1e6"), data(events))
    assert max(map(ulps, before.weights, after.weights)) == 0
    assert sum(not row["applied"] for row in after.history()) >= 1


@pytest.mark.parametrize("scale", [None, 1024.0])
def test_the_factor_is_that_of_clip_grad_norm_of_unscaled_gradients_and_that_of_optax_has_no_eps(scale):
    grad, limit = np.float32([0.012, -0.016]), 0.01  # the norm is 0.02
    p = torch.nn.Parameter(torch.zeros(2))
    p.grad = torch.from_numpy(grad * np.float32(scale or 1.0))
    opt = stablenum_torch.wrap(torch.optim.SGD([p], lr=1.0), clip=limit, loss_scale=scale)
    opt.scale()
    opt.step()
    theirs = torch.nn.Parameter(torch.zeros(2))
    theirs.grad = torch.from_numpy(grad.copy())
    torch.nn.utils.clip_grad_norm_([theirs], limit)
    np.testing.assert_array_max_ulp(-p.detach().numpy(), theirs.grad.numpy(), 2)
    updates, _ = optax.clip_by_global_norm(limit).update(jnp.asarray(grad), optax.EmptyState())
    np.testing.assert_allclose(updates / theirs.grad.numpy() - 1, 1e-6 / 0.02, rtol=0.02)


def test_the_scale_stays_within_bounds_that_gradscaler_does_not_have():
    assert (DynamicLossScale().min_scale, DynamicLossScale().max_scale) == (1.0, 2.0**24)
    start = f"init_scale={2.0**23}, growth_interval=1"
    theirs, ours = Run("torch"), Run("torch")
    # In bfloat16 such scales overflow nothing.
    before = replaced(PAIRS["GradScaler"].before, "torch.float16", "torch.bfloat16")
    after = replaced(PAIRS["GradScaler"].after, "opt.autocast()", "opt.autocast(torch.bfloat16)")
    theirs.go(replaced(before, 'GradScaler("cpu")', f'GradScaler("cpu", {start})'), data("..."))
    ours.go(replaced(after, '"dynamic"', f"DynamicLossScale({start})"), data("..."))
    assert (theirs.names["scaler"].get_scale(), ours.guards_scale()) == (2.0**26, 2.0**24)


# Growth after 6 good steps, so that the scale moves up and down within 20 steps.
GROWING = {
    "GradScaler": ('GradScaler("cpu")', 'GradScaler("cpu", growth_interval=6)'),
    "jmp": ("jnp.float32(2.0**15)", "jnp.float32(2.0**12), period=6"),
    "flax": ("DynamicScale()", "DynamicScale(growth_interval=6)"),
    "apply_if_finite": ("max_consecutive_errors=5", "max_consecutive_errors=5"),
}
MIDDLE, STREAM = 9, "....o.......o......o"


@pytest.mark.parametrize("name", GROWING)
def test_a_run_that_is_taken_over_goes_on_as_it_would_have(name):
    pair, (old, new) = PAIRS[name], GROWING[name]
    before = replaced(pair.before, old, new)
    events = USUAL if pair.scale is None else STREAM
    whole = Run(pair.library)
    scales = whole.go(before, data(events), pair.scale and (lambda: pair.scale(whole.names)))

    def taken_over(program: str) -> tuple[Run, list[float]]:
        run = Run(pair.library)
        run.go(before, data(events)[:MIDDLE])
        exec(program, run.names)
        return run, run.go(loop(pair.after), data(events)[MIDDLE:], run.guards_scale)

    run, found = taken_over(pair.taken_over)
    assert max(map(ulps, whole.weights, run.weights)) <= 4
    if pair.scale is not None:
        assert found == scales[MIDDLE:]
        without_tracker = re.sub(r'(\["good_steps"\] = ).*', r"\g<1>0", pair.taken_over)
        assert taken_over(without_tracker)[1] != found


def test_the_skipped_steps_of_apply_if_finite_are_taken_over():
    pair, run = PAIRS["apply_if_finite"], Run("jax")
    run.go(pair.before, data("..n.n"))
    exec(pair.taken_over, run.names)
    run.go(loop(pair.after), data("n."))
    assert stablenum_jax.metrics(run.names["opt_state"])["skipped_total"] == 3


def test_a_collapsed_scale_is_rejected():
    pair, run = PAIRS["GradScaler"], Run("torch")
    run.go(pair.before, data("." + "n" * 17))
    assert run.names["scaler"].get_scale() == 0.5
    with pytest.raises(ValueError, match="init_scale"):
        exec(pair.taken_over, run.names)


def test_a_checkpoint_of_the_optimizer_without_a_guard_is_loaded():
    pair, old, new = PAIRS["GradScaler"], Run("torch"), Run("torch")
    old.go(pair.before, data("..."))
    saved = old.names["optimizer"].state_dict()
    opt = stablenum_torch.wrap(new.names["optimizer"], clip=1.0, loss_scale="dynamic")
    opt.load_state_dict(saved)
    again = opt.inner.state_dict()
    for index, state in saved["state"].items():
        assert all(torch.equal(value, again["state"][index][key]) for key, value in state.items())


@pytest.mark.parametrize("which", ["before", "after"])
def test_an_error_ends_the_run_before_anything_has_changed(which):
    pair, run = PAIRS["Checks by hand"], Run("torch")
    if which == "before":
        program, error = replaced(pair.before, "        continue\n", "        raise\n"), RuntimeError
        program = replaced(program, "if not loss.isfinite():\n        raise", "if False:\n        pass")
    else:
        program, error = replaced(pair.after, "clip=1.0", 'clip=1.0, on_nonfinite="raise"'), NonFiniteError
    run.go(program, data("..."))
    before = run.weights[-1]
    with pytest.raises(error, match=r"non-finite|NaN"):
        run.go(loop(program), data("n"))
    assert ulps(before, run._now()) == 0


def test_the_guard_stops_where_apply_if_finite_applies_a_bad_step():
    pair, theirs, ours = PAIRS["apply_if_finite"], Run("jax"), Run("jax")
    theirs.go(pair.before, data("..nnnnnn"))
    finite = [all(np.isfinite(w).all() for w in weights.values()) for weights in theirs.weights]
    assert finite == [True] * 8 + [False]
    program = replaced(pair.after, "clip=1.0", "clip=1.0, max_skips_in_a_row=6")
    ours.go(program, data("..nnnnn"))
    stablenum_jax.metrics(ours.names["opt_state"])
    ours.go(loop(program), data("n"))
    with pytest.raises(NonFiniteError):
        stablenum_jax.metrics(ours.names["opt_state"])


def test_labels_that_jmp_did_not_cast_stay_as_they_are_with_the_casts_in_the_loss():
    pair = PAIRS["jmp"]
    before = replaced(
        pair.before, "*policy.cast_to_compute((params, x, y))", "*policy.cast_to_compute((params, x)), y"
    )
    theirs, cast, kept = Run("jax"), Run("jax"), Run("jax")
    theirs.go(before, data("......"))
    cast.go(pair.after, data("......"))
    original = kept.names["loss_fn"]
    kept.names["loss_fn"] = lambda p, x, y: original(*kept.names["policy"].cast_to_compute((p, x)), y)
    kept.go(replaced(pair.after, ", policy=policy", ""), data("......"))
    assert ulps(theirs.weights[-1], cast.weights[-1]) > 100
    assert ulps(theirs.weights[-1], kept.weights[-1]) <= 4


def test_a_program_for_jmp_runs_with_the_names_of_stablenum():
    theirs, ours = Run("jax"), Run("jax")
    ours.names["jmp"] = stablenum_jax.policy
    for run in (theirs, ours):
        run.go(PAIRS["jmp"].before, data(USUAL))
    assert isinstance(ours.names["loss_scale"], stablenum_jax.policy.DynamicLossScale)
    assert max(map(ulps, theirs.weights, ours.weights)) <= 4


def test_the_scale_of_flax_grows_a_step_later_and_has_no_floor_of_1():
    pair, theirs, ours = PAIRS["flax"], Run("jax"), Run("jax")
    start = f"scale={2.0**10}, growth_interval=3"
    scales = theirs.go(
        replaced(pair.before, "DynamicScale()", f"DynamicScale({start})"),
        data("....."),
        lambda: pair.scale(theirs.names),
    )
    rule = f"DynamicLossScale(init_{start})"
    found = ours.go(replaced(pair.after, '="dynamic"', f"={rule}"), data("....."), ours.guards_scale)
    assert scales == [2.0**10] * 3 + [2.0**11] * 2
    assert found == [2.0**10] * 2 + [2.0**11] * 3
    assert DynamicScale().minimum_scale == jnp.finfo(jnp.float32).tiny


# --- apex and DeepSpeed, whose scales were recorded ---------------------------------------------------------


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
