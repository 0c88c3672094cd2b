"""The trainings in JAX, with optax."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import stablenum_jax
from benchmarks.recovery.data import Batch
from benchmarks.recovery.runs import (
    AVERAGE,
    COMMON,
    HEADS,
    LAYERS,
    MOMENTUM,
    RARE,
    RATES,
    SETTINGS,
    STEPS,
    first_weights,
    schedule,
)

__all__ = ["JaxRun"]

Array = Any


# --- the models -----------------------------------------------------------------------------------------


def _digits(w: Any, statistics: Any, x: Array, source: Array, train: bool) -> tuple[Array, Any]:
    """Two layers with batch norm, the first with weights for each source."""
    x = jnp.where(source[:, None] == 1, x @ w[RARE], x @ w[COMMON])
    after = {}
    for i, following in enumerate(("inner", "head")):
        x, after[f"mean{i}"], after[f"var{i}"] = _batch_norm(w, statistics, x, i, train)
        x = jax.nn.relu(x) @ w[following]
    return x + w["bias"], after


def _batch_norm(w: Any, statistics: Any, x: Array, i: int, train: bool) -> tuple[Array, Array, Array]:
    mean, var = statistics[f"mean{i}"], statistics[f"var{i}"]
    now_mean, now_var = (x.mean(0), x.var(0)) if train else (mean, var)
    x = (x - now_mean) * jax.lax.rsqrt(now_var + 1e-5) * w[f"gain{i}"] + w[f"shift{i}"]
    unbiased = now_var * (len(x) / (len(x) - 1))
    return x, mean + MOMENTUM * (now_mean - mean), var + MOMENTUM * (unbiased - var)


def _transformer(w: Any, averages: Any, tokens: Array, source: Array, train: bool) -> tuple[Array, Any]:
    """A causal transformer with embeddings for each source, and an averaged copy to evaluate."""
    w = w if train else averages
    x = jnp.where(source[:, None, None] == 1, w[RARE][tokens], w[COMMON][tokens])
    x = x + w["places"][: tokens.shape[1]]
    for i in range(LAYERS):
        q, k, v = jnp.split(_layer_norm(x, w[f"gain{2 * i}"]) @ w[f"qkv{i}"], 3, axis=-1)
        heads = (t.reshape(*t.shape[:2], HEADS, -1) for t in (q, k, v))
        x = x + jax.nn.dot_product_attention(*heads, is_causal=True).reshape(x.shape) @ w[f"out{i}"]
        up = _layer_norm(x, w[f"gain{2 * i + 1}"]) @ w[f"up{i}"]
        x = x + jax.nn.gelu(up, approximate=False) @ w[f"down{i}"]
    return _layer_norm(x, w[f"gain{2 * LAYERS}"]) @ w["head"], averages


def _layer_norm(x: Array, gain: Array) -> Array:
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * gain


MODELS: dict[str, Callable[..., tuple[Array, Any]]] = {"digits": _digits, "transformer": _transformer}


def _first_statistics(program: str, weights: dict[str, Array]) -> dict[str, Array]:
    if program == "transformer":
        return dict(weights)
    ones = {f"var{i}": np.ones_like(weights[f"gain{i}"]) for i in range(2)}
    return ones | {f"mean{i}": np.zeros_like(weights[f"shift{i}"]) for i in range(2)}


# --- one step -------------------------------------------------------------------------------------------


def _loss(program: str, train: bool, w: Any, statistics: Any, batch: Batch) -> tuple[Array, Any]:
    logits, after = MODELS[program](w, statistics, batch.inputs, batch.source, train)
    each = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
    return (batch.weights * each.reshape(len(each), -1).mean(1)).mean(), after


@functools.cache
def _compiled(program: str, guard: tuple[tuple[str, Any], ...] | None) -> tuple[Any, Any, Any]:
    """The transformation, the step and the evaluation: compiled once for all runs."""
    fractions = jnp.asarray([schedule(step) for step in range(STEPS + 1)], dtype=jnp.float32)
    b1, b2 = SETTINGS["betas"]  # type: ignore[misc]
    adamw = optax.adamw(
        lambda count: RATES[program] * fractions[count],
        b1=b1,
        b2=b2,
        eps=SETTINGS["eps"],
        weight_decay=SETTINGS["weight_decay"],
    )
    tx = (
        adamw
        if guard is None
        else optax.chain(stablenum_jax.guard(**dict(guard)), stablenum_jax.eased(adamw))
    )

    def step(state: Any, batch: Batch, outside: Array) -> tuple[Any, Array]:
        params, statistics, opt = state["params"], state["statistics"], state["opt"]
        differentiated = functools.partial(_loss, program, True)
        (loss, after), grads = jax.value_and_grad(differentiated, has_aux=True)(params, statistics, batch)
        if guard is None:
            updates, new_opt = tx.update(grads, opt, params)
            new = optax.apply_updates(params, updates)
        else:
            new, new_opt = stablenum_jax.step(tx, params, opt, grads, value=loss)
        new[RARE] = _moved(params[RARE], new[RARE], state["rate"] * outside)
        if program == "transformer":
            after = jax.tree.map(lambda old, now: old + (1.0 - AVERAGE) * (now - old), after, new)
        return {"params": new, "statistics": after, "opt": new_opt, "rate": state["rate"]}, loss

    evaluate = functools.partial(_loss, program, False)
    return tx, jax.jit(step), jax.jit(lambda *args: evaluate(*args)[0])


def _moved(old: Array, new: Array, factor: Array) -> Array:
    """A table moved by ``factor`` times its update, which is linear in the rate."""
    return jnp.where(factor == 1.0, new, old + factor * (new - old))


class JaxRun:
    """A training in JAX; see :class:`benchmarks.recovery.runs.Run`.

    Args:
        program: ``"digits"`` or ``"transformer"``.
        seed: of the first weights.
        held_out: what it is evaluated on.
        guard: the guard's settings; None for a plain optimizer.
    """

    def __init__(self, program: str, seed: int, held_out: Batch, guard: dict[str, Any] | None = None) -> None:
        settings = None if guard is None else tuple(guard.items())
        tx, self._step, self._evaluate = _compiled(program, settings)
        weights = first_weights(program, seed)
        self._statistics = "var0" if program == "digits" else "head"
        self._held_out, self.outside = jax.tree.map(jnp.asarray, held_out), 1.0
        params, statistics = jax.tree.map(jnp.asarray, (weights, _first_statistics(program, weights)))
        rate = jnp.asarray(1.0, jnp.float32)
        self._recovery: stablenum_jax.Recovery | None = None
        self.state = {"params": params, "statistics": statistics, "opt": tx.init(params), "rate": rate}

    @property
    def state(self) -> Any:
        """What the step takes and returns; a recovery keeps it, if there is one."""
        return self._state if self._recovery is None else self._recovery.state

    @state.setter
    def state(self, new: Any) -> None:
        if self._recovery is None:
            self._state = new
        else:
            self._recovery.state = new

    def step(self, batch: Batch) -> float:
        self.state, loss = self._step(self.state, batch, np.float32(self.outside))
        return float(loss)

    def evaluate(self) -> float:
        return float(self._evaluate(self.state["params"], self.state["statistics"], self._held_out))

    def finite(self) -> bool:
        adam = self._adam()
        trained = (self.state["params"], self.state["statistics"], adam.mu, adam.nu)
        return all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(trained))

    def _adam(self) -> Any:
        return next(x for x in jax.tree.leaves(self.state["opt"], is_leaf=_is_adam) if _is_adam(x))

    def updates(self) -> int:
        return int(self._adam().count)

    def edit(self, what: str, change: Callable[[Array], Array]) -> None:
        if what in ("m", "v"):
            opt = jax.tree.map(
                lambda x: _edited_adam(x, what, change) if _is_adam(x) else x,
                self.state["opt"],
                is_leaf=_is_adam,
            )
            self.state = {**self.state, "opt": opt}
            return
        part, name = {"rare": ("params", RARE), "statistics": ("statistics", self._statistics)}[what]
        tree = dict(self.state[part])
        tree[name] = jnp.asarray(change(np.array(tree[name])))
        self.state = {**self.state, part: tree}

    def set_rate(self, factor: float) -> None:
        self.state = {**self.state, "rate": jnp.asarray(factor, jnp.float32)}

    def save(self) -> Any:
        return jax.tree.map(np.array, self.state)

    def load(self, saved: Any) -> None:
        self.state = jax.tree.map(jnp.array, saved)

    def recovery(self, data: Callable[[int], Batch], **policy: Any) -> stablenum_jax.Recovery:
        self._recovery = stablenum_jax.Recovery(self.state, data=data, **policy)
        return self._recovery


def _is_adam(x: Any) -> bool:
    return isinstance(x, optax.ScaleByAdamState)


def _edited_adam(adam: Any, what: str, change: Callable[[Array], Array]) -> Any:
    field = {"m": "mu", "v": "nu"}[what]
    tree = dict(getattr(adam, field))
    tree[RARE] = jnp.asarray(change(np.array(tree[RARE])))
    return adam._replace(**{field: tree})
