"""``torch.compile`` of a guarded step: the same decisions, and no graph breaks except torch's own."""

from __future__ import annotations

import math

import pytest
import torch
import torch._dynamo

import stablenum
import stablenum_torch as st
from tests.selection import REPEATS
from tests.torch.conftest import RULES, named, parameters, set_gradients, snapshot

# torch's own optimizers warn about themselves when they are compiled.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def run(compiled: bool, fused: bool, backend: str = "aot_eager"):
    params = parameters()
    inner = torch.optim.AdamW(params, lr=0.01, fused=fused, foreach=None if fused else True)
    opt = st.wrap(inner, clip=1.0, loss_scale=stablenum.DynamicLossScale(init_scale=8.0, growth_interval=3))
    step = torch.compile(opt.step, backend=backend) if compiled else opt.step
    for i in range(6):
        set_gradients(params, i, 8.0)
        if i == 2:
            params[1].grad[0] = math.inf
        step()
    return params, opt


def breaks(step) -> set[str]:
    """The distinct reasons for which compiling broke the graph."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(step, backend="aot_eager")
    for _ in range(3):
        compiled()
    return seen_breaks()


def breaks_of_the_bare_optimizer(fused: bool) -> set[str]:
    params = parameters()
    set_gradients(params, 0)
    found = breaks(torch.optim.AdamW(params, fused=fused, foreach=None if fused else True).step)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return found


def seen_breaks() -> set[str]:
    return {reason.splitlines()[0] for reason in torch._dynamo.utils.counters["graph_break"]}


# An optimizer that cannot skip by itself needs one read by the host.
READ = {"Unsupported Tensor.item() call with capture_scalar_outputs=False"}

needs_tracing = pytest.mark.skipif(
    torch.__version__ < (2, 12), reason="before torch 2.12 a guarded step is not traced"
)
EACH_KERNEL = pytest.mark.parametrize("fused", [True, pytest.param(False, marks=REPEATS)])


@needs_tracing
@EACH_KERNEL
def test_compiled_step_decides_as_the_eager_one_and_adds_no_graph_break(fused):
    bare = breaks_of_the_bare_optimizer(fused)
    params, opt = run(True, fused)
    assert seen_breaks() - bare == (set() if fused else READ)
    wanted_params, wanted = run(False, fused)
    for row, other in zip(opt.history(), wanted.history(), strict=True):
        for key in ("step", "reason", "loss_scale", "worst"):
            assert row[key] == other[key]
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-6)
    for a, b in zip(params, wanted_params, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@needs_tracing
@pytest.mark.slow
def test_inductor_decides_as_eager_does():
    _params, opt = run(True, True, backend="inductor")
    _, wanted = run(False, True)
    assert [r["reason"] for r in opt.history()] == [r["reason"] for r in wanted.history()]
    assert [r["loss_scale"] for r in opt.history()] == [r["loss_scale"] for r in wanted.history()]


@needs_tracing
@pytest.mark.slow
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", RULES)
def test_no_rule_adds_a_graph_break(name, fused):
    params = parameters()
    set_gradients(params, 0)
    inner = torch.optim.AdamW(params, fused=fused, foreach=None if fused else True)
    extra = breaks(st.wrap(inner, names=named(params), **RULES[name]).step) - breaks_of_the_bare_optimizer(
        fused
    )
    assert extra == (set() if fused else READ)


@needs_tracing
@pytest.mark.slow(reason="Dynamo takes 10 to 20 s for a step with all rules")
@pytest.mark.parametrize("name", RULES)
def test_each_rule_compiled_decides_as_the_eager_one(name):
    def train(compiled: bool):
        params = parameters()
        opt = st.wrap(torch.optim.AdamW(params, lr=0.01, fused=True), names=named(params), **RULES[name])
        step = torch.compile(opt.step, backend="aot_eager") if compiled else opt.step
        for i in range(30):
            set_gradients(params, i, 8.0 * (30 if i == 25 else 1))
            if i == 2:
                params[1].grad[0] = math.inf
            step()
        return params, opt

    bare = breaks_of_the_bare_optimizer(fused=True)
    params, opt = train(True)
    assert seen_breaks() <= bare
    wanted_params, wanted = train(False)
    for row, other in zip(opt.history(), wanted.history(), strict=True):
        for key in ("step", "reason", "loss_scale", "worst"):
            assert row[key] == other[key], key
        assert row["clip_coefficient"] == pytest.approx(other["clip_coefficient"], rel=1e-5)
    for a, b in zip(params, wanted_params, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@needs_tracing
def test_the_decision_is_compiled_once_although_the_optimizer_creates_its_state_later():
    params = parameters()
    inner = torch.optim.SGD(params, lr=0.01, momentum=0.9, fused=True)
    opt = st.wrap(inner, clip=1.0, loss_scale="dynamic")
    sizes = []

    def count(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]):
        sizes.append(len(graph.graph.nodes))
        return graph.forward

    step = torch.compile(opt.step, backend=count)
    for i in range(3):
        set_gradients(params, i)
        step()
    assert sum(size > 100 for size in sizes) == 1, sizes


def test_compiled_training_step_with_backward():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    opt = st.wrap(torch.optim.AdamW(model.parameters(), fused=True), clip=1.0, loss_scale="dynamic")
    loss_of = torch.compile(lambda x: model(x).square().mean(), backend="aot_eager")
    losses = []
    for i in range(5):
        opt.zero_grad()
        x = torch.ones(3, 4) * (math.inf if i == 2 else 1.0)
        loss = loss_of(x)
        opt.backward(loss)
        opt.step()
        losses.append(loss.item())
    assert opt.last["skipped_total"] == 1
    assert losses[4] < losses[0]
    assert snapshot(opt)


@pytest.mark.slow(reason="Dynamo takes 5 s for it; a compiled step is shown to decide as the eager one above")
def test_compiled_function_that_clears_scales_and_steps():
    def train(compiled: bool):
        params = parameters()
        opt = st.wrap(torch.optim.AdamW(params, lr=0.01, fused=True), clip=1.0, loss_scale=8.0)

        def step(loss: torch.Tensor, grads: list[torch.Tensor]):
            opt.zero_grad()
            opt.scale(loss)
            for p, g in zip(params, grads, strict=True):
                p.grad = g
            opt.step()

        run_it = torch.compile(step, backend="aot_eager") if compiled else step
        for i in range(4):
            grads = [torch.full_like(p, 8.0 * (i + 1)) for p in params]
            run_it(torch.tensor(math.nan if i == 2 else float(i)), grads)
        return params, opt

    params, opt = train(True)
    wanted_params, wanted = train(False)
    seen = [[(row["reason"], str(row["loss"])) for row in o.history()] for o in (opt, wanted)]
    assert seen[0] == seen[1]
    assert [loss for _, loss in seen[0]] == ["0.0", "1.0", "nan", "3.0"]
    for a, b in zip(params, wanted_params, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
