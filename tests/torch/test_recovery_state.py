"""What is captured and put back: in place, in its own format, whatever shares its memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stablenum_torch as st
from stablenum_torch._devices.host_copies import HostCopies
from stablenum_torch._recovery.optimizers import OptimizerPart
from stablenum_torch._recovery.state import Captured, RunState
from tests.torch.recovering import KINDS, Training, adam, loader, same, whole_state


def steps(model: nn.Module, opt: Any, count: int = 2) -> None:
    for i in range(count):
        opt.zero_grad()
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(i))
        opt.backward(model(x).square().mean())
        opt.step()


def guarded(model: nn.Module, **options: Any) -> st.GuardedOptimizer:
    return st.wrap(torch.optim.AdamW(model.parameters(), **options), names=model)


def test_parameters_that_share_memory_still_do() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight  # one parameter
    model[1].bias = nn.Parameter(model[0].bias.data)  # two of one memory
    opt = guarded(model)
    state = RunState(model, opt, {})
    captured, before = state.capture(), {k: v.clone() for k, v in model.state_dict().items()}
    steps(model, opt)
    state.restore(captured)
    assert same(dict(model.state_dict()), before)
    assert model[1].weight is model[0].weight
    assert model[1].bias.data_ptr() == model[0].bias.data_ptr()


def test_the_state_of_an_optimizer_keeps_its_tensors_and_formats() -> None:
    model = nn.Linear(3, 2).bfloat16()
    opt = st.wrap(torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1), momentum=0.9), names=model)
    opt.state[model.weight]["momentum_buffer"] = torch.ones(2, 3, dtype=torch.float64)
    opt.state[model.weight]["count"] = torch.tensor(3.0)
    lr, entries = opt.param_groups[0]["lr"], dict(opt.state[model.weight])
    state = RunState(model, opt, {})
    captured = state.capture()
    for tensor in (lr, *entries.values()):
        tensor.zero_()
    opt.state[model.weight]["more"] = 5
    state.restore(captured)
    now = opt.state[model.weight]
    assert list(now) == ["momentum_buffer", "count"]
    assert all(now[key] is entries[key] for key in entries)
    assert now["momentum_buffer"].dtype == torch.float64
    assert now["momentum_buffer"].eq(1).all()
    assert (float(now["count"]), float(lr)) == (3.0, pytest.approx(0.1))
    assert opt.param_groups[0]["lr"] is lr


def test_a_state_that_had_not_begun_begins_again() -> None:
    model = nn.Linear(3, 2)
    opt = guarded(model)
    state = RunState(model, opt, {})
    captured = state.capture()
    steps(model, opt)
    state.restore(captured)
    assert not opt.state
    assert opt.guard_state.step == 0


def test_a_snapshot_can_be_restored_again_and_again() -> None:
    training = KINDS["foreach Adam, own generator"]()
    training.run(8)
    batches = list(training.data)[:5]
    state = RunState(training.model, training.opt, {"s": training.scheduler, **training.extra})
    captured = state.capture()
    ends = []
    for kept in (captured, captured, Captured.from_plain(captured.to_plain(training.opt))):
        state.restore(kept)
        for batch in batches:
            training.step(batch)
        ends.append(_copied(whole_state(training)))
    assert same(ends[0], ends[1])
    assert same(ends[0], ends[2])


def _copied(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.clone()
    if isinstance(tree, dict):
        return {key: _copied(value) for key, value in tree.items()}
    return type(tree)(map(_copied, tree)) if type(tree) in (list, tuple) else tree


class Buffers(nn.Module):
    """Buffers of all kinds: not saved, expanded, replaced by another one, of whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("counter", torch.tensor(0), persistent=False)
        self.register_buffer("expanded", torch.ones(3, 1).expand(3, 3))
        self.register_buffer("cache", torch.zeros(0))
        self.register_buffer("nothing", None)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.counter += 1
        self.expanded[:, :1] += 1
        self.cache = torch.cat([self.cache, torch.ones(1)])
        self.calls += 1
        return self.layer(x) * self.expanded[:1]

    def get_extra_state(self) -> Any:
        return {"calls": torch.tensor(self.calls)}

    def set_extra_state(self, state: Any) -> None:
        self.calls = int(state["calls"])


def test_all_buffers_are_put_back() -> None:
    model = Buffers()
    opt = guarded(model)
    state = RunState(model, opt, {})
    steps(model, opt, 2)
    captured = state.capture()
    assert state.capture().read()[0]["model"]["tensors"].keys() == {
        "layer.weight", "layer.bias", "counter", "expanded", "cache",
    }  # fmt: skip
    steps(model, opt, 3)
    assert (int(model.counter), float(model.expanded[2, 2]), len(model.cache), model.calls) == (5, 6, 5, 5)
    state.restore(captured)
    assert (int(model.counter), float(model.expanded[2, 2]), len(model.cache), model.calls) == (2, 3, 2, 2)


def test_a_model_with_other_parameters_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    opt = guarded(model)
    captured = RunState(model, opt, {}).capture()
    other = nn.Sequential(nn.Linear(3, 5))
    with pytest.raises(RuntimeError, match=r"0\.weight was .*\(2, 3\) then, and is .*\(5, 3\)"):
        RunState(other, guarded(other), {}).restore(captured)


def test_groups_that_were_added_since_are_refused() -> None:
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    opt = st.wrap(torch.optim.SGD(model[0].parameters(), lr=0.1))
    state = RunState(model, opt, {})
    captured = state.capture()
    opt.add_param_group({"params": list(model[1].parameters())})
    model[0].weight.data.fill_(7.0)
    with pytest.raises(RuntimeError, match="opt must have the same parameters in the same groups"):
        state.restore(captured)
    assert (model[0].weight == 7.0).all()  # nothing was put back


def test_parameters_of_the_optimizer_alone_are_captured_too() -> None:
    model, scale = nn.Linear(3, 1), nn.Parameter(torch.ones(1))
    opt = st.wrap(torch.optim.SGD([*model.parameters(), scale], lr=0.1))
    state = RunState(model, opt, {})
    captured = state.capture()
    scale.data.zero_()
    state.restore(captured)
    assert scale.item() == 1.0


def test_a_second_optimizer_and_a_scaler_are_put_back() -> None:
    training = Training(loader(), adam())
    other, scaler = torch.optim.Adam([torch.ones(2, requires_grad=True)]), torch.amp.GradScaler("cpu")
    state = RunState(training.model, training.opt, {"other": other, "scaler": scaler})
    p = other.param_groups[0]["params"][0]
    p.grad = torch.ones(2)
    other.step()
    scaler.scale(torch.ones(()))
    kept, moments = state.capture(), {k: v.clone() for k, v in other.state[p].items()}
    other.step()
    scaler.update(3.0)
    state.restore(kept)
    assert same(moments, other.state[p])
    assert scaler.get_scale() == 65536.0
    assert p.tolist() == pytest.approx([0.999] * 2)


def test_a_compiled_model_has_the_names_of_the_one_inside() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    captured = RunState(torch.compile(model), guarded(model), {}).capture()
    assert captured.read()[0]["model"]["tensors"].keys() == {"0.weight", "0.bias"}


def test_a_compiled_step_goes_on_with_the_restored_tensors() -> None:
    def trained(*, rewound: bool) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        opt = guarded(model, lr=torch.tensor(0.1), fused=True)
        forward = torch.compile(model, backend="eager", fullgraph=True)
        state = RunState(model, opt, {})
        steps(forward, opt)
        captured = state.capture()
        if rewound:
            steps(forward, opt, 3)
            state.restore(captured)
        steps(forward, opt, 3)
        return model.weight.detach()

    assert torch.equal(trained(rewound=True), trained(rewound=False))


def test_copies_share_no_memory() -> None:
    tensor = torch.ones(3).expand(2, 3)
    copy = HostCopies().of(tensor)
    copy[0, 0] = 5.0
    assert copy.tolist() == [[5.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    assert tensor.sum() == 6


def test_an_optimizer_with_its_own_state_dict_is_asked_for_it() -> None:
    model = nn.Linear(3, 2).bfloat16()
    part = OptimizerPart(st.MasterWeights(model.parameters(), lambda p: torch.optim.Adam(p)))
    copied = HostCopies().of
    assert "own" in part.capture(copied, moved=copied)
    plain = OptimizerPart(torch.optim.Adam(model.parameters()))
    assert "own" not in plain.capture(copied, moved=copied)


@pytest.mark.gpu
def test_a_copy_on_a_gpu_is_made_of_the_state_before_the_next_step() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4096, 4096), nn.BatchNorm1d(4096), nn.Linear(4096, 1)).cuda()
    opt = st.wrap(torch.optim.AdamW(model.parameters(), lr=0.1, fused=True), names=model)
    x = torch.randn(64, 4096, device="cuda")
    state = RunState(model, opt, {})

    def step() -> None:
        opt.zero_grad()
        opt.backward(model(x).square().mean())
        opt.step()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    wanted = _copied({"model": dict(model.state_dict()), "optimizer": opt.inner.state_dict()["state"]})
    with torch.cuda.device(0):
        torch.cuda.set_sync_debug_mode("error")
        try:
            captured = state.capture()
            for _ in range(20):
                step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    pinned = captured.read()[0]["model"]["tensors"].values()
    assert all(copy.is_pinned() for copy in pinned)
    state.restore(captured)
    assert same(
        wanted, _copied({"model": dict(model.state_dict()), "optimizer": opt.inner.state_dict()["state"]})
    )
