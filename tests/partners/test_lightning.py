"""The guard in Lightning: automatic and manual optimization, precision, clipping, logs, checkpoints."""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np
import pytest
import torch

import stablenum_torch
from benchmarks.partners import torchvision_on_cpu
from benchmarks.partners.judge import judge, same_bits
from benchmarks.partners.outcome import Fault
from benchmarks.partners.torch_parts import whole_state
from benchmarks.partners.torch_trainers import LOOPS
from stablenum import ClipByGlobalNorm, ClipByValue

torchvision_on_cpu.allow()
pl = pytest.importorskip("lightning.pytorch")
from lightning.pytorch.plugins import MixedPrecision  # noqa: E402

from stablenum_torch.integrations.lightning import GuardCallback  # noqa: E402

pytestmark = [
    # Lightning recommends worker processes and saved hyperparameters, and its dependencies use what torch has
    # deprecated.
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:The '.*dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:DeprecationWarning"),
]

BAD = 3


@pytest.fixture(autouse=True)
def _quiet():
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)


def data(count: int = 6, bad: int | None = None) -> list[torch.Tensor]:
    made = [torch.randn(8, 3, generator=torch.Generator().manual_seed(i)) for i in range(count)]
    if bad is not None:
        made[bad] = made[bad] * math.nan
    return made


def module_of(package: Any = pl) -> Any:
    """A small module whose ``training_step`` calls parts of it."""

    class Small(package.LightningModule):
        optimizer = staticmethod(lambda params: torch.optim.AdamW(params, lr=0.1))
        interval = "step"
        frequency = 1

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            parts = torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)
            self.net = torch.nn.Sequential(*parts)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> Any:
            optimizer = self.optimizer(self.parameters())
            self.scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            made = {"scheduler": self.scheduler, "interval": self.interval, "frequency": self.frequency}
            return {"optimizer": optimizer, "lr_scheduler": made}

    return Small()


def trainer_of(*callbacks: Any, package: Any = pl, **settings: Any) -> Any:
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    usual = {"accelerator": "cpu", "max_epochs": 1, "logger": False, "log_every_n_steps": 1}
    return package.Trainer(callbacks=list(callbacks), **(usual | quiet | settings))


def fit(trainer: Any, module: Any, batches: list[torch.Tensor], **settings: Any) -> dict[str, np.ndarray]:
    trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None), **settings)
    return whole_state(module, trainer.optimizers[0])


def without(batches: list[torch.Tensor], *indices: int) -> list[torch.Tensor]:
    return [batch for i, batch in enumerate(batches) if i not in indices]


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


# --- the Trainer's settings -------------------------------------------------------------------------


def test_the_package_pytorch_lightning_takes_the_same_callback():
    other = pytest.importorskip("pytorch_lightning")
    states = []
    for batches in (data(bad=BAD), without(data(), BAD)):
        trainer = trainer_of(GuardCallback(), package=other)
        states.append(fit(trainer, module_of(other), batches))
    assert same_bits(*states)


@pytest.mark.parametrize(
    ("settings", "left_out"),
    [({"accumulate_grad_batches": 2}, (2, 3)), ({"precision": "bf16-mixed"}, (BAD,))],
    ids=["accumulation", "bf16-mixed"],
)
def test_accumulation_and_bfloat16(settings, left_out):
    states = [
        fit(trainer_of(GuardCallback(), **settings), module_of(), batches)
        for batches in (data(bad=BAD), without(data(), *left_out))
    ]
    assert same_bits(*states)


def test_the_micro_batches_losses_make_the_recorded_loss():
    callback, alone = GuardCallback(), module_of()
    fit(trainer_of(callback, accumulate_grad_batches=2), module_of(), data(2))
    expected = sum(alone.net(batch).square().mean() for batch in data(2)) / 2
    assert callback.optimizers[0].last["loss"] == pytest.approx(expected.item(), rel=1e-6)


def test_float16_on_a_cpu_scales_by_the_guards_scale_and_shows_hooks_unscaled_gradients():
    callback, module, norms = GuardCallback(loss_scale=1024.0), module_of(), []
    module.on_before_optimizer_step = lambda optimizer: norms.append(module.net[2].bias.grad.norm().item())
    plugin = MixedPrecision("16-mixed", "cpu")
    scaler = plugin.scaler
    fit(trainer_of(callback, plugins=plugin), module, data(2))
    last = callback.optimizers[0].last
    assert last["applied"]
    assert last["loss_scale"] == 1024.0
    assert 0 < norms[0] <= callback.optimizers[0].history()[0]["grad_norm"] < 100
    assert plugin.scaler is scaler


def test_a_loss_scale_and_the_precision_have_to_fit():
    with pytest.raises(ValueError, match=r"needs a loss scale.*GuardCallback\(loss_scale='dynamic'\)"):
        fit(trainer_of(GuardCallback(), plugins=MixedPrecision("16-mixed", "cpu")), module_of(), data())
    with pytest.raises(ValueError, match="loss_scale must be None with precision='32-true'"):
        fit(trainer_of(GuardCallback(loss_scale="dynamic")), module_of(), data())


@pytest.mark.filterwarnings(
    "ignore:You passed .Trainer.accelerator='cpu', precision='16-mixed'"
)  # Lightning's
def test_a_loss_scale_for_16_mixed_on_a_cpu_says_that_lightning_trains_in_bfloat16():
    trainer = trainer_of(GuardCallback(loss_scale="dynamic"), precision="16-mixed")
    with pytest.raises(ValueError, match=r"precision='bf16-mixed'.*on a CPU.*'16-mixed'") as caught:
        fit(trainer, module_of(), data())
    assert "or train with precision='16-mixed'" not in str(caught.value)


def test_a_second_callback_is_named_and_nothing_is_changed():
    module, trainer = module_of(), trainer_of(GuardCallback(), GuardCallback(clip=1.0, prefix="g/"))
    with pytest.raises(ValueError, match=r"GuardCallback.*got two.*prefixes 'guard/' and 'g/'"):
        fit(trainer, module, data())
    assert not isinstance(trainer.optimizers[0], stablenum_torch.GuardedOptimizer)


@pytest.mark.parametrize(
    ("algorithm", "rule"),
    [(None, ClipByGlobalNorm(0.1)), ("norm", ClipByGlobalNorm(0.1)), ("value", ClipByValue(0.1))],
)
def test_the_trainers_clipping_becomes_the_guards(algorithm, rule):
    clipping = {"gradient_clip_val": 0.1, "gradient_clip_algorithm": algorithm}
    callback = GuardCallback()
    trainer = trainer_of(callback, **clipping)
    modules = module_of(), module_of()
    for module in modules:  # Adam would magnify the gradients that are 0 but for rounding
        module.optimizer = lambda params: torch.optim.SGD(params, lr=0.1)
    guarded = fit(trainer, modules[0], data())
    assert callback.optimizers[0].config.clip == (rule,)
    assert callback.optimizers[0].history()[0]["grad_norm"] > 0.1  # measured before clipping
    assert trainer.gradient_clip_val == 0.1
    alone = fit(trainer_of(**clipping), modules[1], data())
    assert all(np.allclose(guarded[name], alone[name], rtol=1e-4, atol=1e-6) for name in alone)


def test_trap_the_trainer_alone_clips_a_nan_into_every_weight():
    state = fit(trainer_of(gradient_clip_val=0.1), module_of(), data(bad=BAD))
    assert np.isnan(state["model/net.0.weight"]).all()


def test_only_one_place_may_clip():
    with pytest.raises(ValueError, match="gradient_clip_val of the Trainer must be None if the guard clips"):
        fit(trainer_of(GuardCallback(clip=1.0), gradient_clip_val=0.1), module_of(), data())


@pytest.mark.parametrize("outside", [{}, {"gradient_clip_val": 1.0}])
def test_an_optimizer_that_is_guarded_already_keeps_its_settings(outside):
    module = module_of()
    module.optimizer = lambda params: stablenum_torch.wrap(
        torch.optim.AdamW(params), clip=0.5, buffers=module
    )
    callback = GuardCallback()
    if outside:
        with pytest.raises(ValueError, match="the Trainer no gradient_clip_val"):
            fit(trainer_of(callback, **outside), module, data())
        return
    fit(trainer_of(callback), module, data(bad=BAD))
    assert callback.optimizers[0].config.clip == (ClipByGlobalNorm(0.5),)
    assert callback.optimizers[0].last["skipped_total"] == 1
    with pytest.raises(ValueError, match="GuardCallback must have no settings"):
        fit(trainer_of(GuardCallback(clip=1.0)), module, data())


# --- schedulers, logs, checkpoints ------------------------------------------------------------------


def test_a_scheduler_stands_still_at_a_skipped_step_unless_it_counts_epochs():
    for interval, steps in (("step", 5), ("epoch", 1)):
        module = module_of()
        module.interval = interval
        fit(trainer_of(GuardCallback()), module, data(bad=BAD))
        assert module.scheduler.last_epoch == steps


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


# --- several optimizers, Fabric ---------------------------------------------------------------------


def gan(guarded: bool) -> Any:
    class Gan(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.automatic_optimization = False
            self.generator = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
            self.judge = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            for i, opt in enumerate(self.optimizers()):
                loss = self.judge(self.generator(batch)).square().mean() * (1 if i else -1)
                opt.zero_grad()
                self.manual_backward(opt.scale(loss) if guarded else loss)
                opt.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.Adam(part.parameters()) for part in (self.generator, self.judge)]

    return Gan()


def test_two_optimizers_in_manual_optimization(tmp_path):
    states = []
    for batches in (data(bad=BAD), without(data(), BAD)):
        callback, module = GuardCallback(), gan(guarded=True)
        logger = pl.loggers.CSVLogger(tmp_path, name="", version=str(len(states)))
        trainer = trainer_of(callback, logger=logger)
        fit(trainer, module, batches)
        states.append(whole_state(module, trainer.optimizers[0]) | whole_state(module, trainer.optimizers[1]))
    assert same_bits(*states)
    header = (tmp_path / "0" / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {"guard/0/skipped_total", "guard/1/skipped_total"} <= set(header)


def test_trap_two_optimizers_alone_are_both_poisoned():
    module = gan(guarded=False)
    fit(trainer_of(), module, data(bad=BAD))
    assert all(value.isnan().any() for value in module.parameters())


def test_manual_optimization_in_float16_scales_each_loss_by_its_own_optimizer():
    callback = GuardCallback(loss_scale=256.0)
    fit(trainer_of(callback, plugins=MixedPrecision("16-mixed", "cpu")), gan(guarded=True), data(bad=BAD))
    for optimizer in callback.optimizers:
        assert [row["applied"] for row in optimizer.history()] == [i != BAD for i in range(6)]
    forgotten = GuardCallback(loss_scale=256.0)
    with pytest.raises(RuntimeError, match=r"call opt.backward\(loss\) first"):
        fit(trainer_of(forgotten, plugins=MixedPrecision("16-mixed", "cpu")), gan(guarded=False), data())


def test_fabric_takes_a_guarded_optimizer():
    from lightning.fabric import Fabric

    states = []
    for batches in (data(bad=BAD), without(data(), BAD)):
        fabric = Fabric(accelerator="cpu", devices=1)
        module = module_of().net
        opt = stablenum_torch.wrap(torch.optim.AdamW(module.parameters(), lr=0.1), clip=1.0, buffers=module)
        model, opt = fabric.setup(module, opt)
        for batch in batches:
            opt.zero_grad()
            fabric.backward(opt.scale(model(batch).square().mean()))
            opt.step()
        states.append(whole_state(module, opt.optimizer))
    assert same_bits(*states)
    assert opt.last["applied"]
