"""What ``wrap`` refuses by name because it could not be guarded rightly, and unusual optimizers that work."""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from stablenum_torch import wrap


class Bare(torch.optim.SGD):
    """An optimizer without ``defaults``, and with a private method that its own scheduler calls."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.5)
        del self.defaults

    @staticmethod
    def _get_lr(group: Any) -> float:
        return float(group["lr"])


def _weight() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor([3.0, 4.0]))


def test_an_optimizer_without_defaults_works() -> None:
    w = _weight()
    opt = wrap(Bare([w]), clip=1.0)
    opt.backward((w * w).sum() / 2)
    opt.step()
    assert opt.last["grad_norm"] == 5.0
    assert opt.defaults.get("lr") is None
    opt.load_state_dict(opt.state_dict())
    assert "Bare" in repr(opt)


def test_a_partners_own_private_methods_are_forwarded_and_torchs_are_not() -> None:
    opt = wrap(Bare([_weight()]))
    assert opt._get_lr(opt.param_groups[0]) == 0.5
    opt.inner._opt_called = True
    for name in ("_opt_called", "_unknown", "__deepcopy__"):
        assert not hasattr(opt, name)


@pytest.mark.parametrize("first", ["bad", "good", "none"])
@pytest.mark.parametrize("on", ["inner", "wrapper"])
def test_a_scheduler_warns_if_it_is_called_first_and_only_then(on: str, first: str) -> None:
    w = _weight()
    inner = torch.optim.SGD([w], lr=0.1)
    early = StepLR(inner, 1) if on == "inner" else None
    opt = wrap(inner)
    scheduler = early or StepLR(opt, 1)
    if first != "none":
        opt.backward(w.sum() * (float("nan") if first == "bad" else 1.0))
    opt.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()
    late = wrap(torch.optim.SGD([_weight()], lr=0.1))
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        StepLR(late.inner if on == "inner" else late, 1).step()


def test_parameters_on_the_meta_device_are_refused() -> None:
    model = torch.nn.Linear(2, 2, device="meta")
    with pytest.raises(
        ValueError, match=r"param_groups\[0\]\['params'\]\[0\] is on the meta device.*to_empty"
    ):
        wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    model = model.to_empty(device="cpu")
    torch.nn.init.ones_(model.weight)
    opt = wrap(torch.optim.SGD([model.weight], lr=0.1))
    opt.backward(model.weight.sum())
    opt.step()
    assert opt.last["grad_norm"] == 2.0


@pytest.mark.parametrize("later", [False, True])
def test_a_parameter_that_is_there_twice_is_refused(later: bool) -> None:
    w = _weight()
    inner = torch.optim.SGD([w], lr=0.1)
    opt = wrap(inner) if later else None
    inner.param_groups.append({**inner.param_groups[0], "params": [_weight(), w]})
    w.grad = torch.ones(2)
    call = functools.partial(wrap, inner) if opt is None else opt.step
    with pytest.raises(ValueError, match=r"param_groups\[1\]\['params'\]\[1\] is there twice"):
        call()
    assert torch.equal(w.detach(), torch.tensor([3.0, 4.0]))


def test_names_of_other_parameters_are_refused() -> None:
    model = torch.nn.Linear(2, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    for names in (copy.deepcopy(model), {"w": _weight()}):
        with pytest.raises(ValueError, match="names must be those of the optimizer's parameters"):
            wrap(inner, names=names)
    with pytest.raises(ValueError, match="names must be different for each parameter; got 'x'"):
        wrap(inner, names=[("x", model.weight), ("x", model.bias)])
    assert wrap(inner, names=[("x", model.weight)]).parameter_names()[0] == "x"


@pytest.fixture
def one_rank(tmp_path: Any) -> Any:
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_optimizers_of_torch_distributed_are_known(one_rank: Any) -> None:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

    model = torch.nn.Linear(2, 2)
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="process_group must be None for ZeroRedundancyOptimizer"):
        wrap(zero, process_group=one_rank)
    opt = wrap(zero, clip=1.0)
    opt.backward(model(torch.ones(1, 2)).sum())
    opt.step()
    assert opt.last["applied"]
    averager = PeriodicModelAverager(period=2, warmup_steps=0)
    with pytest.raises(TypeError, match="PostLocalSGDOptimizer cannot be guarded"):
        wrap(PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager))
    guarded = wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    outer = PostLocalSGDOptimizer(guarded, averager)
    model.weight.grad = torch.full((2, 2), float("nan"))
    outer.step()
    assert guarded.last["skipped_total"] == 1
    assert torch.isfinite(model.weight).all()


class _OwnScale(torch.optim.SGD):
    """An optimizer with attributes of the names that torch's fused kernels read."""

    found_inf = None

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.grad_scale = 0.5

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.data.sub_(self.grad_scale * 0.1 * p.grad)


def test_attributes_of_the_users_optimizer_named_like_torchs_are_kept() -> None:
    w = torch.nn.Parameter(torch.ones(2))
    opt = wrap(_OwnScale([w]))
    for _ in range(2):
        opt.zero_grad()
        opt.backward(w.sum())
        opt.step()
    torch.testing.assert_close(w.detach(), torch.full((2,), 0.9))
