"""A state machine runs NumPy, PyTorch and JAX through the same random actions and compares them.

Good and bad steps, gradients accumulated over several steps of the machine, guards saved in one framework
and loaded in another, optimizers copied during a run: after each action decisions, scales and parameters
agree, and no stored value is non-finite.
"""

from __future__ import annotations

import copy
import functools
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from hypothesis import settings
from hypothesis import strategies as some
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import stablenum_jax
import stablenum_torch
from stablenum import ClipByNorm, DynamicLossScale, GuardConfig, init_guard
from stablenum.guard.reasons import Reason
from stablenum.reference.guarded import SGD, Guarded
from stablenum.rules.clipping import AdaGC, AdaptiveGradClip, AutoClip, ClipUpdateRMS, ZClip
from stablenum.rules.loss_scale import LogMaxLossScale, UnderflowAwareLossScale
from stablenum.rules.spikes import MeanStdSpikeGuard, SpikeGuard
from tests.selection import REPEATS

# Small windows and intervals, so that they fill and elapse within the few steps of a run.
CONFIGS = {
    "norms": GuardConfig(
        clip=(ClipByNorm(2.0), 1.0),
        loss_scale=DynamicLossScale(init_scale=8.0, growth_interval=3, hysteresis=2, max_scale=64.0),
    ),
    "memories": GuardConfig(
        clip=(
            AdaGC(warmup_steps=3),
            ZClip(max_norm=None, warmup_steps=3),
            AutoClip(quantile=0.7, window=5),
            1.0,
        ),
        loss_scale=LogMaxLossScale(init_scale=8.0, max_scale=64.0),
        spike=SpikeGuard(window=6, min_samples=3, max_in_a_row=2),
    ),
    "units and updates": GuardConfig(
        clip=(
            AdaptiveGradClip(clipping=0.1, exclude=("b",), output_axis="last"),
            AdaGC(warmup_steps=2),
            1.0,
            ClipUpdateRMS(0.3),
        ),
        loss_scale=UnderflowAwareLossScale(init_scale=8.0, max_scale=64.0),
        spike=MeanStdSpikeGuard(window=6, min_samples=3, watch=("loss",), action="clip"),
    ),
}
LR = 0.1
NAMES = ("a", "b", "c")
START = {"a": np.ones((2, 2), np.float32), "b": np.zeros(3, np.float32), "c": np.zeros(0, np.float32)}
# ClipUpdateRMS finds the learning rate in the state.
SGD_IN_JAX = optax.inject_hyperparams(optax.sgd, static_args=("momentum",))(learning_rate=LR, momentum=0.9)
TX = {name: optax.chain(stablenum_jax.guard(config=config), SGD_IN_JAX) for name, config in CONFIGS.items()}
EXACT = ("step", "applied", "reason", "loss_scale", "skipped_total", "skipped_in_a_row", "worst")
Gradients = dict[str, np.ndarray]


@functools.partial(jax.jit, static_argnames="kind")
def jax_step(params: Any, opt_state: Any, grads: Any, loss: Any, kind: str) -> Any:
    return stablenum_jax.step(TX[kind], params, opt_state, grads, value=loss)


class NumpySide:
    def __init__(self, kind: str) -> None:
        self.config = CONFIGS[kind]
        self.train = Guarded(START, SGD(lr=LR, momentum=0.9), self.config)

    def step(self, grads: Gradients, loss: float) -> None:
        self.train.step(grads, loss=np.float32(loss))

    def params(self) -> Gradients:
        return dict(self.train.params)

    def last(self) -> dict[str, Any]:
        return self.train.last

    def save(self) -> dict[str, Any]:
        return self.train.guard_state_dict()

    def load(self, saved: dict[str, Any]) -> None:
        self.train.state = init_guard(self.config, len(NAMES), xp=np)  # a guard without history
        self.train.load_guard_state_dict(saved)


class TorchSide:
    def __init__(self, kind: str, fused: bool) -> None:
        self.config = CONFIGS[kind]
        params = {name: torch.nn.Parameter(torch.tensor(START[name])) for name in NAMES}
        inner = torch.optim.SGD(params.values(), lr=LR, momentum=0.9, fused=fused)
        self.opt = stablenum_torch.wrap(inner, self.config, names=params)

    def step(self, grads: Gradients, loss: float) -> None:
        self.opt.scale(torch.tensor(loss))
        for p, name in zip(self.opt.param_groups[0]["params"], NAMES, strict=True):
            p.grad = torch.tensor(grads[name])
        self.opt.step()

    def params(self) -> Gradients:
        tensors = self.opt.param_groups[0]["params"]
        return {name: p.detach().numpy() for name, p in zip(NAMES, tensors, strict=True)}

    def last(self) -> dict[str, Any]:
        return self.opt.last

    def save(self) -> dict[str, Any]:
        return self.opt.guard_state_dict()

    def load(self, saved: dict[str, Any]) -> None:
        names = dict(zip(NAMES, self.opt.param_groups[0]["params"], strict=True))
        self.opt = stablenum_torch.wrap(self.opt.inner, self.config, names=names)
        self.opt.load_guard_state_dict(saved)

    def copy(self) -> None:
        self.opt = copy.deepcopy(self.opt)


class JaxSide:
    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.tree = {name: jnp.asarray(START[name]) for name in NAMES}
        self.opt_state = TX[kind].init(self.tree)

    def step(self, grads: Gradients, loss: float) -> None:
        arrays = {name: jnp.asarray(grads[name]) for name in NAMES}
        self.tree, self.opt_state = jax_step(
            self.tree, self.opt_state, arrays, jnp.float32(loss), kind=self.kind
        )

    def params(self) -> Gradients:
        return {name: np.asarray(value) for name, value in self.tree.items()}

    def last(self) -> dict[str, Any]:
        return stablenum_jax.metrics(self.opt_state)

    def save(self) -> dict[str, Any]:
        return stablenum_jax.guard_state_dict(self.opt_state)

    def load(self, saved: dict[str, Any]) -> None:
        fresh = (TX[self.kind].init(self.tree)[0], *self.opt_state[1:])
        self.opt_state = stablenum_jax.load_guard_state_dict(fresh, saved)


class OneLifeInThreeFrameworks(RuleBasedStateMachine):
    @initialize(kind=some.sampled_from(list(CONFIGS)))
    def begin(self, kind: str) -> None:
        self.config = CONFIGS[kind]
        self.sides = {
            "numpy": NumpySide(kind),
            "torch": TorchSide(kind, fused=False),
            "torch fused": TorchSide(kind, fused=True),
            "jax": JaxSide(kind),
        }
        self.steps = 0

    def take(self, grads: Gradients, loss: float) -> None:
        self.steps += 1
        for side in self.sides.values():
            side.step({name: g.copy() for name, g in grads.items()}, loss)

    @rule(
        seed=some.integers(0, 2**16),
        size=some.sampled_from([0.0, 1e-30, 1e-3, 1.0, 1.0, 1.0, 1e4, 1e20]),
        late=some.booleans(),
        loss=some.sampled_from([1.0, 1.0, 1.5, 50.0]),
    )
    def good_step(self, seed: int, size: float, late: bool, loss: float) -> None:
        """A finite step, which may be a spike; one tensor may get no gradient."""
        rng = np.random.default_rng(seed)
        grads = {n: (rng.standard_normal(p.shape) * size).astype(np.float32) for n, p in START.items()}
        if late:
            grads["b"][:] = 0.0
        self.take(grads, loss)
        skips = self.config.spike is not None and self.config.spike.action == "skip"
        for side in self.sides.values():
            last = side.last()
            spike = last["reason"] in (Reason.SPIKE_LOSS, Reason.SPIKE_GRAD_NORM)
            assert last["applied"] is not spike
            assert skips or not spike

    @rule(
        seed=some.integers(0, 2**16),
        value=some.sampled_from([math.nan, math.inf, -math.inf]),
        where=some.sampled_from(["a", "b", "loss"]),
    )
    def bad_step(self, seed: int, value: float, where: str) -> None:
        before = {name: {n: p.copy() for n, p in side.params().items()} for name, side in self.sides.items()}
        rng = np.random.default_rng(seed)
        grads = {n: rng.standard_normal(p.shape).astype(np.float32) for n, p in START.items()}
        if where != "loss":
            grads[where].flat[1] = value
        self.take(grads, value if where == "loss" else 1.0)
        for name, side in self.sides.items():
            assert not side.last()["applied"]
            assert all(p.tobytes() == before[name][n].tobytes() for n, p in side.params().items())

    @rule(giver=some.sampled_from(["numpy", "torch", "torch fused", "jax"]))
    def guards_go_on_from_one_of_them(self, giver: str) -> None:
        text = json.dumps(self.sides[giver].save(), allow_nan=False)
        for side in self.sides.values():
            side.load(json.loads(text))

    @rule()
    def copies_take_over(self) -> None:
        for name in ("torch", "torch fused"):
            self.sides[name].copy()

    @invariant()
    def all_agree_and_nothing_is_poisoned(self) -> None:
        if not self.steps:
            return
        reference = self.sides["numpy"].last()
        for side in self.sides.values():
            last = side.last()
            for key in (
                "step",
                "applied",
                "reason",
                "loss_scale",
                "skipped_total",
                "skipped_in_a_row",
                "worst",
            ):
                assert last[key] == reference[key]
            if last["applied"]:
                np.testing.assert_allclose(last["grad_norm"], reference["grad_norm"], rtol=1e-6)
            np.testing.assert_allclose(
                last["clip_coefficient"], reference["clip_coefficient"], rtol=1e-5, atol=1e-37
            )
            for name, p in side.params().items():
                assert np.isfinite(p).all()
                np.testing.assert_allclose(p, self.sides["numpy"].params()[name], rtol=1e-5, atol=1e-6)


OneLifeInThreeFrameworks.TestCase.settings = settings(max_examples=10, stateful_step_count=20)
TestOneLife = OneLifeInThreeFrameworks.TestCase


class MoreLives(OneLifeInThreeFrameworks):
    """The same in more examples."""


MoreLives.TestCase.settings = settings(max_examples=25, stateful_step_count=20)
TestMoreLives = REPEATS(MoreLives.TestCase)
