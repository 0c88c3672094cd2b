"""What loggers are given is the same in both frameworks, and plain."""

from __future__ import annotations

import json
import math

import jax
import jax.numpy as jnp
import optax
import pytest
import torch
import torch.distributed as dist

import stablenum
import stablenum_jax
import stablenum_torch

KEYS = [
    "loss",
    "grad_norm",
    "loss_scale",
    "clip_coefficient",
    "applied",
    "reason",
    "skipped_total",
    "skipped_in_a_row",
]
STEPS = {
    "good": (1.0, 1.0),
    "bad gradient": (math.inf, 1.0),
    "bad loss": (1.0, math.nan),
    "no loss": (1.0, None),
}


def with_torch(factor: float, loss: float | None) -> dict[str, float]:
    weight = torch.nn.Parameter(torch.ones(2))
    opt = stablenum_torch.wrap(torch.optim.SGD([weight], lr=0.1), clip=1.0)
    weight.grad = torch.full((2,), 3.0 * factor)
    if loss is not None:
        opt.scale(torch.tensor(loss))
    opt.step()
    return opt.scalars("guard/")


def with_jax(factor: float, loss: float | None) -> dict[str, float]:
    tx = optax.chain(stablenum_jax.guard(clip=1.0), optax.sgd(0.1))
    params = {"w": jnp.ones(2)}
    grads = {"w": jnp.full((2,), 3.0 * factor)}
    _, opt_state = stablenum_jax.step(tx, params, tx.init(params), grads, value=loss)
    return stablenum_jax.scalars(opt_state, "guard/")


@pytest.mark.parametrize("step", STEPS)
def test_both_frameworks_give_the_same_plain_numbers(step: str) -> None:
    one, other = with_torch(*STEPS[step]), with_jax(*STEPS[step])
    assert json.dumps(one) == json.dumps(other)
    assert all(type(value) in (int, float) for value in one.values())
    expected = [f"guard/{k}" for k in KEYS if k != "loss" or STEPS[step][1] is not None]
    assert list(one) == expected
    assert one["guard/applied"] == (step in ("good", "no loss"))


@pytest.fixture
def one_rank():
    """A process group of this process alone, which decides as any other group does."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_the_worst_rank_is_a_number_where_several_decide_together(one_rank: dist.ProcessGroup) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    opt = stablenum_torch.wrap(torch.optim.SGD([weight], lr=0.1), clip=1.0, process_group=one_rank)
    weight.grad = torch.full((2,), 3.0)
    opt.step()

    tx = optax.chain(stablenum_jax.guard(clip=1.0, axis_name="devices"), optax.sgd(0.1))
    params, grads = {"w": jnp.ones(2)}, {"w": jnp.full((2,), 3.0)}
    mesh, whole = jax.make_mesh((1,), ("devices",)), jax.sharding.PartitionSpec()
    step = jax.shard_map(
        lambda p, s, g: stablenum_jax.step(tx, p, s, g), mesh=mesh, in_specs=whole, out_specs=whole
    )
    _, opt_state = step(params, tx.init(params), grads)

    one, other = opt.scalars("guard/"), stablenum_jax.scalars(opt_state, "guard/")
    assert json.dumps(one) == json.dumps(other)
    assert list(one) == [f"guard/{k}" for k in (*KEYS[1:], "worst_rank")]
    assert (type(one["guard/worst_rank"]), one["guard/worst_rank"]) == (int, 0)


def test_a_bad_loss_is_shown_as_it_was() -> None:
    seen = with_torch(*STEPS["bad loss"])
    assert math.isnan(seen["guard/loss"])
    assert stablenum.Reason(int(seen["guard/reason"])) is stablenum.Reason.NONFINITE_LOSS


def test_a_wrong_prefix_is_refused() -> None:
    opt = stablenum_torch.wrap(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))
    tx = stablenum_jax.guard(optax.sgd(0.1))
    with pytest.raises(TypeError, match="prefix must be a string; got int"):
        opt.scalars(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="prefix must be a string; got int"):
        stablenum_jax.scalars(tx.init({"w": jnp.ones(2)}), 3)  # type: ignore[arg-type]


def test_a_halted_training_raises_in_jax_where_only_the_log_is_read() -> None:
    tx = optax.chain(stablenum_jax.guard(max_skips_in_a_row=1), optax.sgd(0.1))
    params = {"w": jnp.ones(2)}
    with pytest.raises(stablenum.NonFiniteError) as caught:
        stablenum_jax.step(tx, params, tx.init(params), {"w": jnp.full(2, jnp.nan)})
    with pytest.raises(stablenum.NonFiniteError):
        stablenum_jax.scalars(caught.value.opt_state)  # type: ignore[attr-defined]
