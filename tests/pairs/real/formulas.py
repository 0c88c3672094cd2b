"""The optimizers of both libraries in NumPy and float64, each in the forms in which they differ.

A rule is called with the step (from 1), a parameter, its gradient and a dict that it keeps; it returns the
new parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

__all__ = ["Array", "Rule", "distance", "gradients", "start", "trained"]

Array: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"
Rule: TypeAlias = Callable[[int, Array, Array, dict[str, Any]], Array]

_RNG = np.random.default_rng(0)
X = _RNG.normal(size=(6, 5)).astype(np.float32)
Y = _RNG.normal(size=(6, 3)).astype(np.float32)
SHAPES = {"hidden": (5, 8), "bias": (8,), "scale": (8,), "shift": (8,), "out": (8, 3), "out_bias": (3,)}
MATRICES = ("hidden", "out")


def start(*, matrices: bool = False) -> dict[str, Array]:
    """Return generic parameters; ``matrices`` leaves out the vectors."""
    rng = np.random.default_rng(1)
    drawn = {name: 0.5 * rng.normal(size=shape) for name, shape in SHAPES.items()}
    drawn["scale"] += 1
    return {k: np.float64(np.float32(x)) for k, x in drawn.items() if k in MATRICES or not matrices}


def gradients(p: dict[str, Array]) -> dict[str, Array]:
    """Return the gradients of mean((tanh(layer_norm(X W + b)) W' + b' - Y)²)."""
    x, y = X.astype(np.float64), Y.astype(np.float64)
    h = x @ p["hidden"] + p.get("bias", 0.0)
    std = np.sqrt(h.var(-1, keepdims=True) + 1e-5)
    n = (h - h.mean(-1, keepdims=True)) / std
    a = np.tanh(n * p.get("scale", 1.0) + p.get("shift", 0.0))
    d = 2 * (a @ p["out"] + p.get("out_bias", 0.0) - y) / y.size
    dy = d @ p["out"].T * (1 - a**2)
    dn = dy * p.get("scale", 1.0)
    dh = (dn - dn.mean(-1, keepdims=True) - n * (dn * n).mean(-1, keepdims=True)) / std
    found = {
        "hidden": x.T @ dh, "bias": dh.sum(0), "scale": (dy * n).sum(0), "shift": dy.sum(0),
        "out": a.T @ d, "out_bias": d.sum(0),
    }  # fmt: skip
    return {name: found[name] for name in p}


def trained(rule: Rule, steps: int, *, matrices: bool = False) -> dict[str, Array]:
    """Return the parameters after some steps of a rule."""
    p, state = start(matrices=matrices), {name: dict[str, Any]() for name in SHAPES}
    for t in range(1, steps + 1):
        g = gradients(p)
        p = {name: rule(t, p[name], g[name], state[name]) for name in p}
    return p


def distance(a: dict[str, Array], b: dict[str, Array]) -> float:
    """Return how far two trainings are apart, relative to the way that the first has gone."""
    begun = start(matrices=len(a) == len(MATRICES))
    apart = sum(float(((a[k] - b[k]) ** 2).sum()) for k in a)
    gone = sum(float(((a[k] - begun[k]) ** 2).sum()) for k in a)
    return (apart / gone) ** 0.5


def sgd(
    lr: float, momentum: float = 0.0, *, dampening: float = 0.0, nesterov: bool = False, decay: float = 0.0
) -> Rule:
    def rule(t: int, p: Array, g: Array, s: dict[str, Any]) -> Array:
        g = g + decay * p
        s["m"] = g if t == 1 else momentum * s["m"] + (1 - dampening) * g
        return p - lr * (g + momentum * s["m"] if nesterov else s["m"])

    return rule


def asgd(lr: float, *, lambd: float, alpha: float = 0.75) -> Rule:
    def rule(t: int, p: Array, g: Array, s: dict[str, Any]) -> Array:
        rate = lr / (1 + lambd * lr * (t - 1)) ** alpha
        return p * (1 - lambd * rate) - rate * g

    return rule


def adam(
    lr: float, *, coupled: float = 0.0, decoupled: float = 0.0, eps: float = 1e-8, amsgrad: str = ""
) -> Rule:
    """``amsgrad``: the maximum of the "raw" second moments, or of those "corrected" for their bias."""

    def rule(t: int, p: Array, g: Array, s: dict[str, Any]) -> Array:
        g = g + coupled * p
        m, v = _moments(g, s)
        v_hat = v / (1 - 0.999**t)
        if amsgrad == "raw":
            s["top"] = np.maximum(s.get("top", 0.0), v)
            v_hat = s["top"] / (1 - 0.999**t)
        elif amsgrad == "corrected":
            s["top"] = v_hat = np.maximum(s.get("top", 0.0), v_hat)
        return p * (1 - lr * decoupled) - lr * m / (1 - 0.9**t) / (np.sqrt(v_hat) + eps)

    return rule


def _moments(g: Array, s: dict[str, Any]) -> tuple[Array, Array]:
    s["m"] = 0.9 * s.get("m", 0.0) + 0.1 * g
    s["v"] = 0.999 * s.get("v", 0.0) + 0.001 * g**2
    return s["m"], s["v"]


def nadam(lr: float, *, momentum_decay: float | None = None) -> Rule:
    """``momentum_decay``: Dozat's schedule of the momentum; None keeps it at 0.9."""

    def mu(t: int) -> float:
        return 0.9 if momentum_decay is None else 0.9 * (1 - 0.5 * 0.96 ** (t * momentum_decay))

    def rule(t: int, p: Array, g: Array, s: dict[str, Any]) -> Array:
        m, v = _moments(g, s)
        s["product"] = s.get("product", 1.0) * mu(t)
        ahead = (1 - mu(t)) / (1 - s["product"]) * g + mu(t + 1) / (1 - s["product"] * mu(t + 1)) * m
        return p - lr * ahead / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)

    return rule


def radam(lr: float, *, eps: float = 1e-8, eps_before_correction: bool = False) -> Rule:
    def rule(t: int, p: Array, g: Array, s: dict[str, Any]) -> Array:
        m, v = _moments(g, s)
        corrected, left = m / (1 - 0.9**t), 1 - 0.999**t
        end = 2 / (1 - 0.999) - 1
        rho = end - 2 * t * 0.999**t / left
        if rho <= 5:
            return p - lr * corrected
        r = np.sqrt((rho - 4) * (rho - 2) * end / ((end - 4) * (end - 2) * rho))
        root = (np.sqrt(v) + eps) / np.sqrt(left) if eps_before_correction else np.sqrt(v / left) + eps
        return p - lr * r * corrected / root

    return rule


def adagrad(lr: float, *, begun: float, eps: float, inside: bool) -> Rule:
    def rule(t: int, p: Array, g: Array, s: dict[str, Any]) -> Array:
        s["v"] = s.get("v", begun) + g**2
        return p - lr * g / (np.sqrt(s["v"] + eps) if inside else np.sqrt(s["v"]) + eps)

    return rule


def adadelta(lr: float) -> Rule:
    def rule(t: int, p: Array, g: Array, s: dict[str, Any]) -> Array:
        s["v"] = 0.9 * s.get("v", 0.0) + 0.1 * g**2
        change = np.sqrt(s.get("x", 0.0) + 1e-6) / np.sqrt(s["v"] + 1e-6) * g
        s["x"] = 0.9 * s.get("x", 0.0) + 0.1 * change**2
        return p - lr * change

    return rule


def rmsprop(
    lr: float, *, alpha: float, inside: bool = False, centered: bool = False, momentum: float = 0.0
) -> Rule:
    def rule(t: int, p: Array, g: Array, s: dict[str, Any]) -> Array:
        s["v"] = v = alpha * s.get("v", 0.0) + (1 - alpha) * g**2
        if centered:
            s["m"] = alpha * s.get("m", 0.0) + (1 - alpha) * g
            v = v - s["m"] ** 2
        s["b"] = momentum * s.get("b", 0.0) + g / (np.sqrt(v + 1e-8) if inside else np.sqrt(v) + 1e-8)
        return p - lr * s["b"]

    return rule


def adamax(lr: float) -> Rule:
    def rule(t: int, p: Array, g: Array, s: dict[str, Any]) -> Array:
        s["m"] = 0.9 * s.get("m", 0.0) + 0.1 * g
        s["u"] = np.maximum(0.999 * s.get("u", 0.0), np.abs(g) + 1e-8)
        return p - lr / (1 - 0.9**t) * s["m"] / s["u"]

    return rule


def rprop(lr: float, *, late: bool = False) -> Rule:
    """``late``: each step applies the change that was found one step earlier."""

    def rule(t: int, p: Array, g: Array, s: dict[str, Any]) -> Array:
        turn = np.sign(g * s.get("g", 0.0))
        size = s.get("size", lr) * np.where(turn > 0, 1.2, np.where(turn < 0, 0.5, 1.0))
        s["size"] = np.clip(size, 1e-6, 50)
        s["g"] = np.where(turn < 0, 0.0, g)
        before = np.where(turn < 0, 0.0, s.get("change", 0.0))
        s["change"] = s["size"] * np.sign(s["g"])
        return p - (before if late else s["change"])

    return rule


def adafactor(lr: float, *, factored: bool = True, decay: float = 0.0) -> Rule:
    def rule(t: int, p: Array, g: Array, s: dict[str, Any]) -> Array:
        new = t**-0.8
        if g.ndim > 1 and factored:
            s["r"] = (1 - new) * s.get("r", 0.0) + new * (g**2).mean(1, keepdims=True)
            s["c"] = (1 - new) * s.get("c", 0.0) + new * (g**2).mean(0, keepdims=True)
            v = s["r"] * s["c"] / s["r"].mean()
        else:
            s["v"] = v = (1 - new) * s.get("v", 0.0) + new * g**2
        u = g / np.sqrt(v)
        u = u / max(1.0, np.sqrt((u**2).mean()))
        return p * (1 - decay) - lr * max(1e-3, np.sqrt((p**2).mean())) * u

    return rule


def muon(lr: float, *, decay: float, corrected: bool = False) -> Rule:
    """``corrected``: both terms of the Nesterov step are corrected for their bias, each by its own factor."""

    def rule(t: int, p: Array, g: Array, s: dict[str, Any]) -> Array:
        s["m"] = 0.95 * s.get("m", 0.0) + 0.05 * g
        now, ahead = (1 - 0.95**t, 1 - 0.95 ** (t + 1)) if corrected else (1.0, 1.0)
        x = 0.05 * g / now + 0.95 * s["m"] / ahead
        x = x / np.linalg.norm(x)
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
        return p * (1 - lr * decay) - lr * max(1, p.shape[1] / p.shape[0]) ** 0.5 * x

    return rule
