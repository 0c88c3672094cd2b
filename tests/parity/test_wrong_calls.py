"""Every argument of every public function of the adapters, given wrong values: an error that names it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
import torch
from jax.sharding import PartitionSpec

import stablenum_jax
import stablenum_torch
from stablenum import DelayedScaling, DynamicLossScale

NUMBERS = ("x", True, math.nan, -1.0, 1j, [1.0])
FLAGS = ("x", 1, None)
THINGS = ("x", 3, object())


@dataclass
class Call:
    """A right call of a function.

    Attributes:
        function: the function.
        given: its arguments, by name; ``args`` are the positional ones without a name.
        wrong: values that an argument must refuse.
        free: arguments that take anything, with the reason.
    """

    function: Callable[..., Any]
    given: dict[str, Any]
    wrong: dict[str, tuple[Any, ...]]
    free: dict[str, str] = field(default_factory=dict)

    def __call__(self, **changed: Any) -> Any:
        given = {**self.given, **changed}
        parameters = inspect.signature(self.function).parameters.values()
        several = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)
        if several is None:
            return self.function(**given)
        first = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        positional = [*(given.pop(name) for name in first), *given.pop(several, ())]
        return self.function(*positional, **given)


def torch_calls() -> dict[str, Call]:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    batch = torch.ones(3, 2)

    def loss(model: Any, batch: Any) -> torch.Tensor:
        return model(batch).square().mean()

    def optimizer() -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters())

    stepped = optimizer()
    loss(model, batch).backward()
    stepped.step()
    s = stablenum_torch
    plan = s.audit(stepped)
    return {
        "wrap": Call(
            s.wrap,
            {"optimizer": optimizer()},
            {
                "optimizer": (*THINGS, None, model, torch.optim.Adam),
                "config": (*THINGS, {"clip": 1.0}),
                "names": (3, object(), [1, 2], {"w": 3}),
                "process_group": THINGS,
                "loss_group": THINGS,
                "buffers": (*THINGS, {"a": batch}),
                "log": (3, object(), b"run.jsonl", "no such folder/run.jsonl"),
                "clip": ("x", -1.0, 0.0, math.nan, True, object()),
                "loss_scale": ("x", -1.0, 0.0, math.nan, math.inf, True, object()),
                "spike": ("x", 3.0, object()),
                "escalate": ("x", 3, object()),
                "on_nonfinite": ("x", 3, None),
                "max_skips_in_a_row": ("x", -1, 0, 1.5, True),
                "exact_norms": ("x", 1, None),
                "check_replicas_every": ("x", -1, 0, 1.5, True),
            },
        ),
        "audit": Call(
            s.audit,
            {"optimizer": stepped},
            {
                "optimizer": (*THINGS, None, model, 5),
                "grads": ("x", 5, object(), [1.0, 2.0], {"w": "x"}, [batch]),
                "names": (3, object(), [1, 2], {"w": 3}),
            },
        ),
        "repair": Call(
            s.repair, {"optimizer": stepped, "audit": plan}, {"optimizer": (*THINGS, None), "audit": THINGS}
        ),
        "replay": Call(
            s.replay,
            {"step_fn": loss, "args": (model, batch), "model": model, "optimizer": stepped},
            {
                "step_fn": (*THINGS, None),
                "model": THINGS,
                "optimizer": THINGS,
                "loss_scale": (*NUMBERS, 0.0, math.inf),
                "rng_state": ("x", 3, object(), torch.ones(3)),
                "known_bad": FLAGS,
            },
            dict.fromkeys(("args", "kwargs"), "what the user's function takes"),
        ),
        "checkup": Call(
            s.checkup,
            {"model": model, "loss_fn": loss, "args": (batch,), "optimizer": stepped},
            {"model": (*THINGS, None), "loss_fn": (*THINGS, None), "optimizer": THINGS},
            {"args": "what the user's function takes"},
        ),
        "program": Call(
            s.program,
            {"loss_fn": loss, "args": (batch,), "model": model, "optimizer": stepped},
            {"loss_fn": (*THINGS, None), "model": THINGS, "optimizer": THINGS, "compute": THINGS},
            {"args": "what the user's function takes"},
        ),
        "quantize": Call(
            s.quantize,
            {"x": torch.ones(2, 32), "format": "mxfp4"},
            {
                "x": (*THINGS, None, [1.0], torch.ones(3, dtype=torch.int32)),
                "format": (*THINGS, None, "mxfp5"),
                "axis": ("x", None, 1.5, 2, (0, 1), ()),
                "scale_mode": (*THINGS, None),
                "rounding": (*THINGS, None),
                "generator": THINGS,
            },
        ),
        "dequantize": Call(
            s.dequantize,
            {"q": s.quantize(torch.ones(2, 32), "mxfp4")},
            {"q": (*THINGS, None), "dtype": ("x", 3, None, torch.int32)},
        ),
        "range_report": Call(
            s.range_report,
            {"model": model, "batch": batch, "loss_fn": loss},
            {
                "model": (*THINGS, None),
                "loss_fn": THINGS,
                "optimizer": THINGS,
                "formats": (3, ("x",), (), "int8", (3,)),
            },
            {"batch": "what the user's function takes"},
        ),
        "precision": Call(
            lambda model, policy, *, how="casts", forward_scaling=None, backward_scaling=None, native=None: (
                s.precision(
                    torch.nn.Linear(2, 1) if model is None else model,
                    policy,
                    how=how,
                    forward_scaling=forward_scaling,
                    backward_scaling=backward_scaling,
                    native=native,
                )
            ),
            {"model": None, "policy": "compute=bfloat16"},
            {
                "model": THINGS,
                "policy": (3, None, object(), "x=3", "compute=int8"),
                "how": ("x", 3, None),
                "forward_scaling": (*THINGS, 1.0),
                "backward_scaling": (*THINGS, 1.0),
                "native": ("x", 1),
            },
        ),
    }


def jax_calls() -> dict[str, Call]:
    s = stablenum_jax
    params = {"w": jnp.ones(2)}
    grads = {"w": jnp.full(2, 0.5)}
    tx = optax.chain(s.guard(clip=1.0, loss_scale=DynamicLossScale()), optax.adam(0.1))
    state = tx.init(params)

    def loss(p: Any, x: Any) -> jax.Array:
        return jnp.mean((p["w"] * x) ** 2)

    plan = s.audit(state, params)
    states = (*THINGS, None, params)
    return {
        "guard": Call(
            s.guard,
            {},
            {
                "inner": (*THINGS, optax.adam),
                "config": (*THINGS, {"clip": 1.0}),
                "axis_name": (3, 1.5, ["x"]),
                "specs": (PartitionSpec("x"), {"w": PartitionSpec("x")}),  # without axis_name
                "clip": ("x", -1.0, 0.0, math.nan, True, object()),
                "loss_scale": ("x", -1.0, 0.0, math.nan, math.inf, True, object()),
                "spike": ("x", 3.0, object()),
                "escalate": ("x", 3, object()),
                "on_nonfinite": ("x", 3, None),
                "max_skips_in_a_row": ("x", -1, 0, 1.5, True),
                "exact_norms": ("x", 1, None),
                "log_skips": ("x", 1, None),
            },
        ),
        "chain": Call(s.chain, {"transforms": (optax.sgd(0.1),)}, {"transforms": (("x",), (3,), (None,))}),
        "step": Call(
            s.step,
            {"tx": tx, "params": params, "opt_state": state, "grads": grads},
            {
                "tx": (*THINGS, None, optax.adam),
                "params": (3.5, {"w": "x"}, {"w": object()}),
                "opt_state": states,
                "grads": ("x", 3, {"w": "x"}, {"v": jnp.ones(2)}, {"w": jnp.ones(2, jnp.int32)}, state),
                "value": ("x", 1j, jnp.ones(2), object()),
            },
            {"extra": "those of the user's transformations"},
        ),
        "audit": Call(
            s.audit,
            {"opt_state": state, "params": params},
            {
                "opt_state": (*THINGS, 5),
                "params": (5, "x", {"v": jnp.ones(3)}, {"w": "x"}),
                "grads": (5, "x", {"v": jnp.ones(3)}, {"w": "x"}),
                "updates": (5, "x", {"v": jnp.ones(3)}, {"w": "x"}),
                "learning_rate": NUMBERS,
                "b1": (*NUMBERS, 1.5),
                "b2": (*NUMBERS, 1.5),
                "eps": NUMBERS,
            },
        ),
        "repair": Call(s.repair, {"opt_state": state, "audit": plan}, {"opt_state": THINGS, "audit": THINGS}),
        "replay": Call(
            s.replay,
            {"fun": loss, "args": (params, 1.0)},
            {
                "fun": (*THINGS, None),
                "argnums": ("x", 2, -3, 1.5, True, (0, "x")),
                "has_aux": FLAGS,
                "gradients": ("x", 1),
                "loss_scale": (*NUMBERS, 0.0, math.inf),
                "opt_state": ("x", 3, object()),
                "known_bad": FLAGS,
            },
            dict.fromkeys(("args", "kwargs"), "what the user's function takes"),
        ),
        "checkup": Call(
            s.checkup,
            {"loss_fn": loss, "params": params, "args": (1.0,), "tx": tx, "opt_state": state},
            {
                "loss_fn": (*THINGS, None),
                "params": ({}, {"n": 1}),
                "tx": THINGS,
                "opt_state": ("x", 3, object()),
                "has_aux": FLAGS,
            },
            {"args": "what the user's function takes"},
        ),
        "program": Call(
            s.program,
            {"loss_fn": loss, "params": params, "args": (1.0,), "optimizer": tx},
            {"loss_fn": (*THINGS, None), "optimizer": THINGS},
            {
                "args": "what the user's function takes",
                "params": "anything that the user's function takes",
                "compute": "any dtype, checked by JAX when the program runs",
            },
        ),
        "range_report": Call(
            s.range_report,
            {"fun": loss, "params": params, "args": (1.0,)},
            {
                "fun": (*THINGS, None),
                "has_aux": FLAGS,
                "optimizer": THINGS,
                "opt_state": ("x", 3, object()),
                "formats": (3, ("x",), (), "int8", (3,)),
            },
            dict.fromkeys(("params", "args", "kwargs"), "what the user's function takes"),
        ),
        "value_and_grad": Call(
            s.value_and_grad,
            {"fun": loss, "opt_state": state},
            {
                "fun": (*THINGS, None),
                "opt_state": states,
                "argnums": ("x", 1.5, True, (0, "x")),
                "has_aux": FLAGS,
                "policy": (3, object()),
            },
            {"formats": "read where the guard escalates, and checked there"},
        ),
        "scale_loss": Call(
            s.scale_loss,
            {"loss": jnp.ones(()), "opt_state": state},
            {"loss": ("x", None, object(), 1j), "opt_state": states},
        ),
        "unless_skipped": Call(
            s.unless_skipped,
            {"opt_state": state, "new": params, "old": params},
            {
                "opt_state": states,
                "new": ({"v": jnp.ones(2)}, {"w": jnp.ones(3)}, None),
                "old": ({"v": jnp.ones(2)}, {"w": jnp.ones(3)}, None),
            },
            free={"before": "without it the state alone says what it can"},
        ),
        "load_guard_state_dict": Call(
            s.load_guard_state_dict,
            {"opt_state": state, "plain": s.guard_state_dict(state)},
            {"opt_state": states, "plain": (*THINGS, None, {}, {"step": 1})},
        ),
        "check_replicas": Call(
            s.check_replicas,
            {"params": params, "opt_state": state},
            {"params": THINGS, "opt_state": THINGS},
        ),
        "scalars": Call(s.scalars, {"opt_state": state}, {"opt_state": states, "prefix": (3, None)}),
        "metrics": Call(s.metrics, {"opt_state": state}, {"opt_state": states, "raise_if_halted": FLAGS}),
        **{
            name: Call(getattr(s, name), {"opt_state": state}, {"opt_state": states})
            for name in ("guard_state", "guard_state_dict", "history", "loss_scale", "clear_halt")
        },
        "precision": Call(
            s.precision,
            {"model": loss, "policy": "compute=bfloat16"},
            {"model": THINGS, "policy": (3, None, object(), "x=3", "compute=int8")},
        ),
        "master_weights": Call(
            s.master_weights, {"inner": optax.adam(0.1)}, {"inner": (*THINGS, None, optax.adam)}
        ),
        "stochastic_rounding": Call(s.stochastic_rounding, {}, {"seed": ("x", 1.5, -1, None, True)}),
        "kahan": Call(s.kahan, {}, {}),
        "eased": Call(
            s.eased,
            {"inner": optax.sgd(0.1)},
            {"inner": (*THINGS, None, optax.adam), "axis_name": (3, 1.5, ["x"])},
        ),
        "init_fp8": Call(
            s.init_fp8,
            {},
            {"forward_scaling": (*THINGS, None), "backward_scaling": (*THINGS, None)},
        ),
        "quantize": Call(
            s.quantize,
            {"x": jnp.ones((2, 32)), "format": "mxfp4"},
            {
                "x": (*THINGS, None, [1.0], jnp.ones(3, jnp.int32)),
                "format": (*THINGS, None, "mxfp5"),
                "axis": ("x", None, 1.5, 2, (0, 1), ()),
                "scale_mode": (*THINGS, None),
                "rounding": (*THINGS, None),
                "key": THINGS,
            },
        ),
        "dequantize": Call(
            s.dequantize,
            {"q": s.quantize(jnp.ones((2, 32)), "mxfp4")},
            {"q": (*THINGS, None), "dtype": ("x", 3, None, jnp.int32)},
        ),
        "fp8_dot": Call(
            s.fp8_dot,
            {"x": jnp.ones((2, 3)), "w": jnp.ones((3, 2)), "state": s.init_fp8()},
            {
                "x": ("x", None, jnp.ones(()), jnp.ones((2, 4)), jnp.ones((2, 3), jnp.int32)),
                "w": ("x", None, jnp.ones(()), jnp.ones((4, 2)), jnp.ones((3, 2), jnp.int32)),
                "state": (*THINGS, None),
                "forward_scaling": (*THINGS, None, DelayedScaling(history=3)),
                "backward_scaling": (*THINGS, None, DelayedScaling(history=3)),
                "native": FLAGS,
            },
        ),
    }


CALLS = {"torch": torch_calls, "jax": jax_calls}
MODULES = {"torch": stablenum_torch, "jax": stablenum_jax}
CASES = [
    (adapter, name)
    for adapter, module in MODULES.items()
    for name in sorted(dir(module))
    if inspect.isfunction(getattr(module, name))
]
# Where the message speaks of the thing and not of the argument.
NAMED = {"plain": "guard state", "formats": "format", "policy": ""}
SETTINGS = {
    "clip",
    "loss_scale",
    "spike",
    "escalate",
    "on_nonfinite",
    "max_skips_in_a_row",
    "exact_norms",
}


def shown(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else repr(value)[:60]


@pytest.mark.parametrize(("adapter", "name"), CASES)
def test_wrong_values_are_refused_by_name(adapter: str, name: str) -> None:
    call = CALLS[adapter]()[name]
    call()
    taken = set(inspect.signature(call.function).parameters)
    expected = taken - {"overrides"} | (SETTINGS if "overrides" in taken else set())
    assert expected == {*call.wrong, *call.free}, "say here which values each argument must refuse"
    problems = []
    for argument, values in call.wrong.items():
        for value in values:
            try:
                call(**{argument: value})
            except (TypeError, ValueError) as error:
                said = str(error)
                if NAMED.get(argument, argument) not in said or " must " not in said:
                    problems.append(f"{argument} = {shown(value)}: {type(error).__name__}: {said[:200]}")
            except Exception as error:  # noqa: BLE001
                problems.append(f"{argument} = {shown(value)}: {type(error).__name__}: {str(error)[:200]}")
            else:
                problems.append(f"{argument} = {shown(value)} is accepted")
    assert not problems, "\n".join(problems)
    call()
