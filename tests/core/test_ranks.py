"""Several ranks: one loss, one norm, one worst parameter, on every backend."""

from __future__ import annotations

import math

import numpy as np
import pytest

from stablenum import AdaGC, ClipByGlobalNorm, GuardConfig, Observation, Reason, SpikeGuard
from stablenum.formats import FLOAT32_MAX, NO_LOSS
from stablenum.guard.ranks import MAX_PARAMETERS, Ranks, parameter_of, rank_of
from stablenum.guard.readout import history, metrics, scalars
from stablenum.rules.windows import EMPTY
from tests.backends import to_numpy

INF, NAN = math.inf, math.nan


def seen(backend, norms, losses=None, worst=None, found_inf=None) -> Observation:
    """What ranks measured: a list entry per rank; None is a loss that a rank does not have."""
    p = len(norms)
    losses = [None] * p if losses is None else losses
    return Observation(
        norms=backend.asarray([1.0, 1.0]),
        ranks=Ranks(
            norms=backend.asarray(norms),
            worst=backend.asarray(worst or [0] * p),
            losses=backend.asarray([NO_LOSS if loss is None else loss for loss in losses]),
            found_inf=backend.asarray(found_inf or [0] * p),
        ),
    )


def decided(backend, observation, config=None):
    decisions, state = backend.run(config or GuardConfig(clip=1.0), [observation])
    return decisions[0], metrics(to_numpy(state))


@pytest.mark.parametrize("losses", [[1.0, 3.0], [2.0, None], [None, 2.0], [1.0, 3.0, None, 2.0]])
def test_the_loss_is_the_mean_over_the_ranks_that_have_one(backend, losses):
    _, last = decided(backend, seen(backend, [1.0] * len(losses), losses))
    assert last["loss"] == 2.0


def test_without_any_loss_none_is_recorded(backend):
    decision, last = decided(backend, seen(backend, [1.0, 1.0]))
    assert bool(decision.apply)
    assert math.isnan(last["loss"])


def test_the_mean_of_finite_losses_does_not_overflow(backend):
    decision, last = decided(backend, seen(backend, [0.1] * 3, [FLOAT32_MAX] * 3))
    assert bool(decision.apply)
    assert last["loss"] == pytest.approx(FLOAT32_MAX, rel=1e-6)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_bad_loss_on_one_rank_skips_the_step_and_names_the_rank(backend, bad):
    losses = [1.0, 2.0, bad, bad]
    decision, last = decided(backend, seen(backend, [3.0, 4.0, 0.0, 0.0], losses, worst=[5, 6, 7, 8]))
    assert not bool(decision.apply)
    assert last["reason"] is Reason.NONFINITE_LOSS
    assert (last["worst_rank"], last["worst"].index) == (2, 7)
    assert scalars(last)["worst_rank"] == 2


def test_norms_of_ranks_are_joined_and_the_largest_is_named(backend):
    decision, last = decided(backend, seen(backend, [3.0, 4.0, 0.0], [1.0] * 3, worst=[1, 2, 0]))
    assert float(decision.grad_norm) == pytest.approx(5.0, rel=1e-6)
    assert float(decision.multiplier) == pytest.approx(0.2, rel=1e-6)
    assert (last["worst_rank"], last["worst"].index) == (1, 2)


@pytest.mark.parametrize(("bad", "reason"), [(NAN, Reason.NAN_GRADIENT), (INF, Reason.INF_GRADIENT)])
def test_the_first_rank_with_a_bad_gradient_is_named(backend, bad, reason):
    decision, last = decided(backend, seen(backend, [9e9, bad, bad], [1.0] * 3, worst=[1, 2, 3]))
    assert not bool(decision.apply)
    assert last["reason"] is reason
    assert (last["worst_rank"], last["worst"].index) == (1, 2)


def test_what_one_rank_found_elsewhere_skips_the_step(backend):
    _, last = decided(backend, seen(backend, [1.0, 1.0], [1.0, 1.0], found_inf=[0, 1]))
    assert last["reason"] is Reason.FOUND_INF


def test_norms_beyond_the_squares_of_float32_are_joined(backend):
    decision, _ = decided(backend, seen(backend, [3e30, 4e30], [1.0, 1.0]))
    assert float(decision.grad_norm) == pytest.approx(5e30, rel=1e-6)


def test_a_spike_of_the_mean_loss_is_skipped_and_missing_losses_never_enter_the_window(backend):
    config = GuardConfig(spike=SpikeGuard(min_samples=4, window=8))
    steady = [seen(backend, [1.0, 1.0], [1.0 + 0.01 * i, 3.0]) for i in range(6)]
    without = [seen(backend, [1.0, 1.0])] * 3
    spike = seen(backend, [1.0, 1.0], [900.0, 3.0])
    decisions, state = backend.run(config, [*steady, *without, spike])
    assert [bool(d.apply) for d in decisions] == [True] * 9 + [False]
    window = np.asarray(to_numpy(state).spike.loss)
    assert sorted(window[window != EMPTY]) == pytest.approx([2.0 + 0.005 * i for i in range(6)])
    assert history(to_numpy(state))[-1]["reason"] is Reason.SPIKE_LOSS


def test_names_are_those_of_the_rank(backend):
    _, state = backend.run(GuardConfig(), [seen(backend, [3.0, 4.0], worst=[0, 1])])
    names = {0: (4, ["a", "b"]), 1: (6, ["c", "d"])}
    last = metrics(to_numpy(state), names.get)
    assert (last["worst"], last["worst_rank"]) == ((1, "d"), 6)
    assert metrics(to_numpy(state), ["x", "y"])["worst"] == (1, "y")


def test_places_of_the_last_rank_and_parameter_fit_int32():
    place = (8191) * MAX_PARAMETERS + MAX_PARAMETERS - 1
    assert place < 2**31
    assert (rank_of(place), parameter_of(place)) == (8190, MAX_PARAMETERS - 1)


def test_what_is_found_besides_the_ranks_skips_the_step(backend):
    observation = seen(backend, [1.0, 1.0], [1.0, 1.0])
    _, last = decided(backend, observation._replace(found_inf=backend.asarray(True, "bool")))
    assert last["reason"] is Reason.FOUND_INF


def test_a_second_clip_rule_sees_the_joint_norm_and_not_this_ranks(backend):
    """A stage of a pipeline measures its own parameters only."""
    config = GuardConfig(clip=(ClipByGlobalNorm(2.0), ClipByGlobalNorm(1.0)))
    decision, _ = decided(backend, seen(backend, [6.0, 8.0]), config)
    assert float(decision.multiplier) == pytest.approx(0.1, rel=1e-6)


def test_a_rule_per_tensor_behind_another_rule_gets_the_joint_norm(backend):
    """In its warm-up, AdaGC clips by the joint norm, of which this rank holds a part."""
    config = GuardConfig(clip=(ClipByGlobalNorm(1.0), AdaGC(max_norm=0.5)))
    decision, _ = decided(backend, seen(backend, [3.0, 4.0]), config)
    assert to_numpy(decision.multiplier).tolist() == pytest.approx([0.1, 0.1], rel=1e-5)


def test_a_bad_gradient_that_all_ranks_have_names_none(backend):
    """A reduction has given it to all of them: the first is no more at fault than the last."""
    _, last = decided(backend, seen(backend, [NAN, NAN], [1.0, 1.0], worst=[3, 3]))
    assert (last["worst_rank"], last["worst"].index) == (None, 3)
    assert "worst_rank" not in scalars(last)
    _, last = decided(backend, seen(backend, [NAN, NAN], [1.0, INF], worst=[3, 3]))
    assert (last["worst_rank"], last["worst"].index) == (1, 3)


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_bad_loss_that_all_ranks_have_leaves_the_rank_to_the_gradients(backend, bad):
    """The loss was averaged before: it is the same on all ranks, and none is more at fault than another."""
    losses = [bad] * 4
    _, last = decided(backend, seen(backend, [1.0, 2.0, NAN, NAN], losses, worst=[5, 6, 7, 8]))
    assert last["reason"] is Reason.NONFINITE_LOSS
    assert (last["worst_rank"], last["worst"].index) == (2, 7)
    _, last = decided(backend, seen(backend, [1.0, 2.0, 9.0, 3.0], losses, worst=[5, 6, 7, 8]))
    assert (last["worst_rank"], last["worst"].index) == (2, 7)
    _, last = decided(backend, seen(backend, [NAN] * 4, losses, worst=[7] * 4))
    assert (last["worst_rank"], last["worst"].index) == (None, 7)


def test_a_bad_loss_on_all_ranks_that_have_one_names_the_first_of_them(backend):
    """As in a pipeline: the stages without a loss did not compute it."""
    _, last = decided(backend, seen(backend, [1.0, 2.0, 3.0], [None, None, NAN], worst=[5, 6, 7]))
    assert (last["worst_rank"], last["worst"].index) == (2, 7)
