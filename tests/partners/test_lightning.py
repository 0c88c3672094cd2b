"""The guard in Lightning: faults, schedulers, logs, checkpoints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from benchmarks.partners.judge import judge, same_bits
from benchmarks.partners.outcome import Fault
from benchmarks.partners.torch_parts import whole_state
from benchmarks.partners.torch_trainers import LOOPS
from stablenum import ClipByGlobalNorm
from stablenum.runlog.reading import read_run
from stablenum_torch.integrations.lightning import GuardCallback
from tests.partners.lightning_fsdp_program import NAN, SPIKE
from tests.partners.lightning_modules import BAD, WARNINGS, data, fit, gan, module_of, trainer_of, without

pytestmark = WARNINGS

ROOT = Path(__file__).parents[2]


# --- the faults -------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", Fault)
@pytest.mark.parametrize("loop", ["lightning", "lightning-manual"])
def test_a_guarded_run_ends_bit_equal_to_the_run_without_the_bad_batch(loop, fault):
    verdict = judge(LOOPS[loop](fault, guarded=True))
    assert verdict.finite
    assert verdict.bit_equal
    assert verdict.visible
    assert verdict.scheduler_held
    assert verdict.resumes


@pytest.mark.parametrize(
    "fault", [Fault.NAN_BATCH, *(pytest.param(f, marks=pytest.mark.slow) for f in Fault if f != "nan_batch")]
)
def test_trap_lightning_alone_keeps_what_the_bad_batch_did(fault):
    outcome = LOOPS["lightning"](fault, guarded=False)
    verdict = judge(outcome)
    assert not verdict.bit_equal
    assert not verdict.scheduler_held
    assert verdict.finite == (fault is Fault.LOSS_SPIKE)
    if fault is Fault.FP16_OVERFLOW:  # the scaler skips the step, and batch norm stays broken
        bad = [name for name, value in outcome.state.items() if not np.isfinite(value).all()]
        assert bad == ["model/norm.running_mean", "model/norm.running_var"]


def test_a_guard_changes_nothing_in_a_run_without_faults():
    guarded, alone = (LOOPS["lightning"](None, guarded=guarded) for guarded in (True, False))
    assert same_bits(guarded.state, alone.state)
    assert guarded.schedule == alone.schedule


# --- schedulers, logs, checkpoints ------------------------------------------------------------------


def test_a_scheduler_stands_still_at_a_skipped_step_unless_it_counts_epochs():
    for interval, steps in (("step", 5), ("epoch", 1)):
        module = module_of()
        module.interval = interval
        fit(trainer_of(GuardCallback()), module, data(bad=BAD))
        assert module.scheduler.last_epoch == steps


def test_a_log_file_has_every_step_and_is_of_one_optimizer(tmp_path):
    callback = GuardCallback(log=tmp_path / "run.jsonl")
    fit(trainer_of(callback), module_of(), data(bad=BAD))
    callback.optimizers[0].history()
    run = read_run(tmp_path / "run.jsonl")
    assert run.skipped == [BAD]
    assert run.steps == list(range(6))
    with pytest.raises(ValueError, match="log must be None if there are several optimizers"):
        fit(trainer_of(GuardCallback(log=tmp_path / "other.jsonl")), gan(guarded=False), data())


def test_replicas_are_compared_after_every_so_many_steps(caplog):
    with pytest.raises(ValueError, match="check_replicas_every must be a whole number from 1"):
        GuardCallback(check_replicas_every=0)
    fit(trainer_of(GuardCallback(check_replicas_every=3)), module_of(), data())
    assert "check_replicas_every has nothing to compare" in caplog.text


def test_the_callback_is_shown_in_one_line():
    callback = GuardCallback(clip=1.0, check_replicas_every=5)
    shown = f"GuardCallback(config={callback.config}, prefix='guard/', check_replicas_every=5, log=None, "
    assert repr(callback) == f"{shown}optimizers=0)"
    fit(trainer_of(callback), module_of(), data(1))
    assert repr(callback) == f"{shown}optimizers=1)"


def manual(made: Any) -> Any:
    """A module in manual optimization that steps its scheduler after each batch: ``made(scheduler)``."""
    module = module_of()
    module.automatic_optimization = False

    def training_step(batch: torch.Tensor, batch_idx: int) -> None:
        opt, loss = module.optimizers(), module.net(batch).square().mean()
        opt.zero_grad()
        module.manual_backward(opt.scale(loss))
        opt.step()
        scheduler = module.lr_schedulers()
        scheduler.step(*[loss.detach()] * isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau))

    def configure_optimizers() -> Any:
        optimizer = module.optimizer(module.parameters())
        return [optimizer], [made(optimizer)]

    module.training_step, module.configure_optimizers = training_step, configure_optimizers
    return module


@pytest.mark.parametrize("given", [{}, {"interval": "epoch"}, {"interval": "step", "frequency": 2}])
def test_manual_optimization_holds_a_scheduler_whatever_its_interval(given):
    def made(optimizer: torch.optim.Optimizer) -> Any:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"scheduler": scheduler, **given} if given else scheduler

    states = []
    for batches in (data(bad=BAD), without(data(), BAD)):
        trainer = trainer_of(GuardCallback())
        states.append(fit(trainer, manual(made), batches))
        assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 5
    assert same_bits(*states)


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_manual_optimization_leaves_reduce_on_plateau_alone(interval):
    def made(optimizer: torch.optim.Optimizer) -> Any:
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"scheduler": scheduler, "interval": interval}

    trainer = trainer_of(GuardCallback())
    fit(trainer, manual(made), data(bad=BAD))
    assert type(trainer.lr_scheduler_configs[0].scheduler) is torch.optim.lr_scheduler.ReduceLROnPlateau


def test_a_scheduler_that_cannot_be_held_is_named():
    module = module_of()
    module.frequency = 2
    with pytest.warns(UserWarning, match="ExponentialLR does not stand still.*frequency=2 counts batches"):
        fit(trainer_of(GuardCallback()), module, data())


def test_the_log_shows_the_skip_every_so_many_steps(tmp_path):
    logger = pl.loggers.CSVLogger(tmp_path, name="", version="")
    callback, module, calls = GuardCallback(prefix="g/"), module_of(), []
    log_dict = module.log_dict
    module.log_dict = lambda numbers: (calls.append(numbers), log_dict(numbers))
    fit(trainer_of(callback, logger=logger, log_every_n_steps=2), module, data(bad=BAD))
    assert len(calls) == 3  # at the other steps, nothing is read from the device
    header, *rows = (tmp_path / "metrics.csv").read_text().splitlines()
    column = header.split(",").index("g/skipped_total")
    assert [float(row.split(",")[column]) for row in rows] == [0.0, 1.0, 1.0]
    # The loss of the skipped step is NaN, and is written as such.
    assert rows[1].split(",")[header.split(",").index("g/loss")] == "nan"


def logged(module: Any, batches: list[torch.Tensor], **settings: Any) -> list[tuple[int, list[float]]]:
    """The batch and the steps so far of each optimizer, at each reading of the guards' numbers."""
    callback, now, seen = GuardCallback(), [-1], []
    log_dict, begin = module.log_dict, module.on_train_batch_start

    def note(numbers: Any) -> None:
        seen.append((now[0], [optimizer.last["step"] for optimizer in callback.optimizers]))
        log_dict(numbers)

    def count(batch: torch.Tensor, batch_idx: int) -> Any:
        now[0] = batch_idx
        return begin(batch, batch_idx)

    module.log_dict, module.on_train_batch_start = note, count
    fit(trainer_of(callback, **settings), module, batches)
    return seen[:: len(callback.optimizers)]


def test_micro_batches_without_a_step_are_not_logged():
    assert logged(module_of(), data(), accumulate_grad_batches=2) == [(1, [0]), (3, [1]), (5, [2])]


@pytest.mark.parametrize("every", [2, 3])
def test_the_log_of_several_optimizers_is_written_at_the_batches_that_lightning_writes(every):
    module = gan(guarded=True)
    rows = logged(module, data(), log_every_n_steps=every)
    assert [batch for batch, _ in rows] == list(range(every - 1, 6, every))
    assert rows == [(batch, [batch, batch]) for batch, _ in rows]


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")  # the second run saves nothing
def test_a_checkpoint_of_modelcheckpoint_resumes_exactly(tmp_path):
    checkpoints = pl.callbacks.ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    first, second = GuardCallback(spike="skip"), GuardCallback(spike="skip")
    saving = trainer_of(first, checkpoints, max_epochs=2, enable_checkpointing=True)
    full = fit(saving, module_of(), data(bad=BAD))
    going_on, saved = trainer_of(second, max_epochs=2), tmp_path / "epoch=0.ckpt"
    resumed = fit(going_on, module_of(), data(bad=BAD), ckpt_path=saved)
    assert same_bits(full, resumed)
    assert second.optimizers[0].last["skipped_total"] == 2  # one of them before the checkpoint


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")  # the second run saves nothing
def test_a_checkpoint_made_without_a_guard_says_that_the_guard_starts_afresh(tmp_path, caplog):
    checkpoints = pl.callbacks.ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    fit(trainer_of(checkpoints, enable_checkpointing=True), module_of(), data())
    callback, saved = GuardCallback(spike="skip", log=tmp_path / "run.jsonl"), tmp_path / "epoch=0.ckpt"
    fit(trainer_of(callback, max_epochs=2), module_of(), data(), ckpt_path=saved)  # a warning is an error
    (said,) = [entry.getMessage() for entry in caplog.records if entry.name == "stablenum"]
    assert said.startswith(
        "The checkpoint was made without a guard. The guard starts afresh: its steps count"
    )
    assert "learn from scratch: SpikeGuard." in said
    assert callback.optimizers[0].history()[0]["step"] == 0


def test_a_second_fit_guards_the_new_optimizers():
    callback = GuardCallback()
    trainer, module = trainer_of(callback, gradient_clip_val=1.0), module_of()
    fit(trainer, module, data(bad=BAD))
    first = callback.optimizers[0]
    trainer.fit_loop.max_epochs = 2
    fit(trainer, module, data())
    assert callback.optimizers[0] is not first
    assert callback.optimizers[0].config.clip == (ClipByGlobalNorm(1.0),)
    assert len(module._forward_pre_hooks) == 1


def test_a_run_that_fails_gives_the_trainer_its_settings_back():
    module = module_of()
    trainer = trainer_of(GuardCallback(on_nonfinite="raise"), gradient_clip_val=1.0)
    with pytest.raises(ArithmeticError, match="NaN"):
        fit(trainer, module, data(bad=BAD))
    assert trainer.gradient_clip_val == 1.0


def of_ranks(program: str, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """What each of two ranks wrote that a program of ``tests.partners`` has Lightning start."""
    env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-m", f"tests.partners.{program}", str(folder), *arguments]
    ended = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.slow(reason="two processes import Lightning")
@pytest.mark.parametrize("form", ["full", "sharded"])
def test_checkpoints_of_model_parallel_trainings_carry_the_guards_state(tmp_path, form):
    for rank, found in enumerate(of_ranks("lightning_fsdp_program", tmp_path, form)):
        assert found["broken"] == found["unbroken"], rank
        assert found["unbroken"]["skipped"] == [SPIKE, NAN], "found by what was learnt before the break"


@pytest.mark.slow(reason="two processes import Lightning")
def test_ranks_that_lightning_starts_skip_together(tmp_path):
    ranks = of_ranks("lightning_ranks_program", tmp_path)
    for rank in ranks:  # the gradients are finite, so that only rank 1's loss is a reason to skip
        assert [row["applied"] for row in rank["history"]] == [i != BAD for i in range(6)]
        row = rank["history"][BAD]
        assert (row["reason"].name, row["worst_rank"]) == ("NONFINITE_LOSS", 1)
        assert np.isfinite(row["grad_norm"])
        assert rank["model"]["net.1.num_batches_tracked"] == 5
        # Running statistics are those of each rank's own batches.
        rank["model"] = {name: v for name, v in rank["model"].items() if "running" not in name}
    first, second = ({"model": r["model"], "optimizer": r["optimizer"]} for r in ranks)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_the_recipes_batches_are_all_given_in_every_epoch():
    page = (ROOT / "docs" / "recipes" / "lightning.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"^class Batches:\n.*?(?=^class )", page, re.S | re.M)
    names: dict[str, Any] = {"torch": torch}
    exec(compile(text, "<documentation>", "exec"), names)
    seen: list[list[int]] = [[]]

    class Seeing(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(4, 1)

        def training_step(self, batch, batch_idx):
            seen[-1] += batch[1].tolist()
            return self.net(batch[0]).square().mean()

        def on_train_epoch_end(self):
            seen.append([])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    samples = torch.utils.data.TensorDataset(torch.randn(22, 4), torch.arange(22))
    loader = names["Batches"](samples, batch_size=4)
    assert [len(x) for x, _ in loader] == [4] * 5 + [2]
    trainer_of(max_epochs=3).fit(Seeing(), loader)
    epochs = seen[:3]
    assert [sorted(epoch) for epoch in epochs] == [list(range(22))] * 3
    assert epochs[0] != epochs[1] != list(range(22))


def recipe_of_a_restart() -> str:
    page = (ROOT / "docs" / "recipes" / "lightning.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    (program,) = [block for block in blocks if "faults = [33]" in block]
    return program.partition("assert attempt")[0]


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")  # of the first attempt
@pytest.mark.parametrize("asks", [False, True], ids=["", "estimated_stepping_batches"])
def test_the_recipes_restart_ends_bit_equal_to_the_run_without_the_fault(asks, capsys):
    program = recipe_of_a_restart()
    if asks:  # to size a schedule, before Lightning loads the position of a loader
        sized = "OneCycleLR(optimizer, 0.01, self.trainer.estimated_stepping_batches)"
        program = program.replace(
            "        return torch.optim.AdamW(self.parameters())\n",
            "        optimizer = torch.optim.AdamW(self.parameters())\n"
            f"        scheduler = torch.optim.lr_scheduler.{sized}\n"
            "        return [optimizer], [{'scheduler': scheduler, 'interval': 'step'}]\n",
        )
        assert sized in program
    states = []
    for faults in ("faults = [33]", "faults = []"):
        torch.manual_seed(0)
        names: dict[str, Any] = {"__name__": "example"}
        exec(compile(program.replace("faults = [33]", faults), "<documentation>", "exec"), names)
        trainer = names["trainer"]
        states.append(whole_state(trainer.lightning_module, trainer.optimizers[0]))
        assert names["attempt"] == (faults == "faults = [33]")
    assert "Training stopped: 8 step(s) in a row" in capsys.readouterr().out
    assert same_bits(*states)


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")  # of the first attempt
@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("fault", [3, 47], ids=["from the end of an epoch", "from within an epoch"])
def test_the_recipes_restart_goes_on_in_the_order_of_a_second_epoch(window, fault):
    # In windows of 4 there are 15 steps an epoch; with the checkpoint of step 15, 20...
    program = recipe_of_a_restart().replace("max_epochs=1", f"max_epochs=2, accumulate_grad_batches={window}")
    program = program.replace("if batch_idx in faults", "if self.current_epoch == 1 and batch_idx in faults")
    program = program.replace("every_n_train_steps=10", "every_n_train_steps=5")
    program = program.replace("max_skips_in_a_row=8", "max_skips_in_a_row=2")
    states = []
    for faults in (f"faults = [{fault}]", "faults = []"):
        torch.manual_seed(0)
        names: dict[str, Any] = {"__name__": "example"}
        exec(compile(program.replace("faults = [33]", faults), "<documentation>", "exec"), names)
        trainer = names["trainer"]
        states.append(whole_state(trainer.lightning_module, trainer.optimizers[0]))
        assert names["attempt"] == (faults != "faults = []")
        assert trainer.global_step == 120 / window
        assert all(count % window == 0 for count in batches_before(names["folder"]))
    assert same_bits(*states)


def batches_before(folder: Path) -> list[int]:
    """Return how many batches of an epoch each checkpoint of a folder has behind it."""
    saved = [torch.load(file, weights_only=False) for file in folder.glob("*.ckpt")]
    loops = [state["loops"]["fit_loop"]["epoch_loop.batch_progress"] for state in saved]
    return [progress["current"]["ready"] for progress in loops]
