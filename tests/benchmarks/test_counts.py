"""What is counted in a step: passes, operations, waits, memory, kernels of a compiled program."""

from __future__ import annotations

import itertools
import textwrap
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
import torch

from benchmarks.steps import torch_counts
from benchmarks.steps.errors import BenchmarkError
from benchmarks.steps.hlo import ordinary_step
from benchmarks.steps.torch_counts import Counter, graph_breaks, launches, peak_bytes
from benchmarks.steps.torch_variants import TorchProblem, TorchVariant
from benchmarks.timing import interleaved
from tests.benchmarks.small import TORCH_ROW


def counted(work, grads, beside=()):
    counter = Counter(list(grads), list(beside))
    with counter:
        work(*grads)
    return counter


def test_passes_over_the_gradients():
    grads = [torch.ones(10), torch.ones(30)]
    assert counted(lambda a, b: (a.sum(), b.sum()), grads).passes == (1.0, 0.0)
    assert counted(lambda a, b: b.mul_(2), grads).passes == (0.75, 0.75)
    assert counted(lambda a, b: (a.copy_(torch.zeros(10)), b.zero_()), grads).passes == (0.0, 1.0)
    assert counted(lambda a, b: torch.dot(b, b), grads).passes == (0.75, 0.0), "given twice, read once"
    assert counted(lambda a, b: torch._foreach_norm([a, b]), grads).passes == (1.0, 0.0)
    assert counted(lambda a, b: torch.ones(40).sum(), grads).passes == (0.0, 0.0)


def test_parts_of_a_gradient_are_counted_by_their_size():
    (grad,) = grads = [torch.ones(40)]
    assert counted(lambda g: [part.sum() for part in g.split(10)], grads).passes == (1.0, 0.0)
    assert counted(lambda g: g.view(4, 10)[0].sum(), grads).passes == (0.25, 0.0)
    assert grad.sum() == 40


def test_views_are_not_operations_and_reading_a_value_is_a_wait():
    grads = [torch.ones(4)]
    assert counted(lambda g: g.view(2, 2), grads).operations == 0
    found = counted(lambda g: bool(g.sum() > 0), grads)
    assert (found.operations, found.waits) == (2, 1)
    step = torch.zeros(())
    assert counted(lambda _: step.item(), grads, [step]).waits == 0, "lies on the host everywhere"


@pytest.mark.parametrize("scaled", [True, False])
def test_a_fused_step_writes_gradients_only_if_it_is_given_a_scale(scaled):
    p = torch.nn.Parameter(torch.ones(5))
    p.grad = torch.full((5,), 4.0)
    opt = torch.optim.SGD([p], lr=0.1, fused=True)
    if scaled:
        opt.grad_scale = torch.tensor(2.0)
        opt.found_inf = torch.zeros(())
    assert counted(lambda _: opt.step(), [p.grad]).passes == (1.0, 1.0 if scaled else 0.0)
    assert p.grad[0] == (2.0 if scaled else 4.0), "torch does what the count says"


def test_peak_memory_is_that_of_the_step_alone():
    problem = TorchProblem(TORCH_ROW, "cpu")
    params = problem.parameters()

    def step():
        first = torch.ones(1000)
        second = first + 1  # 8000 bytes together
        del first
        return torch.ones(100).sum() + second.sum()

    variant = TorchVariant("one", params, torch.optim.SGD(params, lr=0.1), step)
    assert 8000 <= peak_bytes(problem, variant) < 9000


def test_a_profile_without_allocations_raises(monkeypatch):
    problem = TorchProblem(TORCH_ROW, "cpu")
    params = problem.parameters()
    variant = TorchVariant("one", params, torch.optim.SGD(params, lr=0.1), lambda: None)
    assert peak_bytes(problem, variant) < 1000

    def without_memory(**_):
        return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])

    monkeypatch.setattr(torch_counts, "profile", without_memory)
    with pytest.raises(BenchmarkError, match="no allocation"):
        peak_bytes(problem, variant)


def test_kernels_and_copies_are_launches_and_annotations_are_not():
    def event(name, device="CUDA", annotation=False):
        device_type = getattr(torch.autograd.DeviceType, device)
        return SimpleNamespace(name=name, device_type=device_type, is_user_annotation=annotation)

    seen = [event("aten::mul", "CPU"), event("vectorized_elementwise_kernel"), event("Memcpy DtoH")]
    seen += [event("Memset (Device)"), event("Optimizer.step#AdamW.step", annotation=True)]
    assert launches(seen) == (1, 2)


@pytest.mark.filterwarnings("ignore")
def test_a_graph_break_is_counted():
    x = torch.ones(3)

    def whole():
        return x + 1

    def broken():
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2

    assert graph_breaks(whole) == {"graph_breaks": 0, "graphs": 1}
    assert graph_breaks(broken) == {"graph_breaks": 1, "graphs": 2}


# --- compiled programs -----------------------------------------------------------------------

N = 1000


def work_of(step, *arguments):
    text = jax.jit(step).lower(*arguments).compile().as_text()
    return ordinary_step(text, "grads[", gradient_bytes=4 * N)


def test_one_kernel_with_its_traffic():
    params, grads = {"w": jnp.ones(N)}, {"w": jnp.ones(N)}
    found = work_of(lambda params, grads: params["w"] - 0.1 * grads["w"], params, grads)
    assert (found.kernels, found.traffic, found.read) == (1, 3 * 4 * N, 4 * N)


def test_rare_branches_are_not_counted_but_the_step_is():
    def step(params, grads):
        total = jnp.square(grads["w"]).sum()
        norm = jax.lax.cond(
            jnp.isfinite(total), lambda g: total, lambda g: jnp.abs(g).max() + jnp.sort(g)[0], grads["w"]
        )
        return jax.lax.cond(norm < 1e9, lambda p, g: p - g, lambda p, g: p, params["w"], grads["w"])

    params, grads = {"w": jnp.ones(N)}, {"w": jnp.ones(N)}
    found = work_of(step, params, grads)
    assert found.read == 2 * 4 * N, "once for the norm, once for the step"


def test_collectives_are_counted_where_they_are_carried_out():
    program = """
    %second_look (a: (f32[8])) -> f32[8] {
      %a = (f32[8]{0}) parameter(0)
      %b = f32[8]{0} get-tuple-element(%a), index=0
      ROOT %c = f32[8]{0} all-reduce(%b), channel_id=3
    }

    %not_needed (a: (f32[8])) -> f32[8] {
      %d = (f32[8]{0}) parameter(0)
      ROOT %e = f32[8]{0} get-tuple-element(%d), index=0
    }

    ENTRY %main (x: f32[8]) -> f32[8] {
      %x = f32[8]{0} parameter(0), metadata={op_name="grads[0]"}
      %p = pred[] constant(false)
      %y = (f32[8]{0}, /*index=1*/pred[2,3]{1,0}) all-reduce-start(%x, %p), channel_id=1
      %z = (f32[8]{0}) tuple(%x)
      ROOT %w = f32[8]{0} conditional(%p, %z, %z), branch_computations={%second_look, %not_needed}
    }
    """
    found = ordinary_step(textwrap.dedent(program), "grads[", gradient_bytes=400)
    assert (found.collectives, found.sent) == (1, 32 + 6)


def test_a_program_of_another_form_raises():
    with pytest.raises(ValueError, match="ENTRY"):
        ordinary_step("HloModule nothing", "grads[", gradient_bytes=1)
    text = jax.jit(lambda x: x + 1).lower(jnp.ones(3)).compile().as_text()
    with pytest.raises(ValueError, match="op_name begins with"):
        ordinary_step(text, "grads[", gradient_bytes=1)


# --- the order of the variants ---------------------------------------------------------------


def test_the_order_is_drawn_again_each_round():
    order: list[str] = []
    variants = {name: (lambda name=name: order.append(name)) for name in "abcd"}
    interleaved(variants, rounds=39, warmup=1, timer=lambda step: (step(), 1.0)[1], seed=3)
    rounds = ["".join(order[i : i + 4]) for i in range(0, 160, 4)]
    assert all(sorted(round_) == list("abcd") for round_ in rounds)
    after = {pair for round_ in rounds for pair in itertools.pairwise(round_)}
    assert len(after) == 12, "each has run right after each other one"
    again: list[str] = []
    variants = {name: (lambda name=name: again.append(name)) for name in "abcd"}
    interleaved(variants, rounds=39, warmup=1, timer=lambda step: (step(), 1.0)[1], seed=4)
    assert again != order
