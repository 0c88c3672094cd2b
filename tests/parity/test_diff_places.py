"""The line of a difference where the operations of the two programs do not correspond one to one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from torch import nn

import stablenum
import stablenum_jax
import stablenum_torch
from stablenum.diagnosis.diff.differences import Difference

W = np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32)
X = np.random.default_rng(1).normal(size=(6, 4)).astype(np.float32)


def first_of(left: Any, right: Any) -> Difference:
    first = stablenum.diff(left, right).first
    assert first is not None
    assert first.left is not None
    assert first.right is not None
    return first


def compared(
    of_torch: Callable[[Any, Any], Any], of_jax: Callable[[Any, Any], Any]
) -> tuple[str, str, Difference]:
    """Return the lines of the first difference of two functions of a matrix and the data."""
    w = torch.tensor(W, requires_grad=True)
    left = stablenum_torch.program(lambda x: of_torch(w, x), torch.tensor(X))
    first = first_of(left, stablenum_jax.program(of_jax, jnp.asarray(W), jnp.asarray(X)))
    assert first.left is not None
    assert first.right is not None
    return first.left.code, first.right.code, first


# --- loops against whole batches ---------------------------------------------------------------------------


def torch_whole(w: Any, x: Any) -> Any:
    h = torch.tanh(x @ w)
    return (h @ w.T).square().mean()  # torch


def jax_loop(w: Any, x: Any, *, stop: bool = False, summed: bool = False) -> Any:
    def step(total: Any, part: Any) -> Any:
        h = jnp.tanh(part @ w)
        y = jax.lax.stop_gradient(h) @ w.T if stop else h @ w.T  # stop
        return total + jnp.mean(y**2), None

    total, _ = jax.lax.scan(step, jnp.zeros(()), x.reshape(3, 2, 4))
    return total if summed else total / 3  # sum


def test_a_loop_over_micro_batches_is_the_same_program() -> None:
    w = torch.tensor(W, requires_grad=True)
    left = stablenum_torch.program(lambda x: torch_whole(w, x), torch.tensor(X))
    assert stablenum.diff(left, stablenum_jax.program(jax_loop, jnp.asarray(W), jnp.asarray(X))).ok


def test_a_sum_over_micro_batches_is_placed_where_they_are_reduced() -> None:
    left, right, _ = compared(torch_whole, lambda w, x: jax_loop(w, x, summed=True))
    assert left.endswith("# torch")
    assert "jnp.mean(y**2)" in right or right.endswith("# sum")


def test_a_gradient_that_only_a_loop_stops_is_placed() -> None:
    left, right, first = compared(torch_whole, lambda w, x: jax_loop(w, x, stop=True))
    assert (left.endswith("# torch"), right.endswith("# stop")) == (True, True)
    assert first.causes[0].code == "stopped_gradient"
    assert first.causes[0].confirmed


# --- operations that one side lacks ------------------------------------------------------------------------


def torch_scaled(w: Any, x: Any) -> Any:
    h = (x @ w).relu()
    h = h / 0.75  # torch
    return nn.functional.layer_norm(torch.cat((h, x @ w), -1), (10,)).exp().mean()


def jax_not_scaled(w: Any, x: Any) -> Any:
    h = jax.nn.relu(x @ w)  # jax
    both = jnp.concatenate((h, x @ w), -1)
    centred = both - both.mean(-1, keepdims=True)
    return jnp.mean(jnp.exp(centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)))


def test_an_operation_is_missing_if_its_value_makes_the_programs_agree() -> None:
    left, right, first = compared(torch_scaled, jax_not_scaled)
    assert (left.endswith("# torch"), right.endswith("# jax")) == (True, True)
    assert first.right is not None
    assert first.right.operation is None


class TorchNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = TorchBlock()

    def forward(self, x: Any) -> Any:
        return self.inner(x).square().mean()


class TorchBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return x + nn.functional.silu(self.linear(x))


class NnxBlock(nnx.Module):
    def __init__(self) -> None:
        self.linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    def __call__(self, x: Any) -> Any:
        return x + self.linear(x)


class NnxNet(nnx.Module):
    def __init__(self) -> None:
        self.inner = NnxBlock()

    def __call__(self, x: Any) -> Any:
        return jnp.mean(self.inner(x) ** 2)


def test_an_operation_is_missing_in_the_module_whose_code_lacks_it() -> None:
    model = TorchNet()
    left = stablenum_torch.program(lambda x: model(x), torch.tensor(X), model=model)
    first = first_of(left, stablenum_jax.program(lambda m, x: m(x), NnxNet(), jnp.asarray(X)))
    assert first.left is not None
    assert first.right is not None
    assert (first.left.operation, first.left.module) == ("silu", "inner")
    assert (first.right.operation, first.right.module) == (None, "inner")


def test_a_formula_of_einsum_is_no_module() -> None:
    left, right, first = compared(
        lambda w, x: (x @ w).exp().mean(),
        lambda w, x: jnp.mean(jnp.exp(jnp.einsum("bi,bi,io->bo", x, x, w))),
    )
    assert "exp().mean()" in left
    assert "jnp.einsum" in right
    assert first.right is not None
    assert first.right.module == ""


# --- data --------------------------------------------------------------------------------------------------


def test_data_that_enters_before_anything_else_differs_comes_first() -> None:
    def of_torch(w: Any, x: Any) -> Any:
        y = x / x.norm(dim=-1, keepdim=True)  # torch
        return ((y @ w).exp() @ w.T).square().mean() + 0.1 * w.abs().sum()

    def of_jax(w: Any, x: Any) -> Any:
        y = x / jnp.abs(x).sum(-1, keepdims=True)  # jax
        return jnp.mean((jnp.exp(y @ w) @ w.T) ** 2) + 0.1 * jnp.sum(w**2)

    left, right, _ = compared(of_torch, of_jax)
    assert (left.endswith("# torch"), right.endswith("# jax")) == (True, True)


def test_memory_that_nothing_was_written_to_is_the_same_in_every_run() -> None:
    convolution = nn.Conv1d(1, 1, 3, padding=1, padding_mode="circular", bias=False)

    def of_jax(w: Any, x: Any) -> Any:
        padded = jnp.pad(x, ((0, 0), (1, 1)))
        y = sum(padded[:, i : i + 4] * w["weight"][0, 0, i] for i in range(3))
        return jnp.mean(y**2)

    left = stablenum_torch.program(
        lambda x: convolution(x[:, None]).square().mean(), torch.tensor(X), model=convolution
    )
    report = stablenum.diff(
        left, stablenum_jax.program(of_jax, {"weight": np.ones((1, 1, 3), "f")}, jnp.asarray(X))
    )
    assert not report.ok
    assert not [note for note in report.notes if "not the same when it runs again" in note]


# --- what noise shows ---------------------------------------------------------------------------------------


def test_indices_that_a_function_computes_in_every_call_depend_on_no_rounding() -> None:
    @jax.jit
    def doubled(x: Any) -> Any:
        return x[jnp.floor(jnp.arange(8) / 2).astype(int)]

    def loss(scale: float) -> Any:
        def of(w: Any, x: Any) -> Any:
            h = jnp.tanh(x[:4] @ w)
            return jnp.mean(jnp.exp(doubled(h)) + scale * doubled(jnp.sin(h)))

        return stablenum_jax.program(of, jnp.asarray(W), jnp.asarray(X))

    assert not stablenum.diff(loss(1.0), loss(1.001)).ok


# --- norms ------------------------------------------------------------------------------------------------


class TwoNorms(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.GroupNorm(8, num_groups=2, rngs=rngs)
        self.conv = nnx.Conv(8, 8, (3, 3), rngs=rngs)
        self.second = nnx.GroupNorm(8, num_groups=2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        h = self.first(x)
        return self.second(jax.nn.silu(self.conv(h)))


def test_an_epsilon_is_confirmed_in_the_first_of_several_norms_that_have_it() -> None:
    x = np.random.default_rng(2).normal(size=(2, 8, 4, 4)).astype(np.float32)
    layers = nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3, padding=1), nn.SiLU(), nn.GroupNorm(2, 8)
    model = nn.Sequential(*layers)
    left = stablenum_torch.program(lambda x: model(x).exp().mean(), torch.tensor(x), model=model)
    right = stablenum_jax.program(
        lambda n, x: jnp.mean(jnp.exp(n(jnp.moveaxis(x, 1, -1)))), TwoNorms(nnx.Rngs(0)), x
    )
    first = first_of(left, right)
    assert (first.causes[0].code, first.causes[0].confirmed) == ("epsilon_value", True)


def torch_variance(w: Any, x: Any) -> Any:
    def normal(h: Any) -> Any:
        centred = h - h.mean(-1, keepdim=True)
        variance = h.var(-1, keepdim=True)  # torch
        return w[0, 0] * centred / torch.sqrt(variance + 1e-5)

    return (normal(x[:3] @ w) * normal(x[3:] @ w)).sin().mean()


def jax_variance(w: Any, x: Any) -> Any:
    def normal(h: Any) -> Any:
        centred = h - h.mean(-1, keepdims=True)
        variance = jnp.var(h, axis=-1, keepdims=True)  # jax
        return w[0, 0] * (centred / jnp.sqrt(variance + 1e-5))

    return jnp.mean(jnp.sin(normal(x[:3] @ w) * normal(x[3:] @ w)))


def test_a_variance_reads_what_its_call_reads() -> None:
    """In JAX a variance is opened into operations on the centred values, in PyTorch it is not."""
    left, right, first = compared(torch_variance, jax_variance)
    assert (left.endswith("# torch"), right.endswith("# jax")) == (True, True)
    assert (first.causes[0].code, first.causes[0].confirmed) == ("variance_correction", True)


class Enlarged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 8, 1), nn.GroupNorm(2, 8)

    def forward(self, x: Any) -> Any:
        y = nn.functional.interpolate(torch.tanh(self.conv(x)), scale_factor=2, mode="nearest")  # torch
        return self.norm(y)


class EnlargedToo(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(2, 8, (1, 1), rngs=rngs)
        self.norm = nnx.GroupNorm(8, num_groups=2, epsilon=1e-5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        y = jax.image.resize(jnp.tanh(self.conv(x)), (2, 8, 8, 8), "bilinear")  # jax
        return self.norm(y)


def test_a_mean_that_survives_a_difference_does_not_come_before_it() -> None:
    """Both ways of resizing leave the means of the images as they are."""
    x = np.random.default_rng(3).normal(size=(2, 2, 4, 4)).astype(np.float32)
    model = Enlarged()
    left = stablenum_torch.program(lambda x: model(x).exp().mean(), torch.tensor(x), model=model)
    right = stablenum_jax.program(
        lambda n, x: jnp.mean(jnp.exp(n(jnp.moveaxis(x, 1, -1)))), EnlargedToo(nnx.Rngs(0)), x
    )
    first = first_of(left, right)
    assert first.left is not None
    assert first.right is not None
    assert (first.left.code[-7:], first.right.code[-5:]) == ("# torch", "# jax")
    assert (first.causes[0].code, first.causes[0].confirmed) == ("resize_mode", True)


# --- parts of values ---------------------------------------------------------------------------------------


def torch_first(w: Any, x: Any) -> Any:
    h = torch.tanh(x.reshape(3, 2, 4) @ w)
    y = h[:, 0]  # torch
    return (y @ w.T).exp().sum()


def jax_average(w: Any, x: Any) -> Any:
    h = jnp.tanh(x.reshape(3, 2, 4) @ w)
    y = h.mean(axis=1)  # jax
    return jnp.sum(jnp.exp(y @ w.T))


def test_a_part_of_a_value_is_the_counterpart_of_a_mean() -> None:
    left, right, first = compared(torch_first, jax_average)
    assert (left.endswith("# torch"), right.endswith("# jax")) == (True, True)
    assert (first.causes[0].code, first.causes[0].confirmed) == ("other_function", True)


# --- masks -------------------------------------------------------------------------------------------------


def masked_by(diagonal: int, fill: float, scale: float = np.sqrt(5)) -> Callable[[Any, Any], Any]:
    def loss_fn(p: Any, x: Any) -> Any:
        q, k, v = x @ p["q"], x @ p["k"], x @ p["v"]
        scores = q @ k.T / scale
        keep = jnp.tril(jnp.ones((6, 6), bool), diagonal)
        scores = jnp.where(keep, scores, fill)  # mask
        return jnp.square(jax.nn.softmax(scores) @ v).mean()

    return loss_fn


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(4, 5, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x)[None, None] for f in (self.q, self.k, self.v))
        keep = torch.tril(torch.ones(6, 6, dtype=torch.bool))
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep)


@pytest.mark.parametrize("fill", [-np.inf, -1e9])
def test_a_mask_that_is_added_is_the_counterpart_of_one_that_is_chosen(fill: float) -> None:
    """The mask of one side in place of the scores of the other would set that right, too: it masks more."""
    model, data = Masked(), np.random.default_rng(2).normal(size=(6, 4)).astype(np.float32)
    left = stablenum_torch.program(lambda x: model(x).square().mean(), torch.tensor(data), model=model)
    parameters = {k: jnp.zeros((4, 5)) for k in "qkv"}
    report = stablenum.diff(left, stablenum_jax.program(masked_by(1, fill), parameters, data))
    first = report.first
    assert first is not None
    assert first.right is not None
    assert first.right.operation == "where"
    assert first.right.code.endswith("# mask")
    assert (report.causes[0].code, report.causes[0].confirmed) == ("mask_shifted", True)
    assert "15 of 36 entries are masked on the left, 10 on the right" in report.causes[0].evidence
    assert stablenum.diff(left, stablenum_jax.program(masked_by(0, fill), parameters, data)).ok


def test_what_is_set_right_in_the_forward_pass_alone_is_said_to_be() -> None:
    model, data = Masked(), np.random.default_rng(2).normal(size=(6, 4)).astype(np.float32)
    left = stablenum_torch.program(lambda x: model(x).square().mean(), torch.tensor(data), model=model)
    parameters = {k: jnp.zeros((4, 5)) for k in "qkv"}
    report = stablenum.diff(left, stablenum_jax.program(masked_by(0, -np.inf, 5.0), parameters, data))
    assert report.causes[0].code == "scale"
    assert "the two sides agree in what follows" in report.causes[0].evidence
    (note,) = report.notes
    assert note.startswith("The first difference could be set right in the forward pass, but not in the grad")


def test_a_difference_that_cannot_be_set_right_is_named_by_its_number() -> None:
    labels, kept = np.array([0, 2, 1, 4, 3, 2]), np.array([1.0, 0, 1, 1, 0, 1], np.float32)

    def of_torch(w: Any, x: Any) -> Any:
        ignored = torch.tensor(np.where(kept > 0, labels, -100))
        logits = 2 * torch.tanh(x @ w)
        return nn.functional.cross_entropy(logits, ignored)

    def of_jax(w: Any, x: Any) -> Any:
        logits = 3 * jnp.tanh(x @ w)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        others = np.array([1.0, 1, 1, 0, 1, 1], np.float32)
        return (losses * others).sum() / others.sum()

    w = torch.tensor(W, requires_grad=True)
    left = stablenum_torch.program(lambda x: of_torch(w, x), torch.tensor(X))
    report = stablenum.diff(left, stablenum_jax.program(of_jax, jnp.asarray(W), jnp.asarray(X)))
    assert [d.causes[0].code for d in report.differences] == ["scale", "ignored_labels"], str(report)
    assert report.notes[-1] == (
        "Difference 2 could not be set right in the loss, so that others may be hidden behind it."
    )


# --- updates -----------------------------------------------------------------------------------------------


def make_momentum(**options: Any) -> Any:
    clipping = optax.clip_by_global_norm(1e3)
    return optax.chain(
        clipping,
        optax.add_decayed_weights(options.pop("decay", 0.0)),  # decay
        optax.sgd(0.1, **options),  # descent
    )


def make_adam(decay: float = 0.0, epsilon: float = 1e-8) -> Any:
    return optax.chain(
        optax.scale_by_adam(eps=epsilon),  # moments
        optax.add_decayed_weights(decay),  # decay
        optax.scale_by_learning_rate(0.1),  # rate
    )


def tanh_loss(p: Any, x: Any) -> Any:
    return jnp.mean(jnp.exp(jnp.tanh(x @ p["w"])))


def make_warmup(ahead: int) -> Any:
    def rate(count: Any) -> Any:
        return 0.1 * (count + ahead) / 4

    return optax.chain(
        optax.trace(0.9),
        optax.scale_by_learning_rate(rate),  # schedule
    )


P = {"w": jnp.zeros((4, 5))}
# Cause -> the optimizer on the left, the program on the right, and the part of its optimizer that differs.
UPDATES: dict[str, tuple[Callable[[Any], Any], Callable[[], Any], str]] = {
    "decay_coupling": (
        lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.0),
        lambda: stablenum_jax.program(tanh_loss, P, X, optimizer=make_adam(decay=0.05)),
        "decay",
    ),
    "epsilon_value": (
        lambda p: torch.optim.Adam(p, 0.1),
        lambda: stablenum_jax.program(tanh_loss, P, X, optimizer=make_adam(epsilon=1e-3)),
        "moments",
    ),
    "nesterov": (
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
        lambda: stablenum_jax.program(tanh_loss, P, X, optimizer=make_momentum(momentum=0.9)),
        "descent",
    ),
    "schedule_offset": (
        lambda p: torch.optim.SGD(p, 0.1 / 4, momentum=0.9),
        lambda: stablenum_jax.program(tanh_loss, P, X, optimizer=make_warmup(2)),
        "schedule",
    ),
}


@pytest.mark.parametrize("code", UPDATES)
def test_an_update_is_placed_at_the_part_of_the_optimizer_that_differs(code: str) -> None:
    optimizer, right, part = UPDATES[code]
    model = nn.Linear(4, 5, bias=False)
    left = stablenum_torch.program(
        lambda x: torch.tanh(model(x)).exp().mean(),
        torch.tensor(X),
        model=model,
        optimizer=optimizer(model.parameters()),
    )
    first = first_of(left, right())
    assert first.causes[0].code == code
    assert first.left is not None
    assert first.right is not None
    assert first.left.code.startswith("lambda p: torch.optim.")
    assert first.right.code.endswith(f"# {part}")


def test_a_gradient_that_agrees_stays_no_difference_if_an_update_is_set_right() -> None:
    """The gradient with the decay of one side may take the place of the gradient alone of the other one."""
    model = nn.Linear(4, 5, bias=False)
    left = stablenum_torch.program(
        lambda x: torch.tanh(model(x)).exp().mean(),
        torch.tensor(X),
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), 0.1, weight_decay=0.05),
    )
    right = stablenum_jax.program(tanh_loss, P, X, optimizer=optax.adamw(0.1, weight_decay=0.05))
    report = stablenum.diff(left, right)
    places = [place for d in report.differences for place in (d.left, d.right)]
    assert {place.phase for place in places if place is not None} == {"update"}
    assert (report.causes[0].code, report.causes[0].confirmed) == ("decay_coupling", True)


# --- two calls beside one ---------------------------------------------------------------------------------


def torch_views(w: Any, x: Any) -> Any:
    """Both halves of the batch at once."""
    first, second = (nn.functional.gelu(x @ w) @ w.T).chunk(2)
    return (first.tanh() * second).mean()


def jax_views(w: Any, x: Any) -> Any:
    """One call for each half."""
    first, second = (jax.nn.gelu(part @ w) @ w.T for part in jnp.split(x, 2))
    return jnp.mean(jnp.tanh(first) * second)


def test_a_function_is_recognised_if_only_one_side_computes_it_at_once() -> None:
    left, right, difference = compared(torch_views, jax_views)
    assert "gelu" in left
    assert "gelu" in right
    cause = difference.causes[0]
    assert (cause.code, cause.confirmed) == ("gelu_variant", True)
