"""What docs/migrate.md says of the programs before and after, on the same batches."""

from __future__ import annotations

import re

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
