"""replay: each failure is placed at the user's line, in its module, forward and backward."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import stablenum_torch as st
from stablenum.diagnosis import Cause, Report

ZERO_ONE = (0.0, 1.0)


def leaf(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype, requires_grad=True)


def line_of(function: Callable[..., Any], mark: str) -> int:
    """The line of a function that ends with the comment ``mark``."""
    lines, first = inspect.getsourcelines(function)
    (found,) = [i for i, text in enumerate(lines) if text.rstrip().endswith(f"# {mark}")]
    return first + found


def first(report: Report) -> tuple[str, str, str, int]:
    assert not report.ok
    f = report.findings[0]
    assert f.place is not None
    assert f.place.file == __file__
    assert str(report).startswith(f"{__file__}:{f.place.line}")
    return f.operation, f.phase, f.kind, f.place.line


def test_forward() -> None:
    w = leaf(1.0, -1.0)

    def step() -> Tensor:
        y = w * 2
        z = torch.log(y)  # here
        return z.sum() * 3

    report = st.replay(step)
    assert first(report) == ("log", "forward", "nan", line_of(step, "here"))
    assert report.verdict.cause is Cause.DOMAIN
    assert report.findings[0].inputs[0].min == -2.0
    assert report.findings[0].outputs[0].nan == 1
    assert report.evidence.reproduced is True


def test_a_derivative_is_placed_at_its_forward_line() -> None:
    w = leaf(*ZERO_ONE)

    def step() -> Tensor:
        y = w * 1.0
        z = torch.sqrt(y)  # here
        return z.sum()

    report = st.replay(step)
    assert first(report) == ("sqrt", "backward", "inf", line_of(step, "here"))
    assert report.findings[0].derivative
    assert report.evidence.loss_finite is True
    assert report.evidence.bad_gradients == ("w",)


def test_where_trap() -> None:
    w = leaf(*ZERO_ONE)

    def step() -> Tensor:
        root = torch.sqrt(w)  # here
        return torch.where(w > 0, root, 0.0).sum()

    report = st.replay(step)
    assert first(report) == ("sqrt", "backward", "nan", line_of(step, "here"))
    assert report.verdict.cause is Cause.WHERE_TRAP


def test_a_step_that_runs_its_own_backward_passes() -> None:
    w = leaf(*ZERO_ONE)

    def step() -> None:
        (w * 2).sum().backward()
        w.sqrt().sum().backward()  # here

    assert first(st.replay(step)) == ("sqrt", "backward", "inf", line_of(step, "here"))
    assert w.grad is None


def test_gradients_computed_by_autograd_grad() -> None:
    w = leaf(*ZERO_ONE)

    def step() -> Tensor:
        loss = w.sqrt().sum()  # here
        torch.autograd.grad(loss, [w])
        return loss

    report = st.replay(step)
    assert first(report) == ("sqrt", "backward", "inf", line_of(step, "here"))
    assert report.evidence.bad_gradients == ("w",)


def test_double_backward() -> None:
    w = leaf(*ZERO_ONE)

    def step() -> Tensor:
        y = w**1.5  # here
        (g,) = torch.autograd.grad(y.sum(), w, create_graph=True)
        return g.square().sum() + g.sum()

    report = st.replay(step)
    assert first(report) == ("pow", "backward", "inf", line_of(step, "here"))


def test_the_second_derivative_of_a_discarded_value_is_a_where_trap_too() -> None:
    w = leaf(*ZERO_ONE)

    def step() -> Tensor:
        power = w**1.5  # here
        y = torch.where(w > 0, power, 0.0)
        (g,) = torch.autograd.grad(y.sum(), w, create_graph=True)
        return g.square().sum() + g.sum()

    report = st.replay(step)
    assert first(report) == ("pow", "backward", "inf", line_of(step, "here"))
    assert report.verdict.cause is Cause.WHERE_TRAP


@pytest.mark.parametrize("requires_grad", [False, True])
def test_transformations_of_functions(requires_grad: bool) -> None:
    w = torch.tensor(ZERO_ONE, requires_grad=requires_grad)

    def inner(x: Tensor) -> Tensor:
        return (x * 1.0).sqrt().sum()  # here

    report = st.replay(lambda: torch.func.grad(inner)(w).sum())
    assert first(report) == ("sqrt", "backward", "inf", line_of(inner, "here"))


class Bad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.abs()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        slope = x / x.abs()  # here
        return grad * slope


def test_a_custom_backward_function() -> None:
    w = leaf(*ZERO_ONE)
    report = st.replay(lambda: Bad.apply(w).sum())
    assert first(report) == ("div", "backward", "nan", line_of(Bad, "here"))
    assert not report.findings[0].derivative
    assert report.verdict.cause is Cause.DOMAIN


def test_the_callers_of_a_replay_did_not_call_the_backward_pass_that_it_runs() -> None:
    w = leaf(*ZERO_ONE)
    report = st.replay(lambda: Bad.apply(w).sum())
    assert [frame.function for frame in report.findings[0].frames] == ["backward"]
    assert "Called from" not in str(report)


def test_a_custom_backward_function_is_called_from_the_users_backward() -> None:
    w = leaf(*ZERO_ONE)
    report = st.replay(lambda: Bad.apply(w).sum().backward())
    (*_, caller, inner) = report.findings[0].frames
    assert "sum().backward()" in caller.code
    assert inner.function == "backward"
    assert "Called from" in str(report)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.lin(x)
        return torch.sqrt(h - h.detach())  # here


class Net(nn.Module):
    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.how = how
        self.blocks = nn.ModuleList([nn.Linear(3, 3), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.how == "reentrant") if self.how else block(x)
        return x.sum()


@pytest.mark.parametrize("how", ["", "reentrant", "not reentrant"])
def test_modules_and_checkpointing(how: str) -> None:
    model, x = Net(how), torch.ones(2, 3, requires_grad=True)
    report = st.replay(model, x)
    assert first(report) == ("sqrt", "backward", "inf", line_of(Block, "here"))
    assert report.findings[0].module == "blocks.1"


@pytest.mark.parametrize("how", ["reentrant", "not reentrant"])
def test_recomputed_operations_are_placed_at_the_forward_line(how: str) -> None:
    w = leaf(1.0, 2.0)
    runs: list[int] = []

    def inner(x: Tensor) -> Tensor:
        runs.append(1)
        factor = 1000.0 if len(runs) % 2 == 0 else 1.0  # a different line the second time
        y = torch.exp(x * factor)  # here
        return y * y

    def step() -> Tensor:
        return checkpoint(inner, w, use_reentrant=how == "reentrant").sum()

    report = st.replay(step)
    assert first(report) == ("exp", "forward", "inf", line_of(inner, "here"))
    assert report.evidence.loss_finite is True


def test_recomputed_torch_modules_without_a_line_of_user_code() -> None:
    lin = nn.Sequential(nn.Linear(2, 2), nn.Softplus())
    with torch.no_grad():
        lin[0].weight.fill_(1e30)

    def step(x: Tensor) -> Tensor:
        y = checkpoint(lin, x, use_reentrant=False)  # here
        return y.sum()

    report = st.replay(step, torch.full((1, 2), 1e30))
    assert first(report) == ("matmul", "forward", "inf", line_of(step, "here"))
    assert report.findings[0].module == "0"


def test_compiled_modules_and_functions_run_as_written() -> None:
    model = torch.compile(Net(), backend="eager")
    report = st.replay(lambda x: model(x), torch.ones(2, 3))
    assert first(report) == ("sqrt", "backward", "inf", line_of(Block, "here"))
    assert report.findings[0].module == "blocks.1"
    assert report.evidence.bad_gradients[0] == "blocks.0.weight"


def test_autocast_shows_the_real_format() -> None:
    w = leaf(300.0, 300.0)

    def step() -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            y = w.reshape(1, 2) @ w.reshape(2, 1)  # here
        return y.float().sum()

    report = st.replay(step)
    assert first(report) == ("matmul", "forward", "inf", line_of(step, "here"))
    assert report.findings[0].outputs[0].dtype == "float16"
    assert report.findings[0].wide_finite is True
    assert report.verdict.cause is Cause.LOW_PRECISION_OVERFLOW


def test_a_cast_that_overflows() -> None:
    w = leaf(1e5)

    def step() -> Tensor:
        return w.half().sum().float()  # here

    report = st.replay(step)
    assert first(report) == ("cast", "forward", "inf", line_of(step, "here"))
    assert report.verdict.cause is Cause.LOW_PRECISION_OVERFLOW


def test_an_in_place_operation_is_retried_in_float32_on_its_original_input() -> None:
    w = leaf(300.0, 1.0, dtype=torch.float16)

    def step() -> Tensor:
        y = w * 1.0
        y.mul_(300.0)  # here
        return y.float().sum()

    report = st.replay(step)
    assert first(report) == ("mul", "forward", "inf", line_of(step, "here"))
    assert report.findings[0].wide_finite is True
    assert report.findings[0].inputs[0].max == 300.0


def test_loss_scale() -> None:
    w = leaf(1.0, dtype=torch.float16)
    report = st.replay(lambda: (w * 4.0).float().sum(), loss_scale=65536.0)
    assert report.verdict.cause is Cause.LOSS_SCALE
    assert report.evidence.unscaled_finite is True


# --- in place -------------------------------------------------------------------------------------


@pytest.mark.parametrize("used", [True, False])
def test_the_scale_of_a_grad_scaler(used: bool) -> None:
    w = nn.Parameter(torch.ones(4))
    opt, scaler = torch.optim.SGD([w], lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0**20)
    if used:
        scaler.scale(torch.ones(()))

    def step() -> Tensor:
        opt.zero_grad()
        loss = w.half().float().square().sum()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        return loss

    report = st.replay(step)
    assert (report.verdict.cause, report.evidence.loss_scale) == (Cause.LOSS_SCALE, 2.0**20)
    assert scaler.get_scale() == 2.0**20


def test_a_write_is_a_new_value() -> None:
    w = leaf(*ZERO_ONE)

    def step() -> Tensor:
        y = w * 1.0
        y.log_()  # here
        y.clamp_(min=-5.0)
        y.div_(torch.zeros(2))  # later
        return y.sum()

    report = st.replay(step)
    assert first(report)[0] == "div"
    assert first(report)[3] == line_of(step, "later")


def test_the_input_of_an_in_place_write_is_described_before_the_write() -> None:
    w = leaf(*ZERO_ONE)

    def step() -> Tensor:
        y = w * 1.0
        y.log_()  # here
        return y.sum()

    report = st.replay(step)
    assert first(report) == ("log", "forward", "inf", line_of(step, "here"))
    assert (report.findings[0].inputs[0].min, report.findings[0].inputs[0].zero) == (0.0, 1)


def test_a_write_through_another_view_is_detected() -> None:
    w = leaf(-1.0, 1.0)

    def step() -> Tensor:
        buffer = torch.zeros(2, 2)
        whole = buffer.view(4)
        buffer[1] = w.sqrt()  # here
        return whole.sum()

    assert first(st.replay(step)) == ("sqrt", "forward", "nan", line_of(step, "here"))


def test_bad_values_that_are_overwritten_are_not_reported() -> None:
    w = leaf(1.0, 2.0)

    def step() -> Tensor:
        y = torch.full((2,), math.nan)
        y.copy_(w)
        empty = torch.empty(2)
        empty[:] = y
        return (empty * w).sum()

    assert st.replay(step).ok


# --- functions made of several operations ------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "operation", "phase"),
    [
        (lambda w: torch.std(w[:1]), "std", "forward"),
        (lambda w: torch.var(w * torch.tensor([3e38, -3e38])), "var", "forward"),
        (lambda w: F.kl_div(w, w * 3e38, reduction="sum"), "kl_div", "forward"),
        (lambda w: F.gaussian_nll_loss(w, w, w * 0, eps=0.0), "gaussian_nll", "forward"),
        (lambda w: F.poisson_nll_loss(w * 100, w), "poisson_nll", "forward"),
        (lambda w: torch.linalg.vector_norm(w * 1e38 * 10), "mul", "forward"),
        (lambda w: torch.softmax(w + torch.tensor(-math.inf), 0), "softmax", "forward"),
        (lambda w: F.layer_norm(w * 1e30, (2,), eps=0.0), "layer_norm", "forward"),
        (lambda w: (w * 1e20).pow(2), "pow", "forward"),
        (lambda w: (w * 100).exp(), "exp", "forward"),
        (lambda w: w / (w - w), "div", "forward"),
        (lambda w: torch.acos(w), "acos", "backward"),
        (lambda w: (w * 0).reciprocal(), "reciprocal", "forward"),
        (lambda w: (w - w).log1p() / 0.0, "div", "forward"),
    ],
)
def test_names(function: Callable[[Tensor], Tensor], operation: str, phase: str) -> None:
    w = leaf(1.0, 1.0)
    report = st.replay(lambda: function(w).sum())
    assert not report.ok
    assert (report.findings[0].operation, report.findings[0].phase) == (operation, phase)
    assert report.findings[0].place is not None
    assert report.findings[0].place.file == __file__


# --- legitimate infinities -----------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.attention(x, x, x, attn_mask=self.mask, need_weights=self.training)
        return y.square().mean()


CAUSAL = torch.full((5, 5), -math.inf).triu(1)


@pytest.mark.parametrize("mask", [CAUSAL, CAUSAL.isinf()])
def test_a_masked_attention_is_healthy(mask: Tensor) -> None:
    torch.manual_seed(0)
    report = st.replay(Attention(mask), torch.randn(2, 5, 8))
    assert report.ok, str(report)
    assert report.evidence.loss_finite is True


@pytest.mark.parametrize("mask", [CAUSAL, ~CAUSAL.isinf()])
def test_a_fused_masked_attention_is_healthy(mask: Tensor) -> None:
    q = torch.randn(1, 2, 5, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert st.replay(lambda: F.scaled_dot_product_attention(q, q, q, attn_mask=mask).square().sum()).ok


def test_ignored_targets_are_healthy() -> None:
    logits = torch.zeros(3, 4, requires_grad=True)
    targets = torch.tensor([1, -100, 3])
    assert st.replay(lambda: F.cross_entropy(logits, targets)).ok


def test_an_infinity_in_front_of_a_finite_result_is_healthy() -> None:
    w = leaf(1.0, 2.0)

    def step() -> Tensor:
        scores = w.masked_fill(torch.tensor([True, False]), -math.inf)
        return torch.softmax(scores, 0).square().sum() + torch.exp(-w.detach() / 0.0).sum() + w.sum()

    assert st.replay(step).ok


def test_a_masked_row_is_blamed_on_the_softmax() -> None:
    w = leaf(1.0, 2.0)

    def step() -> Tensor:
        scores = w.masked_fill(torch.tensor([True, True]), -math.inf)
        return torch.softmax(scores, 0).square().sum()  # here

    report = st.replay(step)
    assert first(report) == ("softmax", "forward", "nan", line_of(step, "here"))
    assert report.verdict.cause is Cause.MASK


# --- data, labels, parameters --------------------------------------------------------------------------


def test_a_bad_batch() -> None:
    w, batch = leaf(1.0, 2.0), {"x": torch.tensor([1.0, math.nan])}
    report = st.replay(lambda batch: (w * batch["x"]).sum(), batch)
    assert report.verdict.cause is Cause.BATCH
    assert report.findings[0].name == "batch['x']"


def test_a_bad_parameter() -> None:
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight[0, 0] = math.inf
    report = st.replay(lambda x: model(x).sum(), torch.ones(1, 2))
    assert report.verdict.cause is Cause.PARAMETERS
    assert report.evidence.bad_parameters == ("weight",)


@pytest.mark.parametrize(
    "step",
    [
        lambda w: F.cross_entropy(w.reshape(1, 2), torch.tensor([2])),
        lambda w: F.nll_loss(w.reshape(1, 2), torch.tensor([-1])),
        lambda w: F.embedding(torch.tensor([2]), w.reshape(2, 1)).sum(),
        lambda w: w.gather(0, torch.tensor([5])).sum(),
        lambda w: w[torch.tensor([5])].sum(),
        lambda w: (w * F.one_hot(torch.tensor([4]), 2)).sum(),
    ],
)
def test_labels_out_of_range(step: Callable[[Tensor], Tensor]) -> None:
    report = st.replay(step, leaf(1.0, 2.0))
    assert report.verdict.cause is Cause.LABELS
    assert report.findings[0].place is not None
    assert report.findings[0].place.file == __file__


def test_no_valid_label() -> None:
    logits = torch.zeros(2, 4, requires_grad=True)
    report = st.replay(lambda: F.cross_entropy(logits, torch.tensor([-100, -100])))
    assert report.verdict.cause is Cause.LABELS
    assert report.findings[0].operation == "cross_entropy"


def test_an_operation_that_raises_on_nan_is_traced_to_its_source() -> None:
    w = leaf(-1.0, 2.0)

    def step() -> Tensor:
        p = torch.sqrt(w)  # here
        return F.binary_cross_entropy(p, torch.ones(2))

    report = st.replay(step)
    assert first(report) == ("sqrt", "forward", "nan", line_of(step, "here"))
    assert "RuntimeError" in report.notes[0]


@pytest.mark.parametrize("value", [-1.0, math.nan])
def test_a_factorization_that_raises(value: float) -> None:
    w = leaf(4.0, value)

    def step() -> Tensor:
        matrix = torch.diag(w)
        lower = torch.linalg.cholesky(matrix)  # here
        return lower.diagonal().log().sum()

    report = st.replay(step)
    f = report.findings[0]
    if math.isnan(value):
        assert (f.operation, f.name) == ("parameter", "w")
    else:
        assert first(report) == ("cholesky", "forward", "error", line_of(step, "here"))
        assert report.verdict.cause is Cause.DOMAIN
    assert "LinAlgError" in report.notes[0]


def test_a_probability_that_raises() -> None:
    w = leaf(0.5, 2.0)

    def step() -> Tensor:
        return F.binary_cross_entropy(w, torch.ones(2))  # here

    report = st.replay(step)
    assert first(report) == ("binary_cross_entropy", "forward", "error", line_of(step, "here"))
    assert report.verdict.cause is Cause.DOMAIN
    assert report.verdict.safe_function == "stablenum_torch.losses.binary_cross_entropy"


def test_shapes_that_do_not_fit_are_the_users_error() -> None:
    with pytest.raises(RuntimeError, match="size"):
        st.replay(lambda: leaf(1.0, 2.0) / torch.ones(3))


def test_a_loss_that_is_a_number() -> None:
    w = leaf(0.0, 1.0)

    def step() -> float:
        loss = torch.log(w).sum()  # here
        return loss.item()

    assert first(st.replay(step)) == ("log", "forward", "inf", line_of(step, "here"))


def test_a_plain_zero_that_divides() -> None:
    w, count = leaf(1.0, 1.0), 0
    report = st.replay(lambda: (w / count).sum())
    assert report.findings[0].operation == "div"
    assert report.verdict.cause is Cause.DOMAIN


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.bool, torch.int8])
def test_whole_numbers_of_any_format_are_described(dtype: torch.dtype) -> None:
    w, divisor = leaf(1.0, 1.0), torch.tensor([0, 1]).to(dtype)
    report = st.replay(lambda: (w / divisor).sum())
    assert report.findings[0].inputs[1].max == 1.0


# --- updates ---------------------------------------------------------------------------------------------


def test_a_poisoned_state_is_found_in_the_update() -> None:
    model = nn.Linear(2, 1)
    opt = torch.optim.Adam(model.named_parameters())
    x = torch.ones(1, 2)

    def step() -> Tensor:
        opt.zero_grad()
        loss = model(x).sum()
        loss.backward()
        opt.step()
        return loss

    step()
    assert st.replay(step).ok
    opt.state[model.weight]["exp_avg_sq"][0, 0] = math.nan
    before = model.weight.detach().clone()
    report = st.replay(step)
    assert report.evidence.bad_updates == ("weight",)
    assert report.findings[0].phase == "before"
    assert report.findings[0].name == "exp_avg_sq of weight"
    assert report.verdict.cause is Cause.OPTIMIZER_STATE
    assert torch.equal(before, model.weight)


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_an_update_that_overflows(options: dict[str, bool]) -> None:
    w = leaf(0.0, 1.0)
    opt = torch.optim.Adam([w], lr=1e-2, eps=0.0, **options)

    def step() -> Tensor:
        loss = (w * torch.tensor([0.0, 1.0])).sum()
        opt.zero_grad()
        loss.backward()
        opt.step()  # here
        return loss

    report = st.replay(step)
    assert report.findings[0].phase == "update"
    assert report.findings[0].place is not None
    assert report.findings[0].place.line == line_of(step, "here")
    assert report.evidence.bad_updates == ("w",)


class Plain(torch.optim.Optimizer):
    """An optimizer defined by the user."""

    def __init__(self, parameters: list[Tensor]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        with torch.enable_grad():
            if closure is not None:
                closure()
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad / p.grad.abs())  # here


def test_a_custom_optimizer() -> None:
    w = leaf(0.0, 1.0)
    opt = Plain([w])

    def closure() -> None:
        opt.zero_grad()
        (w * torch.tensor([0.0, 1.0])).sum().backward()

    report = st.replay(lambda: opt.step(closure))
    assert first(report) == ("div", "update", "nan", line_of(Plain, "here"))
    assert report.evidence.bad_updates == ("w",)


def test_gradients_that_are_cleared_after_the_step() -> None:
    w = leaf(0.0, 1.0)
    opt = torch.optim.SGD([w], lr=0.1)

    def step() -> Tensor:
        loss = w.sqrt().sum()  # here
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    report = st.replay(step)
    assert first(report) == ("sqrt", "backward", "inf", line_of(step, "here"))
    assert report.evidence.bad_gradients == ("w",)


def test_bad_gradients_that_are_cleared_before_the_update_do_no_harm() -> None:
    w = leaf(0.0, 1.0)
    opt = torch.optim.SGD([w], lr=0.1)

    def step() -> Tensor:
        w.sqrt().sum().backward()
        with torch.no_grad():
            opt.zero_grad(set_to_none=False)
        loss = w.square().sum()
        loss.backward()
        opt.step()
        return loss

    report = st.replay(step)
    assert report.ok, str(report)


@pytest.mark.filterwarnings(
    "ignore:Sparse invariant checks are implicitly disabled:UserWarning"
)  # torch 2.11
@pytest.mark.parametrize("function", ["gru", "conv", "encoder", "weight_norm", "sparse"])
def test_whole_modules_are_healthy(function: str) -> None:
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(8, 2, batch_first=True)
    padding = torch.tensor([[False, False, True, True], [False] * 4])
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
    sparse = torch.sparse_coo_tensor([[0, 1], [0, 1]], [1.0, 2.0], check_invariants=True)
    step: Callable[[], Tensor] = {
        "gru": lambda: nn.GRU(3, 3)(torch.ones(4, 1, 3))[0].sum(),
        "conv": lambda: nn.Conv2d(1, 1, 3)(torch.ones(1, 1, 5, 5)).sum(),
        "encoder": lambda: encoder(torch.randn(2, 4, 8), src_key_padding_mask=padding).sum(),
        "weight_norm": lambda: normed(torch.ones(1, 3)).sum(),
        "sparse": lambda: torch.sparse.mm(sparse, torch.ones(2, 1, requires_grad=True)).sum(),
    }[function]
    report = st.replay(step)
    assert report.ok, str(report)
    assert report.evidence.loss_finite is True


def test_the_text_holds_no_data() -> None:
    values = torch.arange(1.0, 65.0) * 1.2345
    w = values.clone().requires_grad_()
    text = str(st.replay(lambda: (w - w).log().sum())) + st.replay(lambda: (w - w).log().sum()).to_json()
    assert sum(f"{v:.4f}"[:5] in text for v in values.tolist()) <= 8


def test_gradients_are_judged_when_the_optimizer_gets_them() -> None:
    w = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([w], lr=0.1)

    def step(repair: bool) -> Tensor:
        optimizer.zero_grad()
        loss = w.sqrt().sum()
        loss.backward()
        assert w.grad is not None
        if repair:
            w.grad.nan_to_num_(posinf=0.0)
        optimizer.step()
        return loss

    assert st.replay(step, False).evidence.bad_gradients == ("w",)
    assert st.replay(step, True).evidence.bad_gradients == ()


def test_a_model_of_which_a_part_is_named_too_is_still_one_model() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    head = model[1]

    def step() -> Tensor:
        hidden = model[0](torch.ones(1, 2))
        return (head(hidden) * 0).sqrt().sum()

    assert st.replay(step).evidence.bad_gradients == ("0.weight", "0.bias", "1.weight", "1.bias")
