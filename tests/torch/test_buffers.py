"""What a skipped step does to the buffers of a model."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch

import stablenum_torch as st


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)]
    return torch.nn.Sequential(*layers)


def batch(step: int, bad: bool) -> torch.Tensor:
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
    return x * math.nan if bad else x


def train(net, opt, steps, *, bad=(), micro_batches=1) -> None:
    for step in steps:
        opt.zero_grad()
        for part in range(micro_batches):
            opt.backward(net(batch(step * micro_batches + part, step in bad)).square().mean())
        opt.step()


def bits(net: torch.nn.Module) -> dict[str, bytes]:
    return {name: t.numpy().tobytes() for name, t in net.state_dict().items()}


def guarded(net: torch.nn.Module, **settings) -> torch.optim.Optimizer:
    return st.wrap(torch.optim.AdamW(net.parameters(), lr=0.1, fused=True), **settings)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_run_with_bad_batches_ends_bit_equal_to_the_run_without_them(path, micro_batches):
    nets = [model(), model()]
    train(nets[0], guarded(nets[0], buffers=nets[0]), range(6), bad={0, 3}, micro_batches=micro_batches)
    train(nets[1], guarded(nets[1]), [1, 2, 4, 5], micro_batches=micro_batches)
    assert bits(nets[0]) == bits(nets[1])


class Trainee(torch.nn.Module):
    """A model whose training calls its parts, as Lightning's modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


CALLS = {
    "the whole": lambda whole, x: whole(x),
    "the whole's forward": lambda whole, x: whole.forward(x),
    "a part": lambda whole, x: whole.net(x),
    "layer by layer": lambda whole, x: whole.net[2](whole.net[1](whole.net[0](x))),
}


@pytest.mark.parametrize("call", CALLS)
def test_buffers_are_kept_however_the_model_is_called(path, call):
    whole = Trainee()
    opt = guarded(whole, buffers=whole)
    seen = []
    for step in range(4):
        opt.zero_grad()
        opt.backward(CALLS[call](whole, batch(step, step in (1, 2))).square().mean())
        opt.step()
        seen.append(whole.net[1].running_mean.tolist())
    assert seen[0] == seen[1] == seen[2] != seen[3]


def test_without_the_argument_the_statistics_are_nan_for_good(path):
    """The trap: every parameter is finite, and the model is unusable in evaluation."""
    net = model()
    train(net, guarded(net), range(3), bad={1})
    assert all(p.isfinite().all() for p in net.parameters())
    assert net[1].running_mean.isnan().all()


def test_what_a_checkpoint_loads_after_wrapping_is_kept(path):
    net = model()
    opt = guarded(net, buffers=net)
    train(net, opt, range(2))
    saved = {name: torch.full_like(t, 7) for name, t in net.state_dict().items() if "running" in name}
    net.load_state_dict(saved, strict=False)
    train(net, opt, [2], bad={2})
    assert net[1].running_mean.tolist() == [7.0] * 4


def test_a_forward_pass_for_evaluation_is_no_part_of_a_step(path):
    net = model()
    opt = guarded(net, buffers=net)
    train(net, opt, range(2))
    net.eval()
    net(batch(9, False))
    net.train()
    net[1].momentum = 0.0
    net[1].running_mean.fill_(5.0)
    train(net, opt, [2], bad={2})
    assert net[1].running_mean.tolist() == [5.0] * 4


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_keeps_its_own_buffers(copied):
    net = model()
    opt = guarded(net, buffers=net)
    train(net, opt, range(2))
    before = bits(net)
    twin, twin_opt = copied((net, opt))
    train(twin, twin_opt, [2], bad={2})
    assert bits(twin) == bits(net) == before


def test_buffers_must_be_a_module():
    net = model()
    with pytest.raises(TypeError, match=r"buffers must be a torch\.nn\.Module; got list"):
        guarded(net, buffers=list(net.buffers()))


def test_two_optimizers_of_one_model_keep_its_buffers_in_turn():
    nets = [torch.nn.ModuleDict({"left": model(), "right": model()}) for _ in range(2)]
    for net, bad in zip(nets, ({(2, "right")}, ()), strict=True):
        opts = {side: guarded(part, buffers=net) for side, part in net.items()}
        for step, side in ((step, side) for step in range(4) for side in net):
            if net is nets[1] and (step, side) == (2, "right"):
                continue
            opts[side].zero_grad()
            opts[side].backward(net[side](batch(step, (step, side) in bad)).square().mean())
            opts[side].step()
    assert bits(nets[0]) == bits(nets[1])


@pytest.mark.parametrize("bad", [{"left"}, {"right"}, {"left", "right"}, set()])
def test_two_optimizers_that_step_after_the_same_forward_pass(path, bad):
    net = torch.nn.ModuleDict({"left": model(), "right": model()})
    opts = {side: guarded(part, buffers=net) for side, part in net.items()}
    for step in range(3):
        before = {name: kept.clone() for name, kept in net.named_buffers()}
        losses = {s: net[s](batch(step, step == 1 and s in bad)).square().mean() for s in net}
        for side, opt in opts.items():
            opt.zero_grad()
            opt.backward(losses[side])
        for opt in opts.values():
            opt.step()
        stay = step == 1 and bool(bad)
        assert all(torch.equal(kept, before[name]) == stay for name, kept in net.named_buffers())
    assert [opt.last["skipped_total"] for opt in opts.values()] == [bool(bad)] * 2


def test_a_step_without_a_forward_pass_restores_nothing_of_an_earlier_step(path):
    net = model()
    opt = guarded(net, buffers=net)
    train(net, opt, range(2))
    before = bits(net)
    for p in net.parameters():
        p.grad = torch.full_like(p, math.nan)
    opt.step()
    assert opt.step_was_skipped
    assert bits(net) == before


def test_a_model_that_is_guarded_again_keeps_nothing_of_the_training_before():
    net = model()
    for _ in range(2):
        opt = guarded(net, buffers=net)
        train(net, opt, range(2))
        net(batch(9, bad=False))  # in training mode, but without a step
    assert len(net._forward_pre_hooks) == 1
    before = bits(net)
    opt = guarded(net, buffers=net)
    train(net, opt, [3], bad={3})
    assert bits(net) == before


def test_trap_a_variance_beyond_float32_leaves_loss_and_gradients_finite(path):
    net, opts = model(), []
    opts.append(guarded(net, buffers=net))
    train(net, opts[0], range(2))
    before = bits(net)
    x = batch(2, bad=False)
    x[0] *= 1e25  # torch computes the variance in float64: only the running one is not finite
    opts[0].zero_grad()
    loss = net(x).square().mean()
    assert loss.isfinite()
    opts[0].backward(loss)
    opts[0].step()
    assert opts[0].last["reason"].name == "FOUND_INF"
    assert bits(net) == before


def test_trap_a_micro_batch_that_is_dropped_by_hand_leaves_nothing_in_the_statistics(path):
    net = model()
    opt = guarded(net, buffers=net)
    train(net, opt, range(2))
    before = bits(net)
    opt.zero_grad()
    for part in range(3):
        loss = net(batch(part, part == 1)).square().mean()
        if loss.isfinite():
            opt.backward(loss)
    opt.step()
    assert opt.last["reason"].name == "FOUND_INF"
    assert bits(net) == before


def test_trap_a_batch_that_is_dropped_without_a_step_costs_the_next_step_but_not_the_statistics(path):
    net = model()
    opt = guarded(net, buffers=net)
    train(net, opt, range(2))
    net(batch(2, bad=True))  # and on to the next batch
    train(net, opt, [3])
    assert opt.step_was_skipped
    train(net, opt, [4])
    assert not opt.step_was_skipped
    assert all(buffer.isfinite().all() for buffer in net.buffers())


def test_a_buffer_that_never_was_finite_and_numbers_without_a_fraction_are_no_reason_to_skip(path):
    net = model()
    net.register_buffer("mask", torch.tensor([0.0, -math.inf]))
    net.register_buffer("count", torch.tensor(3))
    net.register_buffer("nothing", torch.zeros(0))
    opt = guarded(net, buffers=net)
    train(net, opt, range(2))
    assert opt.last["applied"]


@pytest.mark.parametrize("second", ["left", "right"])
def test_every_optimizer_of_a_forward_pass_skips_if_it_made_a_buffer_infinite(path, second):
    net = torch.nn.ModuleDict({"left": model(), "right": model()})
    opts = {side: guarded(part, buffers=net) for side, part in net.items()}
    before = bits(net)
    x = batch(0, bad=False)
    x[0] *= 1e25
    for side, opt in opts.items():
        opt.backward(net[side](x if side == second else batch(0, bad=False)).square().mean())
    for opt in opts.values():
        opt.step()
    assert all(opt.step_was_skipped for opt in opts.values())
    assert bits(net) == before


def test_trap_a_skip_of_the_discriminator_leaves_the_graph_of_the_generator_usable(path):
    torch.manual_seed(0)
    nets = torch.nn.ModuleDict({"made": torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))})
    nets["judge"] = torch.nn.Linear(3, 1)
    opts = {name: guarded(net, buffers=nets) for name, net in nets.items()}
    for step in range(3):
        fake = nets["made"](torch.ones(4, 2).cumsum(0))
        real = batch(step, bad=step == 1)
        opts["judge"].zero_grad()
        opts["judge"].backward((nets["judge"](fake.detach()) - nets["judge"](real[:4])).square().mean())
        opts["judge"].step()
        opts["made"].zero_grad()
        opts["made"].backward(nets["judge"](fake).square().mean())
        opts["made"].step()
    assert opts["judge"].last["skipped_total"] == 1
    assert opts["made"].last["skipped_total"] == 0


def test_a_model_may_hold_buffers_of_eight_bits(path):
    net = model()
    net.register_buffer("scale", torch.ones(3).to(torch.float8_e4m3fn))
    opt = guarded(net, buffers=net)
    train(net, opt, range(3), bad={1})
    assert [row["applied"] for row in opt.history()] == [True, False, True]
    net.scale.fill_(0)
    output = net(batch(5, bad=False))
    net.scale.copy_(torch.full((3,), math.nan))
    opt.zero_grad()
    opt.backward(output.square().mean())
    opt.step()
    assert not opt.history()[-1]["applied"]
    assert net.scale.float().eq(0).all()
