"""Where a difference begins: behind indices, in several calls of one line, after a call."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import linen
from torch import nn
from torch.nn import functional

import stablenum
import stablenum_jax
import stablenum_torch
from stablenum.diagnosis.diff.differences import Difference

W = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
X = np.random.default_rng(1).normal(size=(6, 4)).astype(np.float32)


def first_of(left: Any, right: Any) -> Difference:
    first = stablenum.diff(left, right).first
    assert first is not None
    return first


def compared(of_torch: Any, of_jax: Any, w: Any = W, x: Any = X) -> tuple[str, str, Difference]:
    """Return the lines of the first difference of two functions of a matrix and the data."""
    weight = torch.tensor(w, requires_grad=True)
    left = stablenum_torch.program(lambda x: of_torch(weight, x), torch.tensor(x))
    first = first_of(left, stablenum_jax.program(of_jax, jnp.asarray(w), jnp.asarray(x)))
    codes = ["" if side is None else side.code for side in (first.left, first.right)]
    return codes[0], codes[1], first


# --- indices that follow from what differs -----------------------------------------------------------------


def torch_sampled(w: Any, x: Any) -> Any:
    bins = torch.tanh(x @ w)
    weights = functional.softplus(bins @ w)  # density
    cdf = weights.cumsum(-1) / weights.sum(-1, keepdim=True)
    below = torch.searchsorted(cdf, torch.full((6, 2), 0.4)).clamp(max=3)
    return (bins.gather(1, below) * cdf.gather(1, below)).square().mean()


def jax_sampled(w: Any, x: Any) -> Any:
    bins = jnp.tanh(x @ w)
    weights = jnp.exp(bins @ w)  # density
    cdf = jnp.cumsum(weights, -1) / jnp.sum(weights, -1, keepdims=True)
    below = jnp.minimum(jax.vmap(jnp.searchsorted)(cdf, jnp.full((6, 2), 0.4)), 3)
    bins, cdf = (jnp.take_along_axis(v, below, 1) for v in (bins, cdf))
    return jnp.mean((bins * cdf) ** 2)


def test_a_lookup_by_indices_that_follow_from_a_difference_does_not_come_before_it() -> None:
    left, right, _ = compared(torch_sampled, jax_sampled)
    assert (left.endswith("# density"), right.endswith("# density")) == (True, True)


# --- several calls of one line -----------------------------------------------------------------------------


def torch_layers(w: Any, x: Any) -> Any:
    for _ in range(3):
        h = x @ w
        x = x + torch.sin(h * h) * torch.cos(h)
    return x.square().mean()


def jax_layers(w: Any, x: Any) -> Any:
    for _ in range(3):
        h = x @ w
        x = x + jnp.tanh(h * h) * jnp.cos(h)
    return jnp.mean(x**2)


def test_a_function_is_confirmed_in_all_calls_of_its_line() -> None:
    _, _, first = compared(torch_layers, jax_layers, 0.3 * W)
    assert first.causes[0].code == "other_function"
    assert first.causes[0].confirmed


# --- an operation that is missing after a call -------------------------------------------------------------


def torch_gate(h: Any) -> Any:
    return h * torch.sigmoid(h)


def jax_gate(h: Any) -> Any:
    return h * jax.nn.sigmoid(h)


def torch_residual(w: Any, x: Any) -> Any:
    y = torch_gate(x @ w) * 0.1  # block
    return (x + y).square().mean()


def jax_residual(w: Any, x: Any) -> Any:
    y = jax_gate(x @ w)  # block
    return jnp.mean((x + y) ** 2)


def test_an_operation_is_missing_after_the_call_that_returned_its_value() -> None:
    left, right, first = compared(torch_residual, jax_residual)
    assert (left.endswith("# block"), right.endswith("# block")) == (True, True)
    assert first.right is not None
    assert first.right.operation is None


# --- the order of entries before a convolution -------------------------------------------------------------

KERNEL = np.random.default_rng(2).normal(size=(4, 2, 3, 3)).astype(np.float32)
IMAGES = np.random.default_rng(3).normal(size=(2, 8, 5, 5)).astype(np.float32)


def torch_shuffled(w: Any, x: Any) -> Any:
    x = functional.pixel_shuffle(torch.sin(x), 2)  # order
    return functional.conv2d(x, w).square().mean()


def jax_shuffled(w: Any, x: Any, *, channels_last: bool) -> Any:
    x = jnp.sin(x)
    if channels_last:
        x = x.reshape(2, 2, 2, 2, 5, 5).transpose(0, 3, 4, 1, 5, 2).reshape(2, 2, 10, 10)  # order
    else:
        x = x.reshape(2, 2, 2, 2, 5, 5).transpose(0, 1, 4, 2, 5, 3).reshape(2, 2, 10, 10)
    return jnp.mean(jax.lax.conv(x, w, (1, 1), "VALID") ** 2)


def test_what_puts_the_entries_that_a_convolution_reads_in_another_order_is_named() -> None:
    def right(w: Any, x: Any) -> Any:
        return jax_shuffled(w, x, channels_last=True)

    left, other, first = compared(torch_shuffled, right, KERNEL, IMAGES)
    assert (left.endswith("# order"), other.endswith("# order")) == (True, True)
    assert [(c.code, c.confirmed) for c in first.causes] == [("entry_order", True)]


def test_entries_that_a_convolution_reads_in_the_same_order_are_no_difference() -> None:
    weight = torch.tensor(KERNEL, requires_grad=True)
    left = stablenum_torch.program(lambda x: torch_shuffled(weight, x), torch.tensor(IMAGES))
    right = stablenum_jax.program(
        lambda w, x: jax_shuffled(w, x, channels_last=False), jnp.asarray(KERNEL), jnp.asarray(IMAGES)
    )
    assert stablenum.diff(left, right).ok


# --- norms -------------------------------------------------------------------------------------------------


class TorchBranches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.aside, self.main = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.aside_norm, self.main_norm = nn.BatchNorm1d(4), nn.BatchNorm1d(4)

    def forward(self, x: Any) -> Any:
        aside = self.aside_norm(self.aside(x))
        return torch.relu(self.main_norm(self.main(x))) + aside


class JaxBranches(linen.Module):
    average: bool

    @linen.compact
    def __call__(self, x: Any) -> Any:
        y = linen.BatchNorm(self.average, name="main_norm")(linen.Dense(4, use_bias=False, name="main")(x))
        aside = linen.Dense(4, use_bias=False, name="aside")(x)
        return jax.nn.relu(y) + linen.BatchNorm(self.average, name="aside_norm")(aside)


def test_the_first_of_two_norms_by_running_statistics_is_that_of_the_same_branch() -> None:
    torch.manual_seed(0)
    model, port = TorchBranches(), JaxBranches(average=True)
    state = port.init(jax.random.key(0), jnp.asarray(X))

    def loss(params: Any, x: Any) -> Any:
        return jnp.mean(port.apply({**state, "params": params}, x) ** 2)

    left = stablenum_torch.program(lambda x: (model(x) ** 2).mean(), torch.tensor(X), model=model)
    first = first_of(left, stablenum_jax.program(loss, state["params"], jnp.asarray(X)))
    assert first.left is not None
    assert first.right is not None
    assert (first.left.module, first.right.module.rpartition("/")[2]) == ("main_norm", "main_norm")
    assert first.causes[0].code == "running_statistics"


def torch_norm(w: Any, x: Any) -> Any:
    h = (x @ w).reshape(2, 3, 4)
    mean = h.mean(2, keepdim=True)  # norm
    spread = (h - mean).square().mean(2, keepdim=True)
    h = (h - mean) / (spread + 1e-5).sqrt()
    return h.exp().mean()


def jax_norm(w: Any, x: Any) -> Any:
    h = (x @ w).reshape(2, 3, 4)
    h = (h - h.mean((1, 2), keepdims=True)) / jnp.sqrt(h.var((1, 2), keepdims=True) + 1e-5)  # norm
    return jnp.mean(jnp.exp(h))


def test_a_norm_in_one_line_is_the_counterpart_of_one_in_several() -> None:
    left, right, first = compared(torch_norm, jax_norm)
    assert (left.endswith("# norm"), right.endswith("# norm")) == (True, True)
    assert [(c.code, c.confirmed) for c in first.causes] == [("norm_axis", True)]


# --- where only one side passes gradients on ---------------------------------------------------------------


def torch_accumulated(w: Any, x: Any) -> Any:
    total = torch.zeros(())
    for part in x.split(2):
        gap = torch.tanh(part @ w) - (part @ w).detach()
        total = total.detach() + gap.square().mean() / 3  # sum
    return total


def jax_accumulated(w: Any, x: Any) -> Any:
    def step(total: Any, part: Any) -> Any:
        gap = jnp.tanh(part @ w) - jax.lax.stop_gradient(part @ w)
        return total + jnp.mean(gap**2) / 3, None  # sum

    return jax.lax.scan(step, jnp.zeros(()), x.reshape(3, 2, 4))[0]


def test_parts_of_a_loss_without_gradients_are_confirmed_beside_another_stop() -> None:
    left, right, first = compared(torch_accumulated, jax_accumulated)
    assert (left.endswith("# sum"), right.endswith("# sum")) == (True, True)
    assert [(c.code, c.confirmed) for c in first.causes] == [("accumulation", True)]


class TorchTagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.cell = nn.Embedding(7, 4), nn.RNN(4, 4, batch_first=True)

    def forward(self, words: Any) -> Any:
        embedded = self.table(words)  # table
        return self.cell(embedded)[0]


def jax_tagger(p: Any, words: Any) -> Any:
    def step(h: Any, x: Any) -> tuple[Any, Any]:
        h = jnp.tanh(x @ p["cell"]["wx"] + p["cell"]["bx"] + h @ p["cell"]["wh"] + p["cell"]["bh"])
        return h, h

    xs = jax.lax.stop_gradient(p["table"])[words].swapaxes(0, 1)  # table
    return jax.lax.scan(step, jnp.zeros((len(words), 4)), xs)[1].swapaxes(0, 1)


def test_a_table_that_is_frozen_belongs_to_its_layer() -> None:
    torch.manual_seed(0)
    model, words = TorchTagger(), np.arange(15).reshape(3, 5) % 7
    of = {n: jnp.asarray(v.detach().numpy()) for n, v in model.named_parameters()}
    params = {
        "table": of["table.weight"],
        "cell": {
            "wx": of["cell.weight_ih_l0"].T,
            "bx": of["cell.bias_ih_l0"],
            "wh": of["cell.weight_hh_l0"].T,
            "bh": of["cell.bias_hh_l0"],
        },
    }
    left = stablenum_torch.program(lambda i: (model(i) ** 2).mean(), torch.tensor(words), model=model)
    right = stablenum_jax.program(lambda p, i: jnp.mean(jax_tagger(p, i) ** 2), params, jnp.asarray(words))
    first = first_of(left, right)
    assert first.left is not None
    assert (first.left.module, first.left.code.rpartition(" ")[2]) == ("table", "table")
    assert first.causes[0].code == "stopped_gradient"


def torch_rounded(w: Any, x: Any) -> Any:
    for _ in range(2):
        near = torch.round(4 * w) / 4
        passed = w + (near - w).detach()  # passes
        x = torch.tanh(x @ passed)
        w = w.T
    return x.square().mean()


def jax_rounded(w: Any, x: Any) -> Any:
    for _ in range(2):
        near = jnp.round(4 * w) / 4  # rounds
        x = jnp.tanh(x @ near)
        w = w.T
    return jnp.mean(x**2)


def test_rounding_that_only_one_side_passes_gradients_around_is_confirmed_in_two_layers() -> None:
    left, right, first = compared(torch_rounded, jax_rounded)
    assert (left.endswith("# passes"), right.endswith("# rounds")) == (True, True)
    assert [(c.code, c.confirmed) for c in first.causes] == [("straight_through_missing", True)]
