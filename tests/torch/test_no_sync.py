"""The host never waits on the fused path: shown on tensors that have no data to wait for."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.overrides import TorchFunctionMode

import stablenum
import stablenum_torch as st
from stablenum_torch._step.guard import on_device_path
from tests.selection import slow_unless
from tests.torch.conftest import RULES

OPTIMIZERS = {
    "adam": lambda ps: torch.optim.Adam(ps, fused=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, fused=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, fused=True),
}
if torch.__version__ >= (2, 12):  # before, its kernel was for CPUs alone and could not skip a step
    OPTIMIZERS["adagrad"] = lambda ps: torch.optim.Adagrad(ps, fused=True)
CONFIGS = {
    "default": {},
    "all": {"clip": (stablenum.ClipByNorm(2.0), 1.0), "loss_scale": "dynamic"},
    "fold": {"clip": 1.0, "loss_scale": "dynamic"},
    "value": {"clip": stablenum.ClipByValue(1.0), "loss_scale": 8.0},
    **RULES,
}


@pytest.fixture
def no_data():
    """Fake tensors: they have a shape and a dtype, and raise if the host asks for a value.

    They are fake CPU tensors on the path of accelerators, since a CPU build of torch cannot
    index fake CUDA tensors.
    """
    with on_device_path(), FakeTensorMode(), torch.no_grad():
        yield


class NothingFromTheHost(TorchFunctionMode):
    """Raises when a tensor is made of numbers of the host: on an accelerator that is a copy that waits."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        makers = (torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy, torch.Tensor.new_tensor)
        if func in makers and not isinstance(args[0], torch.Tensor):
            raise AssertionError(f"{func.__name__} of {type(args[0]).__name__}")
        return func(*args, **(kwargs or {}))


def test_tensors_made_of_host_numbers_are_detected():
    for make in (torch.tensor, torch.as_tensor, torch.asarray):
        with pytest.raises(AssertionError, match="of list"), NothingFromTheHost():
            make([1.0])


def fake_parameters() -> list[torch.nn.Parameter]:
    params = [torch.nn.Parameter(torch.empty(shape)) for shape in ((3, 4), (5,))]
    for p in params:
        p.grad = torch.empty_like(p)
    return params


# Optimizers differ in how a decision is passed to them, not in the rules: these settings cover every way.
WITH_EACH = ("default", "all", "fold", "all at once")


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("optimizer", "config"),
    slow_unless(
        lambda optimizer, config: optimizer == "adamw" or config in WITH_EACH,
        itertools.product(OPTIMIZERS, CONFIGS),
    ),
)
def test_a_fused_step_reads_no_value(no_data, optimizer, config):
    params = fake_parameters()
    opt = st.wrap(OPTIMIZERS[optimizer](params), names=zip("ab", params, strict=True), **CONFIGS[config])
    stepped = []
    opt.inner.register_step_post_hook(lambda *_: stepped.append(1))
    for _ in range(3):
        opt.scale(torch.empty(()))
        with NothingFromTheHost():
            opt.step()
    assert len(stepped) == 3
    with pytest.raises(DataDependentOutputException):
        opt.history()  # reading is what waits


@pytest.fixture
def four_ranks():
    """A group of four ranks of which only this one exists: its collectives return what they are given."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("config", ["default", "all", "fold", "all at once"])
def test_a_fused_step_of_several_ranks_reads_no_value(four_ranks, no_data, config):
    from stablenum_torch._devices.joint import Joint

    params = fake_parameters()
    settings = CONFIGS[config] | {"clip": [r for r in as_list(CONFIGS[config]) if not needs_whole_units(r)]}
    names = zip("ab", params, strict=True)
    opt = st.wrap(OPTIMIZERS["adamw"](params), names=names, process_group=four_ranks, **settings)
    joint = Joint(four_ranks, [1, 1], ([0, 1], 2), [1, 1], [True, True], None)
    opt._guard._joint, opt._guard._joint_known = joint, True  # found out once, in the first step
    opt.scale(torch.empty(()))
    opt.step()  # makes the constants that later steps use
    for _ in range(2):
        opt.scale(torch.empty(()))
        with NothingFromTheHost():
            opt.step()
    with pytest.raises(DataDependentOutputException):
        opt.history()


def as_list(config):
    clip = config.get("clip", ())
    return clip if isinstance(clip, tuple | list) else [clip]


def needs_whole_units(rule):
    return isinstance(rule, stablenum.AdaptiveGradClip)


def test_an_optimizer_that_is_not_fused_reads_a_value(no_data):
    opt = st.wrap(torch.optim.Adam(fake_parameters(), foreach=True), clip=1.0)
    with pytest.raises(DataDependentOutputException):
        opt.step()


def test_on_meta_tensors_measuring_and_deciding_need_no_value():
    import array_api_compat.torch as xp

    from stablenum import GuardConfig, init_guard
    from stablenum_torch._step.inputs import StepInputs
    from stablenum_torch._step.observe import measured_without_wait
    from stablenum_torch._step.plain_decision import decided_without_wait

    meta = torch.device("meta")
    config = GuardConfig(**RULES["all at once"], max_skips_in_a_row=3)
    state = init_guard(config, 2, xp=xp, device=meta)
    params = [
        torch.nn.Parameter(torch.empty(3, 4, device=meta, dtype=d)) for d in (torch.float32, torch.bfloat16)
    ]
    for p in params:
        p.grad = torch.empty_like(p)
    loss = torch.empty((), device=meta)
    seen = measured_without_wait(StepInputs(config, params, (True, False), meta, loss=loss))
    decided = decided_without_wait(config, False, state, seen)
    assert decided.multiplier.shape == (2,)
    assert [part.shape[0] for part in decided.unit_multipliers] == [3, 0]
    assert decided.divisor.is_meta
    assert decided.skip.shape == ()
    assert decided.multiplier.is_meta
    assert decided.after is not None
    assert decided.after.loss_scale.scale.is_meta


def test_waiting_is_confined_to_one_module():
    waits = {"item", "tolist", "cpu", "numpy", "synchronize", "nonzero"}
    on_the_host_path = {
        ("elements.py", "numpy"),
        ("norms.py", "numpy"),
        ("norms.py", "tolist"),
        ("observe.py", "numpy"),
        ("generators.py", "cpu"),  # fields of RngState
        ("generators.py", "numpy"),
        ("host_decide.py", "numpy"),
        ("on_host.py", "tolist"),
        ("units.py", "numpy"),
        ("wide.py", "numpy"),
        ("checksums.py", "tolist"),  # the comparison of replicas waits, in the steps in which it is due
        ("replicas.py", "tolist"),
        ("together.py", "nonzero"),  # norms on a CPU that are too large for the first exchange
        ("together.py", "tolist"),
        ("host_copies.py", "synchronize"),  # a snapshot of a recovery, when it is read
        ("ranks.py", "tolist"),  # the ranks of a mesh, which are on the host
        ("run_log.py", "item"),  # a learning rate in a tensor on the host, for the header of a log
    }
    found = {
        (file.name, node.attr)
        for wing in ("_step", "_devices")
        for file in Path(st.__file__).parent.joinpath(wing).rglob("*.py")
        if file.name != "waits.py"
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in waits
    }
    assert found - on_the_host_path == set()


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_on_a_gpu_under_sync_debug_mode(optimizer, config):
    params = [torch.nn.Parameter(torch.ones(s, device="cuda")) for s in ((3, 4), (5,))]
    opt = st.wrap(OPTIMIZERS[optimizer](params), names=zip("ab", params, strict=True), **CONFIGS[config])
    bad = torch.full((5,), torch.nan, device="cuda")
    good = [torch.ones_like(p) for p in params]
    for p, g in zip(params, good, strict=True):
        p.grad = g.clone()
    opt.scale(good[0].sum())
    opt.step()  # the first compiles, and compilers wait
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for i in range(4):
            params[0].grad, params[1].grad = good[0].clone(), bad.clone() if i % 2 else good[1].clone()
            opt.scale(good[0].sum())
            opt.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert opt.last["skipped_total"] == 2
