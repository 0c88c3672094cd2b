"""Runs the programs of docs/migrate.md: each pair on the same model and batches."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import torch
from flax.training.dynamic_scale import DynamicScale

import stablenum_jax
import stablenum_torch
from stablenum import DynamicLossScale
from stablenum.typing import StepRecord

PAGE = Path(__file__).parents[2] / "docs" / "migrate.md"
Weights = dict[str, np.ndarray]
Batch = tuple[np.ndarray, np.ndarray]
DECAY = 0.5  # of the weights in one step of the optimizer with which a step is judged


def blocks() -> dict[str, list[str]]:
    """The Python programs of the page by heading."""
    parts = re.split(r"^#+ (.*)$", PAGE.read_text(encoding="utf-8"), flags=re.M)[1:]
    found = {
        head: re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
        for head, text in zip(parts[::2], parts[1::2], strict=True)
    }
    return {head: programs for head, programs in found.items() if programs}


BLOCKS = blocks()
(TORCH_AFTER,), (JAX_AFTER, JAX_TAKEN_OVER) = BLOCKS["PyTorch"], BLOCKS["JAX"]


class Pair(NamedTuple):
    """A program of the page, and the one that takes its place."""

    library: str
    before: str
    after: str
    scale: Callable[[dict[str, Any]], float] | None  # of a namespace in which ``before`` ran
    taken_over: str = ""

    @property
    def lines(self) -> str:
        """The lines of both that are not blank."""
        return " -> ".join(
            str(sum(bool(line.strip()) for line in text.splitlines())) for text in (self.before, self.after)
        )


def pairs() -> dict[str, Pair]:
    """The pairs by the heading of their section."""
    grad_scaler, scaler_taken_over = BLOCKS["GradScaler"]
    (by_hand,) = BLOCKS["Checks by hand"]
    optax_, optax_taken_over = BLOCKS["apply_if_finite"]
    jmp_, jmp_taken_over = BLOCKS["jmp"]
    flax, flax_taken_over = BLOCKS["flax"]
    unscaled = replaced(JAX_AFTER, ', loss_scale="dynamic"', "")
    objects = "".join(jmp_.splitlines(keepends=True)[:2])
    from_jmp = objects + replaced(JAX_AFTER, '="dynamic"', "=loss_scale")
    return {
        "GradScaler": Pair(
            "torch", grad_scaler, TORCH_AFTER, lambda ns: ns["scaler"].get_scale(), scaler_taken_over
        ),
        "Checks by hand": Pair("torch", by_hand, replaced(TORCH_AFTER, ', loss_scale="dynamic"', ""), None),
        "apply_if_finite": Pair(
            "jax",
            optax_,
            replaced(unscaled, ', policy="compute=float16"', ""),
            None,
            optax_taken_over + JAX_TAKEN_OVER,
        ),
        "jmp": Pair(
            "jax",
            jmp_,
            replaced(from_jmp, '="compute=float16"', "=policy"),
            lambda ns: float(ns["loss_scale"].loss_scale),
            jmp_taken_over + JAX_TAKEN_OVER,
        ),
        "flax": Pair(
            "jax", flax, JAX_AFTER, lambda ns: float(ns["scaler"].scale), flax_taken_over + JAX_TAKEN_OVER
        ),
    }


def replaced(text: str, old: str, new: str) -> str:
    """``text`` with ``old``, which must be in it, replaced."""
    assert old in text, f"{old!r} is not in the program:\n{text}"
    return text.replace(old, new)


def loop(program: str) -> str:
    """The part of a program that may go on with the state of another: its step or its loop."""
    return program[program.index("@jax.jit" if "@jax.jit" in program else "for x, y in batches()") :]


# The page leaves out the loop around ``train_step``, which takes and returns the state.
JAX_LOOP = """
for x, y in batches():
    {state} = train_step({state}, x, y)
"""


def jax_loop(program: str) -> str:
    """The loop around the ``train_step`` of a program."""
    (state,) = re.findall(r"def train_step\((.*), x, y\):", program)
    return JAX_LOOP.format(state=state)


def data(events: str, *, seed: int = 1) -> list[Batch]:
    """Batches, one a character.

    ``.`` is a good one, ``n`` has a NaN, ``o`` overflows in float16, ``h`` has huge finite gradients.
    """
    rng = np.random.default_rng(seed)
    made = []
    for event in events:
        x = rng.normal(size=(64, 16)).astype(np.float32)
        y = x.sum(1, keepdims=True)
        if event == "n":
            x[3, 5] = np.nan
        size = np.float32({"o": 100.0, "h": 1e25}.get(event, 1.0))
        made.append((x * size, y * size))
    return made


USUAL = "............n......."


class Run:
    """A namespace in which programs of one library run, and the weights after each step."""

    def __init__(self, library: str, *, judged: bool = False, seed: int = 0, fused: bool = False) -> None:
        self.library = library
        self.names: dict[str, Any] = {"__name__": "program", "DynamicLossScale": DynamicLossScale}
        self.names |= _torch(judged, seed, fused) if library == "torch" else _jax(judged, seed)
        self.weights = [self._now()]

    def go(self, program: str, batches: list[Batch], after: Callable[[], Any] | None = None) -> list[Any]:
        """Run a program; return what ``after`` returns after each step."""
        seen = []

        def served() -> Iterator[tuple[Any, Any]]:
            for x, y in batches:
                yield (x, y) if self.library == "jax" else (torch.from_numpy(x), torch.from_numpy(y))
                self.weights.append(self._now())
                seen.append(after() if after is not None else None)

        self.names["batches"] = served
        program += jax_loop(program) if self.library == "jax" else ""
        exec(compile(program, str(PAGE), "exec"), self.names)
        return seen

    def _now(self) -> Weights:
        if self.library == "jax":
            return {name: np.array(value) for name, value in self.names["params"].items()}
        return {name: p.detach().numpy().copy() for name, p in self.names["model"].named_parameters()}

    def history(self) -> list[StepRecord]:
        """What the guard recorded."""
        if self.library == "jax":
            return stablenum_jax.history(self.names["opt_state"])
        return self.names["opt"].history()

    def guards_scale(self) -> float:
        """The guard's loss scale."""
        if self.library == "jax":
            return float(stablenum_jax.loss_scale(self.names["opt_state"]))
        return float(self.names["opt"].loss_scale)


def _torch(judged: bool, seed: int, fused: bool) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    if judged:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=DECAY)
    return {
        "torch": torch,
        "stablenum_torch": stablenum_torch,
        "model": model,
        "optimizer": optimizer,
        "loss_fn": torch.nn.SmoothL1Loss(),
    }


def _jax(judged: bool, seed: int) -> dict[str, Any]:
    first, second = jax.random.split(jax.random.key(seed))
    optimizer = optax.adamw(0.01)
    if judged:
        optimizer = optax.chain(optax.add_decayed_weights(DECAY), optax.sgd(1.0))
    return {
        "jax": jax,
        "jnp": jnp,
        "jmp": jmp,
        "optax": optax,
        "DynamicScale": DynamicScale,
        "stablenum_jax": stablenum_jax,
        "params": {
            "w": jax.random.normal(first, (16, 32)) / 4,
            "v": jax.random.normal(second, (32, 1)) / 6,
        },
        "optimizer": optimizer,
        "loss_fn": _loss,
    }


def _loss(params: Any, x: Any, y: Any) -> Any:
    predicted = jax.nn.relu(x @ params["w"]) @ params["v"]
    return optax.huber_loss(predicted.astype(jnp.float32), y.astype(jnp.float32)).mean()


def judged(library: str, program: str, events: str, scale: Callable[[Run], float] | None) -> str:
    """What a program did with the last of some batches, in the words of the page's table."""
    run = Run(library, judged=True)
    scales = run.go(program, data(events), None if scale is None else lambda: scale(run))
    before, now = run.weights[-2:]
    if not all(np.isfinite(w).all() for w in now.values()):
        return "weights not finite"
    if all((before[name] == now[name]).all() for name in now):
        did = "skipped"
    elif all((before[name] * np.float32(1 - DECAY) == now[name]).all() for name in now):
        did = "zero gradients applied"
    else:
        did = "applied"
    halved = scale is not None and scales[-1] == scales[-2] / 2
    return did + (", scale halved" if halved else "")


def ulps(left: Weights, right: Weights) -> float:
    """The largest difference, in ulps of the largest weight of its tensor."""
    return max(
        float(np.abs(left[name] - right[name]).max() / np.spacing(np.abs(left[name]).max())) for name in left
    )
