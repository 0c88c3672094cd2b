"""Accelerate with a guard: each fault leaves no trace, and what Accelerate alone makes of it."""

from __future__ import annotations

import copy
import math
import pickle

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType

import stablenum_torch
from benchmarks.partners.batches import BAD
from benchmarks.partners.outcome import Fault
from benchmarks.partners.torch_hf_ranks import two_ranks
from benchmarks.partners.torch_parts import whole_state
from stablenum import GuardConfig, Reason
from stablenum.runlog.reading import read_run
from stablenum_torch.integrations.accelerate import GuardedAcceleratedOptimizer, guard
from tests.partners.hugging_face import alone, bits, check_guarded, check_same


@pytest.fixture(autouse=True)
def _no_accelerator_before():
    # Accelerate keeps its settings for the whole process. Its own tests forget them by the same calls, for
    # which it has no public ones.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))


def batch(i, bad=False):
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(i))
    return x * math.nan if bad else x


def prepared(config=None, accelerator=None, **settings):
    accelerator = guard(accelerator or accelerate.Accelerator(cpu=True), config, **settings)
    model = network()
    model, opt = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    return accelerator, model, opt


def train(accelerator, model, opt, steps, bad=()):
    for i in steps:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch(i, i in bad)).square().mean())
            opt.step()
            opt.zero_grad()


@pytest.mark.parametrize("fault", Fault)
def test_a_bad_batch_leaves_no_trace(fault):
    check_guarded("accelerate", fault)


@pytest.mark.parametrize("fault", Fault)
def test_trap_accelerate_alone_applies_the_bad_batch(fault):
    verdict = alone("accelerate", fault)
    assert not verdict.bit_equal
    assert not verdict.scheduler_held


def test_trap_a_plain_wrap_does_not_tell_accelerate_of_skips():
    accelerator, model = accelerate.Accelerator(cpu=True), network()
    opt = stablenum_torch.wrap(torch.optim.AdamW(model.parameters()))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
    model, opt, scheduler = accelerator.prepare(model, opt, scheduler)
    train(accelerator, model, opt, range(1), bad={0})
    scheduler.step()
    assert opt.optimizer.step_was_skipped
    assert not accelerator.optimizer_step_was_skipped
    assert scheduler.get_last_lr() == [5e-4]
    assert "loss" not in opt.optimizer.scalars()


def test_accelerate_knows_of_skips_and_holds_the_scheduler():
    accelerator, model = guard(accelerate.Accelerator(cpu=True)), network()
    opt = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
    opt, scheduler, model = accelerator.prepare(opt, scheduler, model)  # in whatever order
    rates, skipped = [], []
    for i in range(3):
        train(accelerator, model, opt, [i], bad={1})
        scheduler.step()
        rates += scheduler.get_last_lr()
        skipped.append(accelerator.optimizer_step_was_skipped)
    assert rates == [5e-4, 5e-4, 2.5e-4]
    assert skipped == [False, True, False]
    assert isinstance(opt, GuardedAcceleratedOptimizer)
    assert opt.optimizer.parameter_names()[0] == "0.weight"
    assert Reason(opt.optimizer.history()[1]["reason"]) is Reason.NONFINITE_LOSS


@pytest.mark.parametrize("steps", [2, 3])
def test_one_bad_micro_batch_skips_the_step_it_belongs_to(steps):
    ends = []
    for bad in ({4}, ()):
        accumulating = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=steps)
        accelerator, model, opt = prepared(accelerator=accumulating)
        whole = range(4 // steps * steps, (4 // steps + 1) * steps)
        train(accelerator, model, opt, [i for i in range(4 * steps) if bad or i not in whole], bad)
        ends.append(whole_state(model, opt))
        assert opt.optimizer.last["skipped_total"] == len(bad)
    check_same(*ends)


def test_the_recorded_loss_is_the_mean_over_micro_batches():
    accumulating = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    accelerator, model, opt = prepared(accelerator=accumulating)
    twin = copy.deepcopy(model)
    losses = [twin(batch(i)).square().mean().item() for i in range(2)]
    train(accelerator, model, opt, range(2))
    assert opt.optimizer.last["loss"] == pytest.approx(sum(losses) / 2, rel=1e-6)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_loss_scale_changes_nothing_but_the_range(precision):
    ends = []
    for scale in (None, 1024.0):
        AcceleratorState._reset_state(reset_partial_state=True)
        mixed = accelerate.Accelerator(cpu=True, mixed_precision=precision)
        accelerator, model, opt = prepared(accelerator=mixed, loss_scale=scale)
        train(accelerator, model, opt, range(4), bad={2})
        assert opt.optimizer.loss_scale == (scale or 1.0)
        assert opt.optimizer.last["skipped_total"] == 1
        ends.append(whole_state(model, opt))
    check_same(*ends)


def test_the_guards_loss_scale_takes_the_place_of_the_grad_scaler():
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu")  # as it is with mixed_precision="fp16" on CUDA
    with pytest.raises(ValueError, match=r"loss_scale must be set .* got None.*loss_scale='dynamic'"):
        guard(accelerator)
    assert type(accelerator) is accelerate.Accelerator
    accelerator, model, opt = prepared(accelerator=accelerator, loss_scale="dynamic")
    assert accelerator.scaler is None
    train(accelerator, model, opt, range(3), bad={1})
    assert opt.optimizer.loss_scale == 2.0**16
    assert opt.optimizer.last["skipped_total"] == 1


def test_trap_a_grad_scaler_hides_overflows_from_a_plain_wrap():
    accelerator, model = accelerate.Accelerator(cpu=True), network()
    accelerator.scaler = torch.amp.GradScaler("cpu")
    opt = stablenum_torch.wrap(torch.optim.AdamW(model.parameters()), buffers=model)
    model, opt = accelerator.prepare(model, opt)
    train(accelerator, model, opt, range(1), bad={0})
    assert opt.step_was_skipped
    assert opt.optimizer.last["reason"] is Reason.NO_STEP_YET
    assert model[1].running_mean.isnan().all()


@pytest.mark.parametrize("scale", [None, 4096.0])
def test_clipping_by_accelerate_is_warned_of_and_sees_unscaled_gradients(scale):
    accelerator, model, opt = prepared(loss_scale=scale)
    accelerator.backward(1e3 * model(batch(0)).square().mean())
    with pytest.warns(
        UserWarning, match=r"clip_grad_norm_ clips before .*guard\(accelerator, clip=1.0\)"
    ) as caught:
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
    assert caught[0].filename == __file__
    assert norm > 10
    opt.step()
    assert opt.optimizer.last["grad_norm"] == pytest.approx(0.5, rel=1e-4)


def test_clipping_by_value_is_warned_of():
    accelerator, model, _ = prepared()
    accelerator.backward(model(batch(0)).square().mean())
    with pytest.warns(UserWarning, match="clip_grad_value_ clips before"):
        accelerator.clip_grad_value_(model.parameters(), 1e-3)
    assert max(p.grad.abs().max() for p in model.parameters()) == pytest.approx(1e-3)


@pytest.mark.parametrize("scale", [None, 4096.0])
def test_a_norm_that_is_only_asked_for_changes_no_gradient(scale):
    accelerator, model, opt = prepared(loss_scale=scale)
    accelerator.backward(model(batch(0)).square().mean())
    opt.param_groups[0]["params"][0].grad[0, 0] = math.inf
    assert accelerator.clip_grad_norm_(model.parameters(), math.inf) == math.inf
    opt.step()
    assert opt.optimizer.last["reason"] is Reason.INF_GRADIENT
    assert opt.optimizer.last["worst"].name == "0.weight"


@pytest.mark.parametrize("given", ["none", "prepared", "guarded", "list"])
def test_gradients_may_be_unscaled_by_hand(given):
    accelerator, model, opt = prepared(loss_scale=4096.0)
    accelerator.backward(model(batch(0)).square().mean())
    scaled = [p.grad.clone() for p in model.parameters()]
    accelerator.unscale_gradients(
        {"none": None, "prepared": opt, "guarded": opt.optimizer, "list": [opt]}[given]
    )
    assert all(torch.equal(p.grad * 4096, g) for p, g in zip(model.parameters(), scaled, strict=True))


def test_saved_state_includes_the_guard(tmp_path):
    accelerator, model, opt = prepared(GuardConfig(loss_scale="dynamic"))
    train(accelerator, model, opt, range(3), bad={1})
    accelerator.save_state(str(tmp_path))
    train(accelerator, model, opt, range(3, 6))
    AcceleratorState._reset_state(reset_partial_state=True)
    again, second, second_opt = prepared(GuardConfig(loss_scale="dynamic"))
    again.load_state(str(tmp_path))
    assert second_opt.optimizer.last["skipped_total"] == 1
    train(again, second, second_opt, range(3, 6))
    check_same(whole_state(second, second_opt), whole_state(model, opt))
    assert second_opt.optimizer.guard_state_dict() == opt.optimizer.guard_state_dict()


def test_a_scheduler_stands_still_at_the_skips_of_its_own_optimizer():
    accelerator, parts = guard(accelerate.Accelerator(cpu=True)), [network(), network()]
    opts = [torch.optim.AdamW(part.parameters()) for part in parts]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(opt, 0.5) for opt in opts]
    *parts, left, right, one, other = accelerator.prepare(*parts, *opts, *schedulers)
    for i, model in enumerate(parts):
        accelerator.backward(model(batch(i, bad=i == 1)).square().mean())
    for part in (left, right, one, other):
        part.step()
    assert [opt.step_was_skipped for opt in (left, right)] == [False, True]
    assert [one.get_last_lr(), other.get_last_lr()] == [[5e-4], [1e-3]]


def test_an_optimizer_may_be_prepared_twice():
    accelerator, model, opt = prepared(loss_scale=2.0)
    assert accelerator.prepare(opt) is opt
    train(accelerator, model, opt, range(2), bad={1})
    assert [row["reason"] for row in opt.optimizer.history()] == [Reason.OK, Reason.NONFINITE_LOSS]


def test_a_held_scheduler_may_be_stepped_once_for_each_process(monkeypatch):
    accelerator, model = accelerate.Accelerator(cpu=True), network()
    opt = stablenum_torch.wrap(torch.optim.AdamW(model.parameters()))
    scheduler = opt.hold(torch.optim.lr_scheduler.ExponentialLR(opt, 0.5))
    model, opt, scheduler = accelerator.prepare(model, opt, scheduler)
    monkeypatch.setattr(accelerate.PartialState(), "num_processes", 2)
    for i in range(3):
        train(accelerator, model, opt, [i], bad={1})
        scheduler.step()
    assert scheduler.scheduler.last_epoch == 2 * 2


def test_what_is_unpickled_is_guarded_too():
    parts = prepared(loss_scale=2.0)
    train(*parts, range(2))
    accelerator, model, opt = pickle.loads(pickle.dumps(parts))
    for one in (parts, (accelerator, model, opt)):
        train(*one, range(2, 5), bad={3})
    assert opt.optimizer.last["skipped_total"] == 1
    check_same(whole_state(parts[1], parts[2]), whole_state(model, opt))


def test_two_optimizers_keep_apart_and_have_no_loss():
    accelerator = guard(accelerate.Accelerator(cpu=True))
    left, right = network(), network()
    opts = [torch.optim.AdamW(model.parameters()) for model in (left, right)]
    left, right, *opts = accelerator.prepare(left, right, *opts)
    for i, model in enumerate((left, right)):
        accelerator.backward(model(batch(i, bad=model is right)).square().mean())
    for opt in opts:
        opt.step()
    assert [opt.step_was_skipped for opt in opts] == [False, True]
    assert "loss" not in opts[0].optimizer.scalars()
    assert left[1].num_batches_tracked == 1
    assert right[1].num_batches_tracked == 0


def test_a_second_training_begins_with_new_guards():
    accelerator, model, opt = prepared(loss_scale=2.0)
    train(accelerator, model, opt, range(2))
    accelerator.free_memory()
    model = network()
    model, opt = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    train(accelerator, model, opt, range(2), bad={1})
    assert opt.optimizer.last["step"] == 1


def test_wrong_uses_are_refused_with_the_remedy():
    with pytest.raises(TypeError, match=r"accelerator must be an accelerate.Accelerator; got"):
        guard(network())
    accelerator, model = accelerate.Accelerator(cpu=True), network()
    with pytest.raises(TypeError, match="unknown setting 'clipping'"):
        guard(accelerator, clipping=1.0)
    early = accelerator.prepare(torch.optim.AdamW(model.parameters()))
    guard(accelerator, loss_scale=2.0)
    with pytest.raises(RuntimeError, match="already guarded"):
        guard(accelerator)
    with pytest.raises(RuntimeError, match=r"prepared without a guard. Call guard\(accelerator\) before"):
        accelerator.prepare(early)
    with pytest.raises(RuntimeError, match="no guarded optimizer"):
        accelerator.backward(model(batch(0)).sum())
    with pytest.raises(TypeError, match="already guarded; wrap the original optimizer"):
        accelerator.prepare(stablenum_torch.wrap(torch.optim.AdamW(model.parameters())))
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(ValueError, match="loss_scale must be None if several optimizers"):
        accelerator.prepare(torch.optim.AdamW(network().parameters()))


def test_a_log_has_every_step_and_is_of_one_optimizer(tmp_path):
    accelerator, model, opt = prepared(log=tmp_path / "run.jsonl")
    train(accelerator, model, opt, range(5), bad=(3,))
    opt.optimizer.history()
    run = read_run(tmp_path / "run.jsonl")
    assert run.steps == list(range(5))
    assert run.reason[3] == Reason.NONFINITE_LOSS
    with pytest.raises(ValueError, match="log must be None if several optimizers are prepared"):
        accelerator.prepare(torch.optim.AdamW(network().parameters()))


def test_replicas_are_compared_after_every_so_many_steps_also_after_free_memory(caplog):
    with pytest.raises(ValueError, match="check_replicas_every must be a whole number from 1"):
        guard(accelerate.Accelerator(cpu=True), check_replicas_every=0)
    parts = prepared(check_replicas_every=2)
    parts[0].free_memory()
    model = network()
    for accelerator, net, opt in (
        parts,
        (parts[0], *parts[0].prepare(model, torch.optim.AdamW(model.parameters()))),
    ):
        caplog.clear()
        train(accelerator, net, opt, range(1))
        assert "check_replicas_every has nothing to compare" not in caplog.text
        train(accelerator, net, opt, range(1))
        assert "check_replicas_every has nothing to compare" in caplog.text


def test_engines_that_step_by_themselves_are_refused():
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.state.distributed_type = DistributedType.DEEPSPEED
    with pytest.raises(
        ValueError, match=r"got distributed_type DEEPSPEED, whose engine computes it. Use DDP"
    ):
        guard(accelerator)


@pytest.mark.slow  # starts four processes, each of which imports torch and Accelerate
def test_a_nan_on_one_of_two_ranks_leaves_no_trace_on_either():
    outcomes = two_ranks("accelerate", guarded=True)
    references = two_ranks("accelerate", guarded=True, without=True)
    for outcome, reference in zip(outcomes, references, strict=True):
        check_same(outcome.state, reference.state)
        assert outcome.schedule[-1] == reference.schedule[-1]
    parameters = [
        {k: v for k, v in bits(outcome.state).items() if "running" not in k} for outcome in outcomes
    ]
    assert parameters[0] == parameters[1]
    assert outcomes[0].log[BAD]["guard/applied"] == 0


def test_the_prepared_optimizer_is_shown_in_one_line():
    *_, opt = prepared(clip=1.0)
    assert repr(opt) == f"GuardedAcceleratedOptimizer(config={GuardConfig(clip=1.0)}, optimizer=AdamW)"
