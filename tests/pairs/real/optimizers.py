"""``torch.optim`` beside optax: each optimizer as it is called first, and the calls that agree."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from torch import nn, optim

import stablenum_jax
import stablenum_torch
from tests.pairs.real import formulas as numpy_of
from tests.pairs.real.formulas import X, Y, start


class Pair(NamedTuple):
    """Two optimizers.

    Attributes:
        left, right: the optimizer of PyTorch, made from parameters, and the transformation of optax.
        formulas: both in NumPy.
        cause: what the report must name first; "" if the programs agree, None if no cause is expected.
        why: which formulas differ, according to the sources.
        shortfall: what the report says instead, or "".
        matrices: whether the model has matrices alone.
    """

    left: Callable[[Any], optim.Optimizer]
    right: Callable[[], Any]
    formulas: tuple[numpy_of.Rule, numpy_of.Rule]
    cause: str | None = ""
    why: str = ""
    shortfall: str = ""
    matrices: bool = False


def same(rule: numpy_of.Rule) -> tuple[numpy_of.Rule, numpy_of.Rule]:
    return rule, rule


def rprop(
    learning_rate: float, smallest: float = 1e-6, largest: float = 50.0
) -> optax.GradientTransformation:
    """Rprop as ``torch.optim.Rprop`` has it: a step is applied when it is found."""

    def init(params: Any) -> Any:
        sizes = optax.tree.full_like(params, learning_rate)
        return sizes, optax.tree.zeros_like(params)

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        def sized(g: Any, before: Any, size: Any) -> Any:
            factor = jnp.where(g * before > 0, 1.2, jnp.where(g * before < 0, 0.5, 1.0))
            return jnp.clip(factor * size, smallest, largest)

        sizes = jax.tree.map(sized, grads, state[1], state[0])
        kept = jax.tree.map(lambda g, before: jnp.where(g * before < 0, 0.0, g), grads, state[1])
        updates = jax.tree.map(lambda g, size: -jnp.sign(g) * size, kept, sizes)
        return updates, (sizes, kept)

    return optax.GradientTransformation(init, update)


def muon(learning_rate: float, weight_decay: float = 0.1, momentum: float = 0.95) -> Any:
    """Muon as ``torch.optim.Muon`` computes it."""

    def sides(params: Any) -> Any:
        return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(0, 1), params)

    def by_shape(updates: Any, _: Any) -> Any:
        return jax.tree.map(lambda x: math.sqrt(max(1, x.shape[1] / x.shape[0])) * x, updates)

    return optax.chain(
        optax.trace(momentum, nesterov=True),
        optax.contrib.scale_by_muon(beta=0.0, nesterov=False, eps=0.0, weight_dimension_numbers=sides),
        optax.stateless(by_shape),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(learning_rate),
    )


ITEM = "a size of the parameters that the optimizer reads with .item() stays as it was rounded in float32"

PAIRS: dict[str, Pair] = {
    "sgd": Pair(
        lambda p: optim.SGD(p, lr=0.1),
        lambda: optax.sgd(0.1),
        same(numpy_of.sgd(0.1)),
    ),
    "sgd momentum": Pair(
        lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
        lambda: optax.sgd(0.1, momentum=0.9),
        same(numpy_of.sgd(0.1, 0.9)),
    ),
    "sgd nesterov": Pair(
        lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
        same(numpy_of.sgd(0.1, 0.9, nesterov=True)),
    ),
    "sgd dampening": Pair(
        lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1),
        lambda: optax.sgd(0.1, momentum=0.9),
        (numpy_of.sgd(0.1, 0.9, dampening=0.1), numpy_of.sgd(0.1, 0.9)),
        cause=None,
        why="torch multiplies each gradient but the first by 1 - dampening; optax has no dampening",
    ),
    "sgd weight decay": Pair(
        lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
        lambda: optax.chain(optax.add_decayed_weights(0.01), optax.sgd(0.1, momentum=0.9)),
        same(numpy_of.sgd(0.1, 0.9, decay=0.01)),
    ),
    "asgd": Pair(
        lambda p: optim.ASGD(p, lr=0.1, lambd=0.01),
        lambda: optax.chain(
            optax.add_decayed_weights(0.01), optax.sgd(lambda n: 0.1 / (1 + 0.01 * 0.1 * n) ** 0.75)
        ),
        same(numpy_of.asgd(0.1, lambd=0.01)),
    ),
    "adam": Pair(
        lambda p: optim.Adam(p),
        lambda: optax.adam(1e-3),
        same(numpy_of.adam(1e-3)),
    ),
    "adam weight decay": Pair(
        lambda p: optim.Adam(p, weight_decay=0.01),
        lambda: optax.chain(optax.add_decayed_weights(0.01), optax.adam(1e-3)),
        same(numpy_of.adam(1e-3, coupled=0.01)),
    ),
    "adam weight decay as adamw": Pair(
        lambda p: optim.Adam(p, weight_decay=0.01),
        lambda: optax.adamw(1e-3, weight_decay=0.01),
        (numpy_of.adam(1e-3, coupled=0.01), numpy_of.adam(1e-3, decoupled=0.01)),
        cause="decay_coupling",
        why="torch's Adam adds the decay to the gradient, adamw to the update",
    ),
    "amsgrad": Pair(
        lambda p: optim.Adam(p, amsgrad=True),
        lambda: optax.amsgrad(1e-3),
        (numpy_of.adam(1e-3, amsgrad="raw"), numpy_of.adam(1e-3, amsgrad="corrected")),
        cause=None,
        why="torch takes the maximum of v and corrects its bias, optax the maximum of the corrected v",
    ),
    "amsgrad, no eps": Pair(
        lambda p: optim.Adam(p, amsgrad=True, eps=0),
        lambda: optax.amsgrad(
            lambda n: 1e-3 * jnp.sqrt(1 - 0.999 ** (n + 1)), eps=0, bias_correction_nu=False
        ),
        same(numpy_of.adam(1e-3, eps=0, amsgrad="raw")),
    ),
    "adamw": Pair(
        lambda p: optim.AdamW(p),
        lambda: optax.adamw(1e-3),
        (numpy_of.adam(1e-3, decoupled=0.01), numpy_of.adam(1e-3, decoupled=1e-4)),
        cause="decay_coupling",
        why="the default decay is 0.01 in torch, 0.0001 in optax",
    ),
    "adamw, same decay": Pair(
        lambda p: optim.AdamW(p),
        lambda: optax.adamw(1e-3, weight_decay=0.01),
        same(numpy_of.adam(1e-3, decoupled=0.01)),
    ),
    "nadam": Pair(
        lambda p: optim.NAdam(p),
        lambda: optax.nadam(2e-3),
        (numpy_of.nadam(2e-3, momentum_decay=4e-3), numpy_of.nadam(2e-3)),
        cause="scale",
        why="torch's momentum rises from beta1 / 2 by a schedule, optax's is constant",
    ),
    "nadam, constant momentum": Pair(
        lambda p: optim.NAdam(p, momentum_decay=1e9),
        lambda: optax.nadam(2e-3),
        same(numpy_of.nadam(2e-3)),
    ),
    "radam": Pair(
        lambda p: optim.RAdam(p),
        lambda: optax.radam(1e-3),
        (numpy_of.radam(1e-3, eps_before_correction=True), numpy_of.radam(1e-3)),
        cause="adam_epsilon_placement",
        why="torch adds eps to sqrt(v) before the correction of the bias, optax after it",
    ),
    "radam, no eps": Pair(
        lambda p: optim.RAdam(p, eps=0),
        lambda: optax.radam(1e-3, eps=0),
        same(numpy_of.radam(1e-3, eps=0)),
    ),
    "adagrad": Pair(
        lambda p: optim.Adagrad(p),
        lambda: optax.adagrad(1e-2),
        (
            numpy_of.adagrad(1e-2, begun=0.0, eps=1e-10, inside=False),
            numpy_of.adagrad(1e-2, begun=0.1, eps=1e-7, inside=True),
        ),
        cause="adam_epsilon_placement",
        why="optax's sum of squares begins at 0.1, torch's at 0",
    ),
    "adagrad, from zero": Pair(
        lambda p: optim.Adagrad(p),
        lambda: optax.adagrad(1e-2, initial_accumulator_value=0.0),
        (
            numpy_of.adagrad(1e-2, begun=0.0, eps=1e-10, inside=False),
            numpy_of.adagrad(1e-2, begun=0.0, eps=1e-7, inside=True),
        ),
        cause="adam_epsilon_placement",
        why="eps is 1e-10 outside the root in torch, 1e-7 inside it in optax",
    ),
    "adagrad, no eps": Pair(
        lambda p: optim.Adagrad(p, eps=0),
        lambda: optax.adagrad(1e-2, initial_accumulator_value=0.0, eps=0.0),
        same(numpy_of.adagrad(1e-2, begun=0.0, eps=0.0, inside=True)),
    ),
    "adadelta": Pair(
        lambda p: optim.Adadelta(p),
        lambda: optax.adadelta(1.0),
        same(numpy_of.adadelta(1.0)),
    ),
    "rmsprop": Pair(
        lambda p: optim.RMSprop(p),
        lambda: optax.rmsprop(1e-2),
        (numpy_of.rmsprop(1e-2, alpha=0.99), numpy_of.rmsprop(1e-2, alpha=0.9, inside=True)),
        cause="scale",
        why="alpha is 0.99 in torch, decay 0.9 in optax; eps is outside the root in torch, inside in optax",
        shortfall="only the place of epsilon is named",
    ),
    "rmsprop, same decay": Pair(
        lambda p: optim.RMSprop(p),
        lambda: optax.rmsprop(1e-2, decay=0.99),
        (numpy_of.rmsprop(1e-2, alpha=0.99), numpy_of.rmsprop(1e-2, alpha=0.99, inside=True)),
        cause="adam_epsilon_placement",
        why="eps is outside the root in torch, inside it in optax",
    ),
    "rmsprop, eps outside": Pair(
        lambda p: optim.RMSprop(p),
        lambda: optax.rmsprop(1e-2, decay=0.99, eps_in_sqrt=False),
        same(numpy_of.rmsprop(1e-2, alpha=0.99)),
    ),
    "rmsprop centered": Pair(
        lambda p: optim.RMSprop(p, centered=True),
        lambda: optax.rmsprop(1e-2, decay=0.99, eps_in_sqrt=False, centered=True),
        same(numpy_of.rmsprop(1e-2, alpha=0.99, centered=True)),
    ),
    "rmsprop momentum": Pair(
        lambda p: optim.RMSprop(p, momentum=0.9),
        lambda: optax.rmsprop(1e-2, decay=0.99, eps_in_sqrt=False, momentum=0.9),
        same(numpy_of.rmsprop(1e-2, alpha=0.99, momentum=0.9)),
    ),
    "adamax": Pair(
        lambda p: optim.Adamax(p),
        lambda: optax.adamax(2e-3),
        same(numpy_of.adamax(2e-3)),
    ),
    "rprop": Pair(
        lambda p: optim.Rprop(p),
        lambda: optax.rprop(1e-2),
        (numpy_of.rprop(1e-2), numpy_of.rprop(1e-2, late=True)),
        cause=None,
        why="optax returns the change of the step before; its first update is zero",
    ),
    "rprop, own": Pair(
        lambda p: optim.Rprop(p),
        lambda: rprop(1e-2),
        same(numpy_of.rprop(1e-2)),
    ),
    "adafactor": Pair(
        lambda p: optim.Adafactor(p),
        lambda: optax.adafactor(1e-2),
        (numpy_of.adafactor(1e-2), numpy_of.adafactor(1e-2, factored=False)),
        cause="!missing_operation",
        why="optax keeps the second moment of a matrix whole if a side is shorter than 128",
    ),
    "adafactor, factored": Pair(
        lambda p: optim.Adafactor(p),
        lambda: optax.adafactor(1e-2, min_dim_size_to_factor=1),
        same(numpy_of.adafactor(1e-2)),
        shortfall=ITEM,
    ),
    "adafactor decay": Pair(
        lambda p: optim.Adafactor(p, weight_decay=0.1),
        lambda: optax.adafactor(1e-2, min_dim_size_to_factor=1, weight_decay_rate=0.1),
        (numpy_of.adafactor(1e-2, decay=1e-3), numpy_of.adafactor(1e-2, decay=0.1)),
        cause="decay_coupling",
        why="torch multiplies the decay by the rate, optax does not",
    ),
    "adafactor decay, times the rate": Pair(
        lambda p: optim.Adafactor(p, weight_decay=0.1),
        lambda: optax.adafactor(1e-2, min_dim_size_to_factor=1, weight_decay_rate=0.1 * 1e-2),
        same(numpy_of.adafactor(1e-2, decay=1e-3)),
        shortfall=ITEM,
    ),
    "muon": Pair(
        lambda p: optim.Muon(p),
        lambda: optax.contrib.muon(1e-3),
        (numpy_of.muon(1e-3, decay=0.1), numpy_of.muon(1e-3, decay=0.0, corrected=True)),
        cause="decay_coupling",
        why="the default decay is 0.1 in torch, 0 in optax",
        matrices=True,
    ),
    "muon, same decay": Pair(
        lambda p: optim.Muon(p),
        lambda: optax.contrib.muon(1e-3, weight_decay=0.1),
        (numpy_of.muon(1e-3, decay=0.1), numpy_of.muon(1e-3, decay=0.1, corrected=True)),
        cause=None,
        why="optax corrects the bias of momentum and gradient by different factors, torch by none",
        matrices=True,
    ),
    "muon, own": Pair(
        lambda p: optim.Muon(p),
        lambda: muon(1e-3),
        same(numpy_of.muon(1e-3, decay=0.1)),
        matrices=True,
    ),
}


def left(pair: Pair) -> Any:
    """Return the program of PyTorch: two linear layers and a norm."""
    kept = not pair.matrices
    norm = nn.LayerNorm(8, elementwise_affine=kept)
    model = nn.Sequential(nn.Linear(5, 8, bias=kept), norm, nn.Tanh(), nn.Linear(8, 3, bias=kept))
    with torch.no_grad():
        for p, x in zip(model.parameters(), start(matrices=pair.matrices).values(), strict=True):
            p.copy_(torch.tensor(np.float32(x.T)))
    x, y = torch.from_numpy(X), torch.from_numpy(Y)
    optimizer = pair.left(model.parameters())
    return stablenum_torch.program(
        lambda x, y: (model(x) - y).square().mean(), x, y, model=model, optimizer=optimizer
    )


def right(pair: Pair) -> Any:
    """Return the same in JAX."""

    def loss_fn(p: dict[str, Any], x: Any, y: Any) -> Any:
        h = jax.nn.standardize(x @ p["hidden"] + p.get("bias", 0.0), epsilon=1e-5)
        h = jnp.tanh(h * p.get("scale", 1.0) + p.get("shift", 0.0))
        return jnp.square(h @ p["out"] + p.get("out_bias", 0.0) - y).mean()

    params = {name: jnp.asarray(x, jnp.float32) for name, x in start(matrices=pair.matrices).items()}
    optimizer = pair.right()
    return stablenum_jax.program(loss_fn, params, jnp.asarray(X), jnp.asarray(Y), optimizer=optimizer)


def in_torch(pair: Pair, steps: int) -> dict[str, numpy_of.Array]:
    """Return the parameters after some steps of PyTorch in float64."""
    p = {name: nn.Parameter(torch.tensor(x.T)) for name, x in start(matrices=pair.matrices).items()}
    optimizer = pair.left(list(p.values()))
    for _ in range(steps):
        for name, g in numpy_of.gradients({k: x.detach().numpy().T for k, x in p.items()}).items():
            p[name].grad = torch.tensor(g.T)
        optimizer.step()
    return {name: x.detach().numpy().T for name, x in p.items()}


def in_optax(pair: Pair, steps: int) -> dict[str, numpy_of.Array]:
    """Return the parameters after some steps of optax in float64."""
    with jax.enable_x64(True):
        p = {name: jnp.asarray(x) for name, x in start(matrices=pair.matrices).items()}
        optimizer = pair.right()
        state = optimizer.init(p)
        update = jax.jit(optimizer.update)
        for _ in range(steps):
            g = numpy_of.gradients({k: np.asarray(x) for k, x in p.items()})
            changes, state = update({k: jnp.asarray(x) for k, x in g.items()}, state, p)
            p = optax.apply_updates(p, changes)
        return {name: np.asarray(x) for name, x in p.items()}
