"""``stablenum.diff`` on layers whose weights hide what they compute, and on differences that losses hide."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import linen, nnx
from torch import nn

import stablenum
import stablenum_jax
import stablenum_torch

RNG = np.random.default_rng(0)
IMAGES = RNG.normal(1.0, 2.0, size=(3, 8, 4, 4)).astype(np.float32)
LAST = np.ascontiguousarray(IMAGES.transpose(0, 2, 3, 1))
SCALE, SHIFT = (RNG.normal(1.0, 0.3, size=8).astype(np.float32) for _ in range(2))
MEAN, SPREAD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def normed(layer: nn.Module) -> Any:
    """A program that uses a layer three times, so that to mend one use mends nothing."""
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(SCALE))
        layer.bias.copy_(torch.tensor(SHIFT))

    def loss(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.sin(layer(x))
        return x.square().mean()

    return stablenum_torch.program(loss, torch.tensor(IMAGES), model=layer)


def norm_in_jax(norm: Any) -> Any:
    def loss(p: Any, x: Any) -> Any:
        for _ in range(3):
            x = jnp.sin(norm(p, x))
        return jnp.mean(x**2)

    return stablenum_jax.program(loss, {"scale": SCALE, "shift": SHIFT}, LAST)


def cause_of(left: Any, right: Any, **options: Any) -> Any:
    report = stablenum.diff(left, right, **options)
    assert not report.ok
    return report.causes[0]


def test_running_statistics_in_each_of_several_layers() -> None:
    def by_running(p: Any, x: Any) -> Any:
        def batch_norm(x: Any) -> Any:
            mean, spread = (jnp.asarray(np.linspace(a, a + 1, 8), jnp.float32) for a in (0.1, 0.9))
            return (x - mean) * jax.lax.rsqrt(spread + 1e-5) * p["scale"] + p["shift"]

        return batch_norm(x)

    cause = cause_of(normed(nn.BatchNorm2d(8)), norm_in_jax(by_running))

    assert (cause.code, cause.confirmed) == ("running_statistics", True)
    assert cause.sentence.startswith("the left program normalises by the batch, the right one by running")


def test_the_epsilon_of_a_batch_norm_has_the_same_default_in_both() -> None:
    def by_batch(p: Any, x: Any) -> Any:
        def batch_norm(x: Any) -> Any:
            mean, spread = x.mean((0, 1, 2)), x.var((0, 1, 2))
            return (x - mean) * jax.lax.rsqrt(spread + 1e-3) * p["scale"] + p["shift"]

        return batch_norm(x)

    cause = cause_of(normed(nn.BatchNorm2d(8)), norm_in_jax(by_batch))

    assert (cause.code, cause.confirmed) == ("epsilon_value", True)
    assert cause.remedy.endswith("the default is 1e-5 in torch and flax."), cause.remedy
    assert linen.BatchNorm.epsilon == 1e-5
    assert inspect.signature(nnx.BatchNorm.__init__).parameters["epsilon"].default == 1e-5


@pytest.mark.parametrize(
    ("axes", "told"),
    [
        ((1, 2, 3), "group_norm (groups 2, channels 2 apart, epsilon 1e-05)"),
        ((4,), "group_norm (groups 4, at each position, epsilon 1e-05)"),
    ],
)
def test_groups_of_other_channels_in_each_of_several_layers(axes: tuple[int, ...], told: str) -> None:
    def grouped(p: Any, x: Any) -> Any:
        parts = x.reshape(3, 4, 4, 4, 2)
        mean = jnp.mean(parts, axes, keepdims=True)
        spread = jnp.mean((parts - mean) ** 2, axes, keepdims=True)
        y = ((parts - mean) / jnp.sqrt(spread + 1e-5)).reshape(x.shape)
        return y * p["scale"] + p["shift"]

    cause = cause_of(normed(nn.GroupNorm(4, 8)), norm_in_jax(grouped))

    assert (cause.code, cause.confirmed) == ("norm_axis", True)
    assert cause.sentence.endswith(told + "."), cause.sentence


def test_an_epsilon_that_moves_gradients_and_hardly_the_loss() -> None:
    """The loss moves by less than what is taken for rounding, and the gradients by more."""
    weight = RNG.normal(size=(8, 6)).astype(np.float32)
    x = (30 * RNG.normal(size=(4, 8))).astype(np.float32)
    w = torch.tensor(weight, requires_grad=True)
    v = torch.tensor(SCALE, requires_grad=True)

    def of_torch(x: torch.Tensor) -> torch.Tensor:
        h = nn.functional.layer_norm(x * v, (8,), eps=1e-12)
        return 1e3 + (h @ w).square().mean()

    def of_jax(p: Any, x: Any) -> Any:
        h = linen.LayerNorm(epsilon=1e-3, use_bias=False, use_scale=False).apply({}, x * p["v"])
        return 1e3 + jnp.mean((h @ p["w"]) ** 2)

    report = stablenum.diff(
        stablenum_torch.program(of_torch, torch.tensor(x)),
        stablenum_jax.program(of_jax, {"v": SCALE, "w": weight}, x),
    )
    assert not report.ok
    assert report.first.left.phase == report.first.right.phase == "forward", str(report)
    assert report.causes[0].code == "epsilon_value"
    assert "epsilon 0.001" in report.causes[0].sentence


def test_numbers_written_in_a_tensor_that_the_loss_names_are_those_that_were_meant() -> None:
    """In float32 they are off by 3e-8, as the numbers of a jaxpr are, which are restored, too."""
    pixels = RNG.integers(0, 256, (2, 4, 4, 3)).astype(np.uint8)
    kernel = RNG.normal(size=(3, 5)).astype(np.float32)
    w, mean, spread = torch.tensor(kernel, requires_grad=True), torch.tensor(MEAN), torch.tensor(SPREAD)

    def of_jax(p: Any, x: Any) -> Any:
        return jnp.mean(jnp.tanh((x / 255.0 - jnp.asarray(MEAN)) / jnp.asarray(SPREAD) @ p["w"]))

    report = stablenum.diff(
        stablenum_torch.program(
            lambda x: torch.tanh((x / 255 - mean) / spread @ w).mean(), torch.tensor(pixels)
        ),
        stablenum_jax.program(of_jax, {"w": kernel}, jnp.asarray(pixels)),
    )
    assert report.ok, str(report)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(8, 8), nn.LayerNorm(8, eps=1e-6)
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(self.up(x))
        return y


def test_a_scale_that_was_not_carried_over_is_named() -> None:
    torch.manual_seed(0)
    model, x = Normed(), RNG.normal(size=(4, 8)).astype(np.float32)
    kept = {n: p.detach().numpy() for n, p in model.named_parameters()}
    params = {
        "up": {"kernel": kept["up.weight"].T, "bias": kept["up.bias"]},
        "norm": {"scale": np.ones(8, np.float32), "bias": kept["norm.bias"]},
    }

    def of_jax(p: Any, x: Any) -> Any:
        h = x @ p["up"]["kernel"] + p["up"]["bias"]
        return jnp.mean(jnp.exp(linen.LayerNorm().apply({"params": p["norm"]}, h)))

    report = stablenum.diff(
        stablenum_torch.program(lambda x: model(x).exp().mean(), torch.tensor(x), model=model),
        stablenum_jax.program(of_jax, params, x),
        weights="as they are",
    )
    cause = report.causes[0]
    assert report.notes[0] == (
        "These parameters of the right program hold other numbers than their counterparts on the left: "
        "norm.scale."
    )
    assert (cause.code, cause.confirmed) == ("other_input", True), cause
    assert "parameter norm.weight" in cause.sentence
    assert "parameter norm.scale" in cause.sentence


def test_other_entries_of_the_same_table() -> None:
    table, offsets = RNG.normal(size=(12, 6)).astype(np.float32), np.array([0, 4, 8])
    ids, head = RNG.integers(0, 4, (5, 3)), RNG.normal(size=(18, 4)).astype(np.float32)
    w, v = torch.tensor(table, requires_grad=True), torch.tensor(head, requires_grad=True)

    def of_torch(i: torch.Tensor) -> torch.Tensor:
        rows = nn.functional.embedding(i + torch.tensor(offsets), w)
        return torch.tanh(rows.flatten(1) @ v).square().mean()

    def of_jax(p: Any, i: Any) -> Any:
        def of_one(row: Any) -> Any:
            return p["w"][row + jnp.asarray(offsets // 2)].reshape(-1) @ p["v"]

        return jnp.mean(jnp.tanh(jax.vmap(of_one)(i)) ** 2)

    cause = cause_of(
        stablenum_torch.program(of_torch, torch.tensor(ids)),
        stablenum_jax.program(of_jax, {"w": table, "v": head}, jnp.asarray(ids)),
    )
    assert (cause.code, cause.confirmed) == ("other_input", True), cause
    assert "look up different entries of the same table" in cause.sentence


def test_a_sum_divided_by_its_weights_and_by_its_count() -> None:
    weight = RNG.normal(size=(8, 1)).astype(np.float32)
    x, y = RNG.normal(size=(6, 8)).astype(np.float32), np.array([0, 1, 1, 0, 1, 0], np.float32)
    of_rows = np.array([1, 3, 1, 2, 1, 1], np.float32)
    w = torch.tensor(weight, requires_grad=True)

    def of_torch(x: Any, y: Any) -> Any:
        rows = nn.functional.binary_cross_entropy_with_logits(
            (x @ w)[:, 0], y, weight=torch.tensor(of_rows), reduction="mean"
        )
        return rows + w.square().sum()

    def of_jax(p: Any, x: Any, y: Any) -> Any:
        rows = optax.sigmoid_binary_cross_entropy((x @ p["w"])[:, 0], y) * of_rows
        return jnp.sum(rows) / jnp.sum(of_rows) + jnp.sum(p["w"] ** 2)

    cause = cause_of(
        stablenum_torch.program(of_torch, torch.tensor(x), torch.tensor(y)),
        stablenum_jax.program(of_jax, {"w": weight}, x, y),
    )
    assert (cause.code, cause.confirmed) == ("reduction", True), cause
    assert cause.sentence == "the right program divides the sum by 9, the other one by 6."


def test_decay_rates_of_squares_that_are_not_corrected() -> None:
    weight, x = (RNG.normal(size=(4, 8)).astype(np.float32) for _ in range(2))
    w = torch.tensor(weight, requires_grad=True)

    cause = cause_of(
        stablenum_torch.program(
            lambda x: (x * w).sin().sum(), torch.tensor(x), optimizer=torch.optim.RMSprop([w], lr=1e-3)
        ),
        stablenum_jax.program(
            lambda p, x: jnp.sin(x * p["w"]).sum(), {"w": weight}, x,
            optimizer=optax.rmsprop(1e-3, eps=1e-8, eps_in_sqrt=False),
        ),
    )  # fmt: skip
    assert (cause.code, cause.confirmed) == ("betas", True)
    assert cause.sentence == "the squares decay by 0.99 on the left and by 0.9 on the right."


def test_dropped_units_come_before_the_factor_of_the_others() -> None:
    weight, x = (RNG.normal(size=(8, 8)).astype(np.float32) for _ in range(2))
    w = torch.tensor(weight, requires_grad=True)
    kept = RNG.random((8, 8)) < 0.8

    cause = cause_of(
        stablenum_torch.program(lambda x: (x @ w).sin().square().sum(), torch.tensor(x)),
        stablenum_jax.program(
            lambda p, x: jnp.sum(jnp.sin(jnp.where(kept, (x @ p["w"]) / 0.8, 0.0)) ** 2), {"w": weight}, x
        ),
    )
    assert (cause.code, cause.sentence) == ("dropout", "one side drops units.")


@pytest.mark.parametrize("rows", [[2, 0, 1], [0, 1, 2]])
def test_a_batch_that_was_sorted_goes_on_in_its_own_order(rows: list[int]) -> None:
    """What one side reads in another order of rows can still take the place of the other side's value."""
    weight, x = RNG.normal(size=(4, 4)).astype(np.float32), RNG.normal(size=(3, 4)).astype(np.float32)
    w = torch.tensor(weight, requires_grad=True)

    def of_torch(x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(x[torch.tensor(rows)] @ w)  # forward
        return (h.sin() @ w).square().sum()

    def of_jax(p: Any, x: Any) -> Any:
        h = x @ p["w"]
        return jnp.sum((jnp.sin(h) @ p["w"]) ** 2)

    report = stablenum.diff(
        stablenum_torch.program(of_torch, torch.tensor(x)),
        stablenum_jax.program(of_jax, {"w": weight}, x),
    )
    assert not report.ok
    assert report.first.left.code == "h = torch.tanh(x[torch.tensor(rows)] @ w)  # forward"
    assert not any("could not be set right in the loss" in note for note in report.notes)


def test_bags_of_a_table() -> None:
    """In float32 the kernel keeps no offsets of the bags, and in float64 it does."""
    table = RNG.normal(size=(12, 6)).astype(np.float32)
    ids, offsets = RNG.integers(0, 12, 9), np.array([0, 2, 5])
    bags = np.repeat(np.arange(3), np.diff([*offsets, 9]))
    w = torch.tensor(table, requires_grad=True)

    def of_torch(i: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return torch.tanh(nn.functional.embedding_bag(i, w, at, mode="mean")).square().sum()

    def of_jax(p: Any, i: Any) -> Any:
        sums = jax.ops.segment_sum(p["w"][i], bags, 3)
        return jnp.sum(jnp.tanh(sums / np.bincount(bags)[:, None].astype(np.float32)) ** 2)

    report = stablenum.diff(
        stablenum_torch.program(of_torch, torch.tensor(ids), torch.tensor(offsets)),
        stablenum_jax.program(of_jax, {"w": table}, jnp.asarray(ids)),
    )
    assert report.ok, str(report)


@pytest.mark.parametrize("factor", [1.0, 1.0 + 1e-5])
def test_a_table_of_float32_stands_for_what_the_other_side_computes(factor: float) -> None:
    """But a table of other numbers is a difference."""
    angles = np.arange(8.0)[:, None] * np.exp(-np.arange(4) * np.log(10000.0) / 3)
    table = torch.tensor((factor * np.sin(angles)).astype(np.float32))
    x = RNG.normal(size=(8, 4)).astype(np.float32)
    weight = RNG.normal(size=(4, 4)).astype(np.float32)
    w = torch.tensor(weight, requires_grad=True)

    def of_jax(p: Any, x: Any) -> Any:
        angles = jnp.arange(8.0)[:, None] * jnp.exp(-jnp.arange(4) * (np.log(10000.0) / 3))
        return jnp.sum(jnp.sin(100 * ((x + jnp.sin(angles)) @ p["w"])))

    report = stablenum.diff(
        stablenum_torch.program(lambda x: torch.sin(100 * ((x + table) @ w)).sum(), torch.tensor(x)),
        stablenum_jax.program(of_jax, {"w": weight}, x),
    )
    assert report.ok == (factor == 1.0), str(report)
    assert (report.verdict == "the same but for constants in float32") == report.ok


@pytest.mark.parametrize("base", [10000.0, 10010.0])
def test_two_tables_that_differ_by_rounding_in_float32_are_taken_for_one(base: float) -> None:
    """But those of another base are not."""
    steps, even = torch.arange(9.0)[:, None], torch.arange(0, 8, 2)
    angles = steps * torch.exp(even * (-np.log(10000.0) / 8))
    table = torch.cat([angles.sin(), angles.cos()], 1)
    exact = np.arange(9)[:, None] * base ** (-np.arange(0, 8, 2) / 8)
    other = np.concatenate([np.sin(exact), np.cos(exact)], 1).astype(np.float32)
    assert not np.array_equal(table.numpy(), other)
    x, weight = (RNG.normal(size=size).astype(np.float32) for size in ((9, 8), (8, 8)))
    model = nn.Linear(8, 8, bias=False)
    model.weight.data = torch.tensor(weight.T.copy())
    report = stablenum.diff(
        stablenum_torch.program(
            lambda x: torch.sin(9 * model(x + table)).sum(), torch.tensor(x), model=model
        ),
        stablenum_jax.program(lambda p, x: jnp.sum(jnp.sin(9 * ((x + other) @ p["w"]))), {"w": weight}, x),
    )
    assert report.ok == (base == 10000.0), str(report)
    assert (report.verdict == "the same but for constants in float32") == report.ok


@pytest.mark.parametrize("layout", ["halves", "neighbours"])
@pytest.mark.parametrize("base", [10000.0, 10001.0])
def test_angles_may_be_rounded_at_another_stage(layout: str, base: float) -> None:
    """One side keeps the frequencies in float32 and computes the angles, the other one keeps sines of all
    positions, computed in float32 throughout, in another order."""
    frequencies = torch.tensor((10000.0 ** -(np.arange(0, 8, 2) / 8)).astype(np.float32))
    angles = (np.arange(64)[:, None] * base ** -(np.arange(0, 8, 2) / 8)).astype(np.float32)
    spread = (lambda x: np.concatenate([x, x], -1)) if layout == "halves" else (lambda x: np.repeat(x, 2, -1))
    table = np.concatenate([np.sin(spread(angles)), np.cos(spread(angles))], -1)
    x, weight = RNG.normal(size=(2, 12, 8)).astype(np.float32), RNG.normal(size=(8, 8)).astype(np.float32)
    w = torch.tensor(weight, requires_grad=True)

    def of_torch(x: torch.Tensor) -> torch.Tensor:
        a = torch.arange(12)[None, :, None] * frequencies
        a = torch.cat([a, a], -1) if layout == "halves" else a.repeat_interleave(2, -1)
        return torch.sin(9 * ((x * a.cos() + torch.tanh(x) * a.sin()) @ w)).sum()

    def of_jax(p: Any, x: Any) -> Any:
        sin, cos = jnp.split(jnp.asarray(table)[jnp.broadcast_to(jnp.arange(12), (2, 12))], 2, -1)
        return jnp.sum(jnp.sin(9 * ((x * cos + jnp.tanh(x) * sin) @ p["w"])))

    report = stablenum.diff(
        stablenum_torch.program(of_torch, torch.tensor(x)), stablenum_jax.program(of_jax, {"w": weight}, x)
    )
    assert report.verdict == ("the same but for constants in float32" if base == 10000.0 else "different")
