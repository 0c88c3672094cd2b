"""``range_report`` in PyTorch: what it measures, and that it changes nothing."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import stablenum_torch
from stablenum_torch import range_report
from tests.parity.range_models import batch, torch_loss, torch_net


def rows(report):
    return {(row.kind, row.module): row for row in report.rows}


def bits(tensor):
    return None if tensor is None else tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


def everything(model, optimizer=None):
    """Every bit, and every hook, that could have changed."""
    found = {
        name: (id(t), t.dtype, bits(t), bits(t.grad))
        for name, t in [*model.named_parameters(), *model.named_buffers()]
    }
    found["hooks"] = [
        (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks), len(m._buffers))
        for m in model.modules()
    ]
    found["training"] = [m.training for m in model.modules()]
    found["random"] = (bits(torch.get_rng_state()), random.getstate(), np.random.get_state()[1].tobytes())
    found["tensor hooks"] = [len(p._backward_hooks or {}) for p in model.parameters()]
    if optimizer is not None:
        found["state"] = [
            {key: bits(v) if isinstance(v, torch.Tensor) else v for key, v in state.items()}
            for state in optimizer.state.values()
        ]
        found["groups"] = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return found


class Busy(nn.Module):
    """Writes to buffers in both ways, draws random numbers, ties a weight; raises on request."""

    def __init__(self, raises=False):
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)
        self.last = nn.Linear(6, 6)
        self.last.weight = self.first.weight
        self.register_buffer("calls", torch.zeros(()))
        self.raises = raises

    def forward(self, x):
        self.calls = self.calls + 1
        random.random(), np.random.random()
        h = self.drop(self.norm(self.first(x)))
        if self.raises:
            raise RuntimeError("planted")
        return self.last(h).square().mean()


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("trained", [False, True])
def test_everything_is_left_as_it_was(raises, dtype, trained):
    torch.manual_seed(0)
    model, x = Busy().to(dtype), torch.randn(8, 6, dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    if trained:
        model(x).backward()
        optimizer.step()
        schedule.step()
    model.raises = raises
    before, input_before = everything(model, optimizer), bits(x)
    if raises:
        with pytest.raises(RuntimeError, match="planted"):
            range_report(model, x, optimizer=optimizer)
    else:
        report = range_report(model, x, optimizer=optimizer)
        assert {row.kind for row in report.rows} >= {"activation", "gradient", "update"}
    assert everything(model, optimizer) == before
    assert bits(x) == input_before


@pytest.mark.parametrize("register", ["register_buffer", "register_parameter"])
def test_what_the_forward_pass_registers_does_not_stay(register):
    """Otherwise a checkpoint would have an entry that depends on whether a report was made."""

    class Model(nn.Linear):
        def forward(self, x):
            if not hasattr(self, "mask"):
                getattr(self, register)("mask", nn.Parameter(torch.ones_like(x)))
            return super().forward(x * self.mask).mean()

    model = Model(3, 2).bfloat16()
    range_report(model, torch.ones(4, 3, dtype=torch.bfloat16))
    assert list(model.state_dict()) == ["weight", "bias"]
    assert model(torch.ones(4, 3, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_a_graph_built_before_the_report_can_still_be_differentiated():
    model = Busy().eval()
    loss = model(torch.ones(2, 6))
    range_report(model, torch.ones(2, 6))
    loss.backward()
    assert model.first.weight.grad is not None


def test_the_update_is_that_of_the_optimizer():
    net = torch_net()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        torch_loss(net, batch()).backward()
        optimizer.step()
    optimizer.zero_grad()
    found = rows(range_report(net, batch(), loss_fn=torch_loss, optimizer=optimizer))
    before = net.head.weight.detach().clone(), net.head.bias.detach().clone()
    torch_loss(net, batch()).backward()
    optimizer.step()
    moved = torch.cat([(net.head.weight - before[0]).reshape(-1), net.head.bias - before[1]]).abs()
    assert found["update", "head"].amax == moved.max().item()
    assert found["gradient", "head"].amax == max(
        net.head.weight.grad.abs().max(), net.head.bias.grad.abs().max()
    )


@pytest.mark.parametrize("clip", [None, 1e-6])
def test_the_update_of_a_guarded_optimizer_is_the_inner_ones(clip):
    net = torch_net()
    plain = torch.optim.SGD(net.parameters(), lr=0.1)
    guarded = stablenum_torch.wrap(torch.optim.SGD(net.parameters(), lr=0.1), loss_scale="dynamic", clip=clip)
    reports = [range_report(net, batch(), loss_fn=torch_loss, optimizer=o) for o in (plain, guarded)]
    assert rows(reports[0]) == rows(reports[1])
    assert reports[1].notes == ("The update is that of the inner optimizer, without clipping.",)


def test_lost_updates_are_those_of_bfloat16_training():
    net = torch_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    found = rows(range_report(net, batch(), loss_fn=torch_loss, optimizer=optimizer))["update", "first"]
    w, b = net.first.weight, net.first.bias
    grads = torch.autograd.grad(torch_loss(net, batch()), [w, b])
    lost = 0
    for p, g in zip((w, b), grads):
        p, after = p.detach(), p.detach() - 1e-2 * g
        dw = after - p
        narrow = p.bfloat16()
        lost += int(((narrow + dw.bfloat16() == narrow) & (dw != 0)).sum())
    assert found.lost["bfloat16"] == lost
    assert 0 < lost < found.elements


def test_gradients_are_those_of_the_output_before_it_is_changed_in_place():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 1))
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    found = rows(range_report(model, x, loss_fn=lambda m, x: m(x).mean()))
    plain = model[0](x).detach().requires_grad_()
    model[2](plain.relu()).mean().backward()
    assert found["activation", "0"].amax == plain.abs().max().item()
    assert found["activation gradient", "0"].amax == pytest.approx(plain.grad.abs().max().item())
    assert found["activation gradient", "0"].zeros == int((plain.grad == 0).sum())


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_part_is_counted_once(reentrant):
    class Model(nn.Module):
        def __init__(self, remat):
            super().__init__()
            self.a, self.b, self.remat = nn.Linear(4, 4), nn.Linear(4, 4), remat

        def forward(self, x):
            h = self.a(x)
            h = checkpoint(self.b, h, use_reentrant=reentrant) if self.remat else self.b(h)
            return h.square().mean()

    torch.manual_seed(0)
    plain, remat, x = Model(False), Model(True), torch.randn(3, 4)
    remat.load_state_dict(plain.state_dict())
    if reentrant:  # it does not support torch.autograd.grad
        with pytest.raises(RuntimeError, match=r"use_reentrant"):
            range_report(remat, x)
    else:
        assert rows(range_report(remat, x)) == rows(range_report(plain, x))


def test_a_module_that_runs_twice_is_counted_twice():
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.Tanh(), layer)
    found = rows(range_report(model, torch.randn(5, 4), loss_fn=lambda m, x: m(x).sum()))
    assert found["activation", "0"].elements == 2 * 20
    assert found["weight", "0"].elements == 20


def test_a_recurrent_network_sees_its_float32_weights():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(3, 4)

        def forward(self, x):
            return self.rnn(x)[0].square().mean()

    model, x = Model().bfloat16(), torch.randn(5, 2, 3).bfloat16()
    before = everything(model)
    found = rows(range_report(model, x))
    assert found["activation", "rnn"].elements == 5 * 2 * 4 + 2 * 2 * 4
    assert found["gradient", "rnn"].amax > 0
    assert everything(model) == before
    assert model.rnn(x)[0].dtype == torch.bfloat16


def test_batches_are_spread_over_the_arguments():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(2, 2)

        def forward(self, x, y):
            return {"loss": self.lin(x).sum() + y.sum(), "logits": x}

    model, x, y = Model(), torch.ones(3, 2), torch.ones(2, dtype=torch.float16)
    by_place, by_name = range_report(model, (x, y)), range_report(model, {"y": y, "x": x})
    assert rows(by_place) == rows(by_name)
    assert rows(by_place)["gradient", "lin"].elements == 6


def test_without_a_loss_the_forward_pass_is_measured():
    report = range_report(nn.Linear(2, 2), torch.ones(3, 2))
    assert {row.kind for row in report.rows} == {"activation", "weight"}
    assert report.notes == ("No gradients: the model returns no scalar loss, and no loss_fn was given.",)
    frozen = nn.Linear(2, 1).requires_grad_(False)
    report = range_report(frozen, torch.ones(1, 2))
    assert report.notes == ("No gradients: the loss depends on no parameter that requires a gradient.",)


def test_values_that_are_nan_in_float32_are_reported_for_every_format() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    with torch.no_grad():
        model[0].weight.fill_(torch.nan)
    report = range_report(model, torch.ones(1, 2))
    for verdict in report.verdicts.values():
        assert not verdict.works
        assert "already hold NaN in float32" in verdict.sentence
    masked = range_report(nn.Sequential(nn.Softmax(-1)), torch.tensor([[0.0, -torch.inf]]))
    assert "NaN" not in masked.verdict


def test_unused_parameters_and_a_loss_that_is_not_finite_are_noted():
    model = nn.ModuleDict({"used": nn.Linear(2, 1), "idle": nn.Linear(2, 1)})
    report = range_report(model, torch.ones(1, 2), loss_fn=lambda m, x: m["used"](x).sum() * float("inf"))
    assert report.notes == (
        "The loss is not finite in float32.",
        "No gradient reaches idle.weight, idle.bias.",
    )
    assert rows(report)["gradient", "used"].inf == 3


def test_a_surrounding_autocast_changes_nothing():
    net = torch_net()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        inside = range_report(net, batch(), loss_fn=torch_loss)
    assert rows(inside) == rows(range_report(net, batch(), loss_fn=torch_loss))


def test_a_loss_that_is_not_a_scalar_raises():
    model, x = nn.Linear(2, 2), torch.ones(3, 2)
    wanted = r"loss_fn must be a function that returns a tensor with one element; got "
    for loss_fn, got in (
        (lambda m, x: m(x), r"\(3, 2\)"),
        (lambda m, x: 2.5, "2.5"),
        (lambda m, x: None, "None"),
    ):
        with pytest.raises(ValueError, match=wanted + got):
            range_report(model, x, loss_fn=loss_fn)
    with pytest.raises(ValueError, match="model must be initialised; parameter 'weight' is still lazy"):
        range_report(nn.LazyLinear(2), torch.ones(3, 2))


@pytest.mark.gpu
def test_a_report_on_a_gpu_matches_one_on_a_cpu():
    on_cpu = rows(range_report(torch_net(), batch(), loss_fn=torch_loss))

    def loss(net, xy):
        logits = net(torch.as_tensor(xy[0], device="cuda"))
        return nn.functional.cross_entropy(logits, torch.as_tensor(xy[1], device="cuda"))

    net = torch_net().cuda()
    state = torch.cuda.get_rng_state()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
    report = range_report(net, batch(), loss_fn=loss, optimizer=optimizer)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    for key, row in on_cpu.items():
        other = rows(report)[key]
        assert row.elements == other.elements
        assert row.amax == pytest.approx(other.amax, rel=1e-2)
        assert abs(row.flushed("float16") - other.flushed("float16")) <= max(2, 0.01 * row.elements)
