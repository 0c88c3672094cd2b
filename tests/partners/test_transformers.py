"""transformers' Trainer with a guard: each fault leaves no trace, and what the Trainer alone makes of it."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from accelerate.state import GradientState
from transformers import PreTrainedConfig, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from benchmarks.partners.batches import BAD, STEPS
from benchmarks.partners.outcome import Fault
from benchmarks.partners.torch_hf import quiet
from benchmarks.partners.torch_hf_ranks import two_ranks
from benchmarks.partners.torch_parts import whole_state
from stablenum import ClipByGlobalNorm, GuardConfig, NonFiniteError, Reason
from stablenum.runlog.reading import read_run
from stablenum_torch.integrations.transformers import guard
from tests.partners.hugging_face import (
    alone,
    check_guarded,
    check_same,
    run,
)

ROWS = 4


class Classifier(torch.nn.Module):
    """Four classes; with ``labels`` it computes the loss itself."""

    config = PreTrainedConfig()  # wanted with label smoothing

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4))

    def forward(self, x, labels=None):
        logits = self.net(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def rows(batches=6, bad=None):
    x = torch.randn(batches * ROWS, 3, generator=torch.Generator().manual_seed(1))
    if bad is not None:
        x[bad * ROWS] = math.nan
    return [{"x": row, "labels": torch.tensor(i % 4)} for i, row in enumerate(x)]


def make(folder, data=None, trainer=Trainer, keywords=None, **arguments):
    given = {
        "per_device_train_batch_size": ROWS,
        "num_train_epochs": 1,
        "train_sampling_strategy": "sequential",
        "lr_scheduler_type": "constant_with_warmup",  # does not depend on the number of steps
        "warmup_steps": 4,
        "learning_rate": 0.01,
        **quiet(),
        "save_strategy": "no",
        **arguments,
    }
    made = trainer(
        Classifier(), TrainingArguments(str(folder), **given), train_dataset=data or rows(), **keywords or {}
    )
    made.remove_callback(PrinterCallback)
    return made


def state_of(trainer):
    return whole_state(trainer.model, trainer.optimizer)


def training_log(trainer):
    return [row for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize("fault", Fault)
def test_a_bad_batch_leaves_no_trace(fault):
    check_guarded("trainer", fault)


@pytest.mark.parametrize("fault", [Fault.NAN_BATCH, Fault.LOSS_SPIKE])
def test_trap_the_trainer_alone_applies_the_bad_batch(fault):
    verdict = alone("trainer", fault)
    assert not verdict.bit_equal
    assert not verdict.scheduler_held


def test_trap_the_trainer_alone_shows_a_loss_of_zero_after_a_nan():
    outcome = run("trainer", Fault.NAN_BATCH, guarded=False)
    assert [row["loss"] for row in outcome.log[BAD:]] == [0.0] * (STEPS - BAD)
    guarded = run("trainer", Fault.NAN_BATCH, guarded=True)
    assert [i for i, row in enumerate(guarded.log) if not math.isfinite(row["loss"])] == [BAD]


def test_the_trainers_own_optimizer_and_scheduler_are_guarded(tmp_path):
    kept = rows()
    del kept[3 * ROWS : 4 * ROWS]
    ends = []
    for data in (rows(bad=3), kept):
        trainer = guard(make(tmp_path, data))
        trainer.train()
        ends.append((state_of(trainer), trainer.lr_scheduler.state_dict()))
    check_same(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]


def test_global_step_counts_skipped_steps_and_the_scheduler_does_not(tmp_path):
    trainer = guard(make(tmp_path, rows(bad=1), num_train_epochs=2))
    trainer.train()
    assert trainer.state.global_step == 12
    assert trainer.lr_scheduler.last_epoch == 10
    assert trainer.optimizer.optimizer.last["skipped_total"] == 2
    assert trainer.accelerator.optimizer_step_was_skipped is False


def test_a_skipped_step_is_logged_between_two_entries(tmp_path):
    trainer = guard(make(tmp_path, rows(bad=2), logging_steps=5))
    trainer.train()
    log = training_log(trainer)
    assert [row["step"] for row in log] == [3, 5]
    assert math.isnan(log[0]["loss"])
    assert Reason(log[0]["guard/reason"]) is Reason.NONFINITE_LOSS
    assert "NONFINITE_LOSS" in str(log[0])  # as the Trainer prints it, and still a number
    assert log[1]["guard/skipped_total"] == 1
    assert math.isfinite(log[1]["loss"])
    assert math.isfinite(trainer.state.log_history[-1]["train_loss"])


def test_a_log_file_has_every_step(tmp_path):
    trainer = guard(make(tmp_path, rows(bad=3)), log=tmp_path / "run.jsonl")
    trainer.train()
    trainer.optimizer.optimizer.history()
    run = read_run(tmp_path / "run.jsonl")
    assert run.steps == list(range(6))
    assert run.skipped == [3]


def test_replicas_are_compared_after_every_so_many_steps(tmp_path, caplog):
    guard(make(tmp_path, rows()), check_replicas_every=3).train()
    assert "check_replicas_every has nothing to compare" in caplog.text


def test_nothing_is_logged_if_nothing_is_to_be_logged(tmp_path):
    trainer = guard(make(tmp_path, rows(bad=2), logging_strategy="no"))
    trainer.train()
    assert training_log(trainer) == []


def test_reports_and_evaluations(tmp_path):
    class Report(TrainerCallback):
        """Stands where the callbacks of TensorBoard, W&B and others stand: before the guard's."""

        def __init__(self):
            self.seen = []

        def on_log(self, args, state, control, logs=None, **kwargs):
            self.seen.append(dict(logs))

    report = Report()
    data = rows(bad=2)
    keywords = {"callbacks": [report], "eval_dataset": rows()}
    trainer = guard(make(tmp_path, data, keywords=keywords, eval_strategy="steps", eval_steps=3))
    trainer.train()
    assert [row["guard/applied"] for row in report.seen if "loss" in row] == [1, 1, 0, 1, 1, 1]
    evaluated = [row for row in report.seen if "eval_loss" in row]
    assert len(evaluated) == 2
    assert not any(name.startswith("guard/") for row in evaluated for name in row)
    assert math.isfinite(evaluated[0]["eval_loss"])


def _smoothed(outputs, labels, num_items_in_batch=None):
    loss = torch.nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum")
    return loss / num_items_in_batch


@pytest.mark.parametrize("how", ["model", "compute_loss_func", "label_smoothing"])
def test_the_guard_sees_the_loss_however_it_is_computed(tmp_path, how):
    arguments = {"label_smoothing_factor": 0.1} if how == "label_smoothing" else {}
    keywords = {"compute_loss_func": _smoothed} if how == "compute_loss_func" else {}
    for steps in (1, 2):
        accumulate = {"gradient_accumulation_steps": steps}
        trainer = guard(make(tmp_path, rows(bad=3), keywords=keywords, **arguments, **accumulate))
        trainer.train()
        good = [row for row in training_log(trainer) if row["guard/applied"]]
        assert len(good) == 6 // steps - 1
        assert [row["guard/loss"] for row in good] == pytest.approx([row["loss"] for row in good], rel=1e-6)
        bad = next(row for row in training_log(trainer) if not row["guard/applied"])
        assert Reason(bad["guard/reason"]) is Reason.NONFINITE_LOSS


def test_one_bad_micro_batch_skips_the_step_it_belongs_to(tmp_path):
    kept = rows(batches=8)
    del kept[4 * ROWS : 6 * ROWS]
    ends = []
    for data in (rows(batches=8, bad=5), kept):
        trainer = guard(make(tmp_path, data, gradient_accumulation_steps=2))
        trainer.train()
        ends.append(state_of(trainer))
    check_same(*ends)


@pytest.mark.parametrize(
    ("settings", "bound", "expected"),
    [
        ({}, 1.0, (ClipByGlobalNorm(1.0),)),
        ({}, 0.25, (ClipByGlobalNorm(0.25),)),
        ({}, 0, ()),
        ({"clip": 3.0}, 1.0, (ClipByGlobalNorm(3.0),)),
        ({"config": GuardConfig(clip=2.0)}, 1.0, (ClipByGlobalNorm(2.0),)),
        ({"config": GuardConfig(spike="skip")}, 0.5, (ClipByGlobalNorm(0.5),)),
    ],
)
def test_only_the_guard_clips(tmp_path, settings, bound, expected):
    trainer = make(tmp_path, max_grad_norm=bound, max_steps=1)
    given = trainer.args
    assert guard(trainer, **settings) is trainer
    trainer.train()
    assert given.max_grad_norm == bound
    assert trainer.args.max_grad_norm == 0
    assert trainer.optimizer.optimizer.config.clip == expected


def test_the_logged_norm_is_that_before_clipping(tmp_path):
    trainer = guard(make(tmp_path), clip=1e-3, loss_scale=256.0)
    trainer.train()
    for row in training_log(trainer):
        assert row["grad_norm"] == pytest.approx(row["guard/grad_norm"], rel=1e-5)
        assert row["grad_norm"] > 0.01
        assert row["guard/clip_coefficient"] < 0.1


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_on_a_cpu(tmp_path, precision):
    kept = rows()
    del kept[3 * ROWS : 4 * ROWS]
    ends = []
    for data in (rows(bad=3), kept):
        trainer = guard(make(tmp_path, data, **{precision: True}), loss_scale="dynamic")
        trainer.train()
        ends.append(state_of(trainer))
    check_same(*ends)
    assert trainer.optimizer.optimizer.loss_scale == 2.0**16


def test_a_grad_scaler_is_replaced_by_the_guards_loss_scale(tmp_path):
    trainer = make(tmp_path, rows(bad=3))
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu")  # as it is with fp16=True on CUDA
    given = trainer.args
    with pytest.raises(ValueError, match="loss_scale='dynamic'"):
        guard(trainer)
    assert trainer.args is given
    assert type(trainer) is Trainer
    guard(trainer, loss_scale="dynamic").train()
    assert trainer.accelerator.scaler is None
    assert trainer.optimizer.optimizer.last["skipped_total"] == 1


def test_a_trainer_trains_twice(tmp_path):
    trainer = guard(make(tmp_path, rows(bad=3)))
    trainer.train()
    trainer.train()
    assert trainer.optimizer.optimizer.last["skipped_total"] == 2
    assert trainer.lr_scheduler.last_epoch == 5


def test_a_checkpoint_from_before_the_guard_can_be_resumed(tmp_path):
    make(tmp_path, save_strategy="steps", save_steps=3).train()
    trainer = guard(make(tmp_path, rows(bad=4)))
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert [row["guard/applied"] for row in training_log(trainer)[-3:]] == [1, 0, 1]
    assert trainer.lr_scheduler.last_epoch == 5


def test_what_is_logged_or_evaluated_before_the_training(tmp_path):
    trainer = guard(make(tmp_path, keywords={"eval_dataset": rows()}))
    trainer.log({"loss": 1.0})
    assert "eval_loss" in trainer.evaluate()
    assert not any(name.startswith("guard/") for row in trainer.state.log_history for name in row)


def test_a_model_that_is_made_in_train_is_known(tmp_path):
    trainer = make(tmp_path, rows(bad=3))
    trainer.model_init = Classifier
    guard(trainer).train()
    assert trainer.model.net[1].running_mean.isfinite().all()
    assert trainer.model.net[1].num_batches_tracked == 5


def test_the_class_keeps_its_name_and_its_own_log(tmp_path):
    class Mine(Trainer):
        def log(self, logs, start_time=None):
            super().log({**logs, "mine": 1.0}, start_time)

    trainer = guard(make(tmp_path, trainer=Mine))
    trainer.train()
    assert isinstance(trainer, Mine)
    assert type(trainer).__name__ == "Mine"
    assert all(row["mine"] == 1.0 and row["guard/applied"] == 1 for row in training_log(trainer))


def test_a_pickled_trainer_is_guarded_too(tmp_path):
    GradientState._reset_state()  # which has weak references to the loaders of the trainings before
    trainer = pickle.loads(pickle.dumps(guard(make(tmp_path, rows(bad=3)))))
    trainer.train()
    assert trainer.optimizer.optimizer.last["skipped_total"] == 1
    assert [row["guard/applied"] for row in training_log(trainer)] == [1, 1, 1, 0, 1, 1]


def test_a_training_ends_as_configured(tmp_path):
    trainer = guard(make(tmp_path, rows(bad=3)), on_nonfinite="raise")
    with pytest.raises(NonFiniteError, match=r"net\.0\.weight|loss"):
        trainer.train()


def test_wrong_uses_are_refused_with_the_remedy(tmp_path):
    with pytest.raises(TypeError, match=r"trainer must be a transformers.Trainer; got"):
        guard(Classifier())
    trainer = make(tmp_path)
    with pytest.raises(TypeError, match="unknown setting"):
        guard(trainer, clipping=1.0)
    guard(trainer)
    with pytest.raises(RuntimeError, match=r"trainer is already guarded.*another Trainer"):
        guard(trainer)
    trainer.create_accelerator_and_postprocess()  # as hyperparameter_search does
    with pytest.raises(
        RuntimeError, match=r"not guarded: its accelerator or its optimizer has been replaced"
    ):
        trainer.train()
    trained = make(tmp_path)
    trained.train()
    with pytest.raises(RuntimeError, match=r"trainer has already trained.*before trainer.train"):
        guard(trained)
    assert type(trained) is Trainer


@pytest.mark.slow  # starts four processes, each of which imports torch and transformers
def test_a_nan_on_one_of_two_ranks_leaves_no_trace_on_either():
    outcomes = two_ranks("trainer", guarded=True)
    references = two_ranks("trainer", guarded=True, without=True)
    for outcome, reference in zip(outcomes, references, strict=True):
        check_same(outcome.state, reference.state)
    assert outcomes[0].log[BAD]["guard/applied"] == 0
