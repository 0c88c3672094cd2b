"""The guard beside the settings of Lightning's Trainer, with several optimizers, and in Fabric."""

from __future__ import annotations

import contextlib

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision

import stablenum_torch
from benchmarks.partners.judge import same_bits
from benchmarks.partners.torch_parts import whole_state
from stablenum import ClipByGlobalNorm, ClipByValue
from stablenum.diagnosis import Cause
from stablenum_torch.integrations.lightning import GuardCallback
from tests.partners.lightning_modules import BAD, WARNINGS, data, fit, gan, module_of, trainer_of, without

pytestmark = WARNINGS


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


def explaining(
    module: pl.LightningModule, callback: GuardCallback, causes: list[Cause], context: bool
) -> None:
    """Let the module explain the steps that are skipped, as the recipe does."""

    def on_train_batch_end(outputs: object, batch: torch.Tensor, batch_idx: int) -> None:
        opt = callback.optimizers[0]
        if opt.step_was_skipped:
            lightnings = module.trainer.precision_plugin.train_step_context()
            with lightnings if context else contextlib.nullcontext():
                report = opt.explain(module.training_step, batch, batch_idx, model=module)
            causes.append(report.verdict.cause)

    module.on_train_batch_end = on_train_batch_end


@pytest.mark.parametrize(
    ("context", "cause"), [(True, Cause.LOW_PRECISION_OVERFLOW), (False, Cause.TRANSIENT)]
)
def test_a_skipped_step_is_explained_in_lightnings_own_precision(context, cause):
    batches, states, causes = data(), [], []
    batches[BAD] = batches[BAD] * 1e6  # beyond float16's range
    for explained in (True, False):
        callback, module = GuardCallback(loss_scale=64.0), module_of()
        if explained:
            explaining(module, callback, causes, context)
        states.append(fit(trainer_of(callback, plugins=MixedPrecision("16-mixed", "cpu")), module, batches))
    assert causes == [cause]
    assert same_bits(*states)


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
    assert "plugins=[MixedPrecision('16-mixed', 'cpu')]" in str(caught.value)
    assert "or train with" not in str(caught.value)


@pytest.mark.parametrize(
    ("precision", "remedy"),
    [
        ("32-true", "float32 needs none."),
        ("64-true", "float64 needs none."),
        ("bf16-true", "bfloat16 needs none."),
        ("16-true", "or train with plugins=[MixedPrecision('16-mixed', 'cpu')]"),
    ],
)
def test_a_loss_scale_that_does_not_fit_has_the_remedy_of_its_precision(precision, remedy):
    trainer, module = trainer_of(GuardCallback(loss_scale="dynamic"), precision=precision), module_of()
    module.optimizer = lambda params: torch.optim.AdamW(params, eps=1e-4)  # not 0 in float16
    with pytest.raises(ValueError, match=f"loss_scale must be None with precision='{precision}'") as caught:
        fit(trainer, module, data())
    assert remedy in str(caught.value)
    assert "bf16-mixed" not in str(caught.value)


def test_manual_optimization_scales_the_loss_in_float32_too():
    callback = GuardCallback(loss_scale=256.0)
    fit(trainer_of(callback, precision="32"), gan(guarded=True), data(bad=BAD))
    for optimizer in callback.optimizers:
        assert [row["applied"] for row in optimizer.history()] == [i != BAD for i in range(6)]
        assert optimizer.last["loss_scale"] == 256.0


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


def test_a_loss_scale_beside_that_of_the_trainer_names_the_callback():
    module, plugin = module_of(), MixedPrecision("16-mixed", "cpu")
    module.optimizer = lambda params: stablenum_torch.wrap(torch.optim.AdamW(params), loss_scale="dynamic")
    with pytest.raises(RuntimeError, match=r"without a GradScaler.*Trainer, add a GuardCallback"):
        fit(trainer_of(plugins=plugin), module, data())
    callback = GuardCallback()
    fit(trainer_of(callback, plugins=plugin), module, data())
    (opt,) = callback.optimizers
    assert opt.last["applied"]
    loss = module.net(data()[0]).square().mean()
    plugin.scaler.scale(opt.scale(loss)).backward()
    with pytest.raises(RuntimeError, match="without a GradScaler"):  # the training with the callback is over
        plugin.scaler.step(opt)


# --- several optimizers, Fabric ---------------------------------------------------------------------


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


def test_a_loss_scale_beside_that_of_fabric_stops_the_first_step():
    from lightning.fabric import Fabric
    from lightning.fabric.plugins import MixedPrecision as OfFabric

    fabric = Fabric(accelerator="cpu", devices=1, plugins=OfFabric("16-mixed", "cpu"))
    module = module_of().net
    opt = stablenum_torch.wrap(torch.optim.AdamW(module.parameters(), lr=0.1), loss_scale="dynamic")
    model, optimizer = fabric.setup(module, opt)
    fabric.backward(opt.scale(model(data()[0]).square().mean()))
    with pytest.raises(RuntimeError, match=r"without a GradScaler.*Fabric, make it without precision="):
        optimizer.step()
