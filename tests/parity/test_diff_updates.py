"""``stablenum.diff`` on updates of a model some of whose gradients are nothing but rounding."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn

import stablenum
import stablenum_jax
import stablenum_torch

WIDTH, HEADS = 8, 2
X = np.random.default_rng(0).normal(size=(3, 5, WIDTH)).astype(np.float32)


class Attention(nn.Module):
    """The bias of its keys adds the same to all scores of a query: its gradient is 0 but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        out: torch.Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


def in_torch(
    kind: Any = torch.optim.AdamW,
    *,
    decay: float = 0.05,
    clip: float | None = None,
    warmup: int = 0,
    **options: Any,
) -> Any:
    torch.manual_seed(0)
    model = Attention()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = kind(groups, lr=1e-3, **options)
    if clip is not None:
        optimizer.register_step_pre_hook(
            lambda *_: (nn.utils.clip_grad_norm_(model.parameters(), clip), None)[1]
        )
    if warmup:
        rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup))
        optimizer.register_step_post_hook(lambda *_: rates.step())
    return stablenum_torch.program(
        lambda x: model(x).square().mean(), torch.tensor(X), model=model, optimizer=optimizer
    )


def jax_loss(p: Any, x: Any) -> Any:
    q, k, v = (
        jnp.einsum("btd,dhw->bhtw", x, p[n]["kernel"]) + p[n]["bias"][:, None]
        for n in ("query", "key", "value")
    )
    scores = jnp.einsum("bhqw,bhkw->bhqk", q, k) / (WIDTH // HEADS) ** 0.5
    y = jnp.einsum("bhqk,bhkw->bqhw", jax.nn.softmax(scores), v)
    y = jnp.einsum("bqhw,hwd->bqd", y, p["out"]["kernel"]) + p["out"]["bias"]
    return jnp.mean(y**2)


SPLIT = {"kernel": jnp.zeros((WIDTH, HEADS, WIDTH // HEADS)), "bias": jnp.zeros((HEADS, WIDTH // HEADS))}
JOINED = {"kernel": jnp.zeros((HEADS, WIDTH // HEADS, WIDTH)), "bias": jnp.zeros(WIDTH)}
IN_JAX = jax_loss, {"query": SPLIT, "key": SPLIT, "value": SPLIT, "out": JOINED}, jnp.asarray(X)


def kernels(parameters: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "kernel", parameters)


def adamw(rate: Any = 1e-3, decay: float = 0.05, **options: Any) -> Any:
    return optax.adamw(rate, weight_decay=decay, mask=kernels, **options)


def test_the_same_optimizer_agrees() -> None:
    assert stablenum.diff(in_torch(), stablenum_jax.program(*IN_JAX, optimizer=adamw()), steps=2).ok


FEWER = "the two sides decay 4 of the 8 parameters by different amounts"


@pytest.mark.parametrize(
    ("left", "right", "code", "sentence"),
    [
        ({}, adamw(1.02e-3), "scale", "the rate is 0.001 on the left and 0.00102 on the right."),
        ({}, adamw(2e-3), "scale", "the rate is 0.001 on the left and 0.002 on the right."),
        ({}, adamw(eps=1e-6), "epsilon_value", "the epsilon is 1e-08 on the left and 1e-06 on the right."),
        (
            {"kind": torch.optim.Adam},
            adamw(),
            "decay_coupling",
            "only one side adds the decay to the gradient.",
        ),
        (
            {},
            adamw(decay=1e-4),
            "decay_coupling",
            f"{FEWER}, such as key.kernel, out.kernel, query.kernel.",
        ),
        (
            {},
            optax.adamw(1e-3, weight_decay=0.05),
            "decay_excluded",
            "only the right side decays 3 of the 8 parameters, such as out.bias, query.bias, value.bias.",
        ),
    ],
)
def test_a_bias_whose_gradient_is_rounding_hides_no_cause(
    left: Any, right: Any, code: str, sentence: str
) -> None:
    report = stablenum.diff(in_torch(**left), stablenum_jax.program(*IN_JAX, optimizer=right))
    assert [(c.code, c.confirmed) for c in report.causes] == [(code, True)]
    assert report.causes[0].sentence == sentence
    assert len(report.differences) == 1, "other parameters show no other difference of the same update"


def in_parts() -> Any:
    return optax.chain(
        optax.scale_by_adam(),
        optax.add_decayed_weights(0.05, mask=kernels),
        optax.scale_by_learning_rate(2e-3),  # rate
    )


def test_a_rate_is_placed_at_the_part_that_multiplies_by_it() -> None:
    first = stablenum.diff(in_torch(), stablenum_jax.program(*IN_JAX, optimizer=in_parts())).first
    assert first is not None
    assert first.right is not None
    assert first.right.code.endswith("# rate")


def test_an_epsilon_of_the_clip_hides_no_decay() -> None:
    """PyTorch clips by the norm + 1e-6, which moves some updates of Adam by less than rounding explains."""
    right = optax.chain(optax.clip_by_global_norm(0.01), optax.adamw(1e-3, weight_decay=0.05))
    cause = stablenum.diff(in_torch(clip=0.01), stablenum_jax.program(*IN_JAX, optimizer=right)).causes[0]
    assert (cause.code, cause.confirmed) == ("decay_excluded", True)
    assert cause.sentence == (
        "only the right side decays 3 of the 8 parameters, such as out.bias, query.bias, value.bias."
    )


def test_a_warmup_that_begins_late_is_one_difference_and_no_missing_clip() -> None:
    right = optax.chain(optax.clip_by_global_norm(0.01), adamw(optax.linear_schedule(0.0, 1e-3, 4)))
    report = stablenum.diff(
        in_torch(clip=0.01, warmup=4), stablenum_jax.program(*IN_JAX, optimizer=right), steps=3
    )
    assert [[c.code for c in d.causes] for d in report.differences] == [["schedule_offset"]]
    assert report.first is not None
    assert report.first.right is not None
    assert str(report.first.right.operation).startswith("optax.scale_by_schedule")
