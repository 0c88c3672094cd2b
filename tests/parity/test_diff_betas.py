"""``stablenum.diff`` on optimizers that part after the first step, or of which one leaves parameters out."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn

import stablenum
import stablenum_jax
import stablenum_torch

X = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
Y = np.arange(8) % 3


def in_torch(kind: type[torch.optim.Optimizer], *, clip: float = 0.0, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
    optimizer = kind(model.parameters(), lr=1e-2, **options)  # type: ignore[call-arg]
    if clip:
        optimizer.register_step_pre_hook(lambda *_: clipped(model, clip))
    return stablenum_torch.program(
        lambda x, y: nn.functional.cross_entropy(model(x), y),
        torch.tensor(X),
        torch.tensor(Y),
        model=model,
        optimizer=optimizer,
    )


def clipped(model: nn.Module, largest: float) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), largest)


def jax_loss(p: Any, x: Any, y: Any) -> Any:
    logits = jnp.tanh(x @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


SHAPES = {"w1": (6, 12), "b1": (12,), "w2": (12, 3), "b2": (3,)}
IN_JAX = jax_loss, {k: jnp.zeros(s) for k, s in SHAPES.items()}, jnp.asarray(X), jnp.asarray(Y)


def adamw(b2: float = 0.999, mask: Any = None) -> Any:
    return optax.chain(
        optax.scale_by_adam(b2=b2),  # moments
        optax.add_decayed_weights(0.1, mask=mask),  # decay
        optax.scale_by_learning_rate(1e-2),  # rate
    )


def test_other_betas_are_named_at_the_part_of_the_optimizer_that_has_them() -> None:
    left = in_torch(torch.optim.AdamW, betas=(0.9, 0.95), weight_decay=0.1)
    report = stablenum.diff(left, stablenum_jax.program(*IN_JAX, optimizer=adamw()), steps=3)
    first = report.first
    assert first is not None
    assert first.step == 2
    assert first.left is not None
    assert first.right is not None
    assert (report.causes[0].code, report.causes[0].confirmed) == ("betas", True)
    assert report.causes[0].sentence == "beta2 is 0.95 on the left and 0.999 on the right."
    assert "kind(model.parameters()" in first.left.code
    assert first.right.code.endswith("# moments")
    assert str(first.right.operation).startswith("optax.scale_by_adam: ")
    assert len(report.differences) == 1, "the same difference in step 3 is no other one"


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_betas_of_two_programs_of_torch_are_recovered_after_clipping(
    kind: type[torch.optim.Optimizer],
) -> None:
    left = in_torch(kind, clip=0.3, betas=(0.8, 0.999), weight_decay=0.1)
    right = in_torch(kind, clip=0.3, betas=(0.9, 0.999), weight_decay=0.1)
    report = stablenum.diff(left, right, steps=2)
    assert report.causes[0].sentence == "beta1 is 0.8 on the left and 0.9 on the right."


def test_another_momentum_is_named() -> None:
    report = stablenum.diff(
        in_torch(torch.optim.SGD, momentum=0.9),
        stablenum_jax.program(*IN_JAX, optimizer=optax.sgd(1e-2, momentum=0.8)),
        steps=2,
    )
    assert report.causes[0].sentence == "the momentum is 0.9 on the left and 0.8 on the right."


def test_an_epsilon_is_one_difference_of_all_steps() -> None:
    left = in_torch(torch.optim.AdamW, weight_decay=0.1)
    report = stablenum.diff(
        left, stablenum_jax.program(*IN_JAX, optimizer=optax.adamw(1e-2, eps=1e-6, weight_decay=0.1)), steps=3
    )
    assert [d.step for d in report.differences] == [1]
    assert report.causes[0].code == "epsilon_value"
    assert report.causes[0].remedy.endswith("the default of Adam is 1e-8 in torch and optax.")


def test_betas_beside_an_epsilon_are_a_second_difference() -> None:
    left = in_torch(torch.optim.AdamW, weight_decay=0.1)
    right = stablenum_jax.program(*IN_JAX, optimizer=optax.adamw(1e-2, b2=0.95, eps=1e-6, weight_decay=0.1))
    report = stablenum.diff(left, right, steps=3)
    assert [(d.step, d.causes[0].code) for d in report.differences] == [(1, "epsilon_value"), (2, "betas")]


def test_a_mask_of_the_decay_is_placed_at_the_decay() -> None:
    left = in_torch(torch.optim.AdamW, weight_decay=0.1)
    mask = {"w1": True, "b1": False, "w2": True, "b2": False}
    first = stablenum.diff(left, stablenum_jax.program(*IN_JAX, optimizer=adamw(mask=mask))).first
    assert first is not None
    assert first.causes[0].code == "decay_excluded"
    assert first.left is not None
    assert first.right is not None
    assert first.left.operation == "torch.optim.AdamW: mul"
    assert str(first.right.operation).startswith("optax.add_decayed_weights: ")
    assert first.right.code.endswith("# decay")


def test_an_optimizer_without_decay_has_no_such_operation() -> None:
    left = in_torch(torch.optim.AdamW, weight_decay=0.1)
    first = stablenum.diff(left, stablenum_jax.program(*IN_JAX, optimizer=optax.adam(1e-2))).first
    assert first is not None
    assert first.causes[0].code == "decay_coupling"
    assert first.right is not None
    assert first.right.operation is None
    assert "optax.adam(1e-2)" in first.right.code
