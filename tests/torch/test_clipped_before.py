"""Other code that clips the gradients between the backward pass and the guard's step."""

from __future__ import annotations

import pytest
import torch

import stablenum_torch as st
from stablenum_torch._step.guard import on_device_path


def train(
    steps: int = 20, *, unscale: bool = False, clip=torch.nn.utils.clip_grad_norm_, compiled=False, **settings
):
    """Train a small model whose gradients other code clips to 1, and return the optimizer and how far the
    weights moved."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    before = model.weight.detach().clone()
    opt = st.wrap(torch.optim.SGD(model.parameters(), lr=0.01), names=model, **settings)
    step = torch.compile(opt.step, backend="aot_eager") if compiled else opt.step
    for _ in range(steps):
        opt.zero_grad()
        opt.backward((3 * model(torch.randn(8, 4)) - torch.randn(8, 3)).square().sum())
        if unscale:
            opt.unscale_()
        clip(model.parameters(), 1.0)
        step()
    return opt, (model.weight.detach() - before).abs().max().item()


def messages(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "stablenum"]


@pytest.mark.parametrize("scale", ["dynamic", 1024.0])
def test_clipping_of_scaled_gradients_is_logged(caplog, path, scale):
    opt, moved = train(loss_scale=scale)
    if path == "device":
        assert opt.last["applied"]  # the host waits here, and only here
    assert moved < 2e-4  # 20 steps of at most 0.01 x 1 / 1024
    (message,) = messages(caplog)
    assert f"multiplied by the loss scale {opt.loss_scale:g}" in message
    assert "opt.unscale_() first" in message


def test_the_remedies_work_and_are_not_logged(caplog):
    _, moved = train(loss_scale="dynamic", unscale=True)
    assert moved > 0.05
    _, moved = train(loss_scale="dynamic", clip=lambda *_: None)
    assert moved > 0.05
    assert not messages(caplog)


@pytest.mark.slow(reason="Dynamo traces a step")
@pytest.mark.filterwarnings("ignore")
def test_the_log_of_compiled_steps_comes_when_they_are_read(caplog):
    opt, _ = train(loss_scale="dynamic", compiled=True)
    assert not messages(caplog)
    assert opt.last["applied"]
    (message,) = messages(caplog)
    assert "multiplied by the loss scale 65536" in message


def test_a_run_of_skips_that_no_step_can_log_is_logged_when_it_is_read(caplog):
    w = torch.nn.Parameter(torch.ones(2))
    opt = st.wrap(torch.optim.SGD([w], lr=0.1), names={"w": w})
    with on_device_path():  # on an accelerator without copies in the background
        for _ in range(5):
            w.grad = torch.tensor([1.0, torch.nan])
            opt.step()
    assert not messages(caplog)
    assert not opt.last["applied"]
    (message,) = messages(caplog)
    assert message.startswith("5 steps in a row were skipped, up to step 4. First bad parameter: w ")


HIDING = {
    "norm": (torch.nn.utils.clip_grad_norm_, True),
    "value": (torch.nn.utils.clip_grad_value_, False),
}


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("name", HIDING)
def test_clipping_by_norm_hides_nothing_and_by_value_an_inf(name, bad):
    clip, is_seen = HIDING[name]
    w = torch.nn.Parameter(torch.ones(2))
    opt = st.wrap(torch.optim.SGD([w], lr=0.1))
    w.grad = torch.tensor([1.0, bad])
    clip([w], 1.0)
    opt.step()
    assert opt.last["applied"] is not (is_seen or bad != torch.inf)


@pytest.mark.parametrize("scale", ["dynamic", 1024.0])
@pytest.mark.parametrize("bound", [1.0, 0.1])
def test_clipping_of_scaled_gradients_by_value_is_logged(caplog, scale, bound):
    clip = torch.nn.utils.clip_grad_value_
    opt, moved = train(loss_scale=scale, clip=lambda params, _: clip(params, bound))
    assert moved < 2e-4
    (message,) = messages(caplog)
    assert f"elements of the gradients came to the guard with the size {bound:g}, and none" in message
    assert f"multiplied by the loss scale {opt.loss_scale:g}. " in message
    assert f"clip=ClipByValue({bound:g}); or call opt.unscale_() first." in message


def test_clipping_by_value_after_unscale_is_not_logged(caplog):
    _, moved = train(loss_scale="dynamic", unscale=True, clip=torch.nn.utils.clip_grad_value_)
    assert moved > 0.05
    assert not messages(caplog)


def _halved(params, _):
    for p in params:
        p.grad /= 2


def _masked(params, _):
    for p in params:
        p.grad[:1] = 0


def _replaced(params, _):
    for p in params:
        p.grad = p.grad.clone()


@pytest.mark.parametrize("change", [_halved, _masked, _replaced])
def test_changes_that_suit_scaled_gradients_are_not_logged(caplog, change):
    train(loss_scale=1024.0, clip=change, steps=40)
    assert not messages(caplog)


@pytest.mark.parametrize(
    "loss", [lambda w: w.sum() / 1024, lambda w: (w - 0.5).abs().mean(), lambda w: 0 * w.sum()]
)
def test_gradients_of_equal_elements_are_not_logged(caplog, loss):
    w = torch.nn.Parameter(torch.linspace(0, 1, 1024))
    opt = st.wrap(torch.optim.SGD([w], lr=1.0), loss_scale=1024.0)
    for _ in range(40):
        opt.zero_grad()
        opt.backward(loss(w))
        opt.step()
    assert not messages(caplog)


def test_few_steps_are_looked_at_closely(monkeypatch):
    seen = []
    kept = "stablenum_torch._step.guard.largest_elements"
    monkeypatch.setattr(kept, lambda params, device: seen.append(len(params)) or torch.zeros(2).double())
    train(400, loss_scale=1024.0, clip=torch.nn.utils.clip_grad_norm_)
    assert len(seen) == 3  # in steps 3, 30 and 300
