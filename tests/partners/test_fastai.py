"""The guard in fastai's Learner."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from fastai.callback.core import Callback, CancelBatchException
from fastai.callback.fp16 import MixedPrecision
from fastai.callback.schedule import ParamScheduler, SchedCos
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner, ValueMetric
from fastai.optimizer import OptimWrapper

import stablenum_torch
from benchmarks.partners.judge import judge
from benchmarks.partners.outcome import Fault
from benchmarks.partners.torch_trainers import LOOPS
from stablenum_torch.integrations.fastai import GuardCallback

# What fastai uses to load a file.
pytestmark = pytest.mark.filterwarnings("ignore:numpy.core is deprecated:DeprecationWarning")

BAD = 2


def learner(*callbacks: Any, guarded: bool = True, bad: int | None = BAD, **settings: Any) -> Learner:
    xs = [torch.randn(8, 3, generator=torch.Generator().manual_seed(i)) for i in range(6)]
    if bad is not None:
        xs[bad] = xs[bad] * math.nan
    good = [(x, torch.ones(8, 1)) for x in xs if not x.isnan().any()]
    train = DataLoader([(x, torch.ones(8, 1)) for x in xs], bs=None, num_workers=0)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))

    def optimizer(params: Any, **hypers: Any) -> torch.optim.Optimizer:
        plain = torch.optim.AdamW(params, **hypers)
        return stablenum_torch.wrap(plain, buffers=model, **settings) if guarded else plain

    learn = Learner(
        DataLoaders(train, DataLoader(good, bs=None, num_workers=0)),
        model,
        loss_func=torch.nn.functional.mse_loss,
        opt_func=functools.partial(OptimWrapper, opt=optimizer),
        cbs=list(callbacks),
    )
    learn.logger = lambda row: None
    return learn


@pytest.mark.parametrize("fault", Fault)
def test_a_guarded_run_ends_bit_equal_to_the_run_without_the_bad_batch(fault):
    verdict = judge(LOOPS["fastai"](fault, guarded=True))
    assert verdict.finite
    assert verdict.bit_equal
    assert verdict.visible
    assert verdict.resumes


@pytest.mark.parametrize("fault", [Fault.INF_GRADIENT, Fault.FP16_OVERFLOW])
def test_trap_fastai_alone_keeps_what_the_bad_batch_did(fault):
    verdict = judge(LOOPS["fastai"](fault, guarded=False))
    assert not verdict.bit_equal
    assert not verdict.finite


def test_the_callback_says_which_steps_were_skipped_and_fastais_log_how_many():
    learn = learner(GuardCallback())
    learn.metrics = ValueMetric(lambda: len(learn.guard.skipped), "skipped")
    learn.fit(1)
    assert learn.guard.skipped == [BAD]
    assert learn.recorder.metric_names == ["epoch", "train_loss", "valid_loss", "skipped", "time"]
    assert learn.recorder.values[0][2] == 1
    assert learn.guard.optimizer.history()[BAD]["reason"].name == "NONFINITE_LOSS"


def test_trap_fastais_smoothed_loss_stays_nan_after_one_bad_batch():
    learn = learner(GuardCallback())
    learn.fit(1)
    assert [math.isnan(loss) for loss in learn.recorder.losses] == [i >= BAD for i in range(6)]


def test_a_loss_scale_computes_in_float16_in_training_and_validation():
    seen = []
    learn = learner(GuardCallback(), loss_scale=256.0)
    learn.model[2].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    learn.fit(1)
    assert set(seen) == {torch.float16}
    assert learn.guard.skipped == [BAD]
    assert not torch.is_autocast_enabled("cpu")


class Cancel(Callback):
    order = 5

    def after_pred(self) -> None:
        raise CancelBatchException


class Fail(Callback):
    order = 5

    def after_pred(self) -> None:
        raise KeyboardInterrupt


def test_a_cancelled_batch_leaves_no_autocast_behind():
    learner(GuardCallback(), Cancel(), loss_scale=256.0).fit(1)
    assert not torch.is_autocast_enabled("cpu")


def test_an_interrupted_batch_leaves_autocast_until_the_next_run_at_most():
    learn = learner(GuardCallback(), loss_scale=256.0, bad=None)
    with learn.added_cbs(Fail()), pytest.raises(KeyboardInterrupt):
        learn.fit(1)
    learn.validate()
    assert not torch.is_autocast_enabled("cpu")


def test_predictions_need_no_optimizer():
    ends = []
    for callbacks in ([GuardCallback()], []):
        learn = learner(*callbacks, loss_scale=256.0)
        predictions, _ = learn.get_preds()
        ends.append([predictions.tolist(), learn.validate()])
        assert learn.opt is None
    assert ends[0] == ends[1]


def test_accumulation_skips_the_whole_step():
    learn = learner(GuardCallback(), GradientAccumulation(n_acc=16))
    learn.fit(1)
    applied = [row["applied"] for row in learn.guard.optimizer.history()]
    assert applied == [True, False, True]


def test_trap_a_schedule_goes_on_at_a_skipped_step():
    rates = []
    for bad in (BAD, None):
        learn = learner(GuardCallback(), ParamScheduler({"lr": SchedCos(0.1, 0.0)}), bad=bad)
        learn.fit(1)
        rates.append(list(learn.recorder.lrs))
    assert rates[0] == rates[1]
    assert len(set(rates[0])) == 6


@pytest.mark.filterwarnings("ignore:.*CUDA is not available:UserWarning")  # MixedPrecision is for CUDA
@pytest.mark.parametrize(("rival", "hint"), [(MixedPrecision, "loss_scale"), (GradientClip, "clip=1.0")])
def test_callbacks_that_do_the_guards_work_are_named(rival, hint):
    learn = learner(GuardCallback(), rival())
    with pytest.raises(ValueError, match=f"cbs must not contain {rival.__name__} beside a guard.*{hint}"):
        learn.fit(1)


def test_the_optimizer_has_to_be_guarded():
    with pytest.raises(TypeError, match=r"opt_func must make.*got OptimWrapper with AdamW"):
        learner(GuardCallback(), guarded=False).fit(1)


def test_the_callback_is_shown_in_one_line():
    callback = GuardCallback()
    assert repr(callback) == "GuardCallback(optimizer=None, skipped=0)"
    learn = learner(callback)
    assert repr(callback) == "GuardCallback(optimizer=None, skipped=0)"
    learn.fit(1)
    assert repr(callback) == "GuardCallback(optimizer=AdamW, skipped=1)"
