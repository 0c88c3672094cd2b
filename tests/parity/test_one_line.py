"""What the objects of both adapters look like when they are printed: one line, without an array."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import optax
import pytest
import torch

import stablenum_jax
import stablenum_torch


def no_loss(*_: Any) -> Any:
    raise AssertionError("a program runs when it is compared, not when it is printed")


def torch_training() -> tuple[torch.nn.Module, stablenum_torch.GuardedOptimizer]:
    model = torch.nn.Linear(2, 1)
    return model, stablenum_torch.wrap(torch.optim.SGD(model.parameters(), lr=0.1))


def torch_recovery(**settings: Any) -> Any:
    return stablenum_torch.Recovery(*torch_training(), data=lambda number: number, **settings)


def jax_recovery(**settings: Any) -> Any:
    state = stablenum_jax.guard(optax.sgd(0.1)).init({"w": jnp.ones(2)})
    return stablenum_jax.Recovery(state, data=lambda number: number, **settings)


@pytest.mark.parametrize("made", [torch_recovery, jax_recovery])
def test_a_recovery_says_where_it_is_and_how_it_is_set(made: Any, tmp_path: Path) -> None:
    recovery = made(every=50, budget=4, folder=tmp_path)
    settings = f"budget=4, every=50, keep=3, good_after=128, check_every=10, folder='{tmp_path}'"
    assert repr(recovery) == f"Recovery(step=0, rewinds=0, {settings})"
    recovery._loop._hooks = None  # nothing is asked of the device
    recovery._loop.step = 7
    assert repr(recovery).startswith("Recovery(step=7, rewinds=0, ")
    assert repr(made()).endswith(", folder=None)")


@pytest.mark.parametrize(("adapter", "form"), [(stablenum_torch, "torch"), (stablenum_jax, "npz")])
def test_checkpoints_say_how_they_are_set(adapter: Any, form: str, tmp_path: Path) -> None:
    settings = "keep=3, on_poisoned='refuse', on_error='raise', allow=()"
    assert (
        repr(adapter.Checkpoints(tmp_path))
        == f"Checkpoints(folder='{tmp_path}', format='{form}', {settings})"
    )
    other = adapter.Checkpoints(tmp_path, keep=None, format="safetensors", allow=("*.mask",))
    assert "format='safetensors', keep=None, " in repr(other)
    assert repr(other).endswith("allow=('*.mask',))")


def test_a_program_of_torch_says_what_it_consists_of() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 1, device="meta"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    program = functools.partial(stablenum_torch.program, no_loss, torch.empty(3, device="meta"), 4)
    assert repr(program(model=model, optimizer=optimizer, compute=torch.bfloat16)) == (
        "Program(framework='torch', loss_fn=no_loss, args=2, model=Sequential, optimizer=SGD, "
        "compute=torch.bfloat16, recorded_steps=[])"
    )
    assert "model=None, optimizer=None, compute=None" in repr(program())


def test_a_program_of_jax_says_what_it_consists_of() -> None:
    deleted = jnp.ones(3)
    deleted.delete()
    program = stablenum_jax.program(functools.partial(no_loss), {"w": deleted}, deleted, compute=jnp.bfloat16)
    assert repr(program) == (
        "Program(framework='jax', loss_fn=partial, params=dict, args=1, optimizer=None, compute=bfloat16, "
        "recorded_steps=[])"
    )


def test_a_program_says_for_how_many_steps_it_is_recorded() -> None:
    programs = [
        stablenum_torch.program(torch.square, torch.ones(2)),
        stablenum_jax.program(jnp.square, jnp.ones(2)),
    ]
    for program in programs:
        program.record(1)
        assert repr(program).endswith("recorded_steps=[1])")
