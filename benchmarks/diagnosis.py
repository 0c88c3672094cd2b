"""What a diagnosis costs: while nothing fails, and when a step is explained.

How often it is right is measured by ``python -m corpus run``.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import stablenum_torch
from benchmarks.timing import interleaved
from corpus.case import FRAMEWORKS

__all__ = ["run"]

# --- while nothing fails --------------------------------------------------------------------------------


class _Counting(TorchDispatchMode):
    """Counts operations, those with a tensor of the parameters' size, and those that read a number."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.operations, self.passes, self.waits = size, 0, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        self.passes += any(isinstance(x, torch.Tensor) and x.numel() == self.size for x in leaves)
        self.waits += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def _steady() -> dict[str, Any]:
    """The cost of a guarded step with and without keeping an explanation available."""
    size = 1_000_003
    module = importlib.import_module("stablenum_torch._devices.generators")
    kept = module._states_now
    steps: dict[str, Callable[[], object]] = {}
    counts: dict[str, dict[str, int]] = {}
    for name, generators in (("explain at hand", kept), ("taken out", lambda: None)):
        parameter = torch.nn.Parameter(torch.zeros(size))
        parameter.grad = torch.full_like(parameter, 1e-3)
        optimizer = stablenum_torch.wrap(torch.optim.AdamW([parameter], fused=True), clip=1.0)

        def step(optimizer: Any = optimizer, generators: Any = generators) -> None:
            module._states_now = generators
            try:
                optimizer.step()
            finally:
                module._states_now = kept

        step()
        with _Counting(size) as counting:
            step()
        counts[name] = {
            "operations": counting.operations,
            "passes over the parameters": counting.passes,
            "waits": counting.waits,
        }
        steps[name] = step
    times = interleaved(steps, rounds=60)
    return {name: {**counts[name], **times[name].as_dict()} for name in steps}


# --- one explanation ------------------------------------------------------------------------------------

WIDTH, LAYERS, TOKENS, BATCH, CLASSES = 256, 4, 64, 8, 512


def _transformer_torch() -> Any:
    """Replay a step of a causal transformer in whose third layer the entropy of masked attention is 0 *
    -inf."""
    torch.manual_seed(0)

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
            self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)
            self.first, self.second = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)

        def forward(self, x: Any, entropy: bool) -> Any:
            q, k, v = (
                t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.first(x)).chunk(3, dim=-1)
            )
            mask = torch.triu(torch.ones(TOKENS, TOKENS, dtype=torch.bool), diagonal=1)
            scores = (q @ k.transpose(-1, -2) / 8.0).masked_fill(mask, float("-inf"))
            p = torch.softmax(scores, dim=-1)
            cost = (p * p.log()).sum() if entropy else 0.0
            x = x + self.out((p @ v).transpose(1, 2).flatten(2))
            return x + self.down(torch.nn.functional.gelu(self.up(self.second(x)))), cost

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(CLASSES, WIDTH)
            self.layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))
            self.head = torch.nn.Linear(WIDTH, CLASSES)

        def forward(self, ids: Any) -> Any:
            x, costs = self.embed(ids), 0.0
            for i, layer in enumerate(self.layers):
                x, cost = layer(x, i == 2)
                costs = costs + cost
            return self.head(x), costs

    model = Model()
    ids = torch.randint(0, CLASSES, (BATCH, TOKENS + 1))

    def step(ids: Any) -> Any:
        logits, cost = model(ids[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        return loss + 1e-3 * cost

    parameters = sum(p.numel() for p in model.parameters())
    start = time.perf_counter()
    report = stablenum_torch.replay(step, ids, model=model)
    return parameters, time.perf_counter() - start, report


def _transformer_jax() -> Any:
    """Replay the same step in JAX, jitted."""
    import jax.numpy as jnp

    import stablenum_jax

    keys = iter(jax.random.split(jax.random.key(0), 100))

    def matrix(*shape: int) -> Any:
        return jax.random.normal(next(keys), shape) / shape[0] ** 0.5

    layer = {
        "qkv": (WIDTH, 3 * WIDTH),
        "out": (WIDTH, WIDTH),
        "up": (WIDTH, 4 * WIDTH),
        "down": (4 * WIDTH, WIDTH),
    }
    params = {
        "embed": matrix(CLASSES, WIDTH),
        "head": matrix(WIDTH, CLASSES),
        "layers": [{name: matrix(*shape) for name, shape in layer.items()} for _ in range(LAYERS)],
    }
    ids = jax.random.randint(next(keys), (BATCH, TOKENS + 1), 0, CLASSES)

    def norm(x: Any) -> Any:
        return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)

    def block(p: Any, x: Any) -> Any:
        q, k, v = (
            t.reshape(BATCH, TOKENS, 4, -1).swapaxes(1, 2) for t in jnp.split(norm(x) @ p["qkv"], 3, axis=-1)
        )
        keep = jnp.tril(jnp.ones((TOKENS, TOKENS), dtype=bool))
        weights = jax.nn.softmax(jnp.where(keep, q @ k.swapaxes(-1, -2) / 8.0, -jnp.inf), axis=-1)
        x = x + (weights @ v).swapaxes(1, 2).reshape(BATCH, TOKENS, WIDTH) @ p["out"]
        return x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"], weights

    @jax.jit
    def loss(params: Any, ids: Any) -> Any:
        x, cost = params["embed"][ids[:, :-1]], 0.0
        for i, p in enumerate(params["layers"]):
            x, weights = block(p, x)
            if i == 2:
                cost = (weights * jnp.log(weights)).sum()
        logp = jax.nn.log_softmax(x @ params["head"])
        return -jnp.take_along_axis(logp, ids[:, 1:, None], axis=-1).mean() + 1e-3 * cost

    parameters = sum(x.size for x in jax.tree.leaves(params))
    start = time.perf_counter()
    report = stablenum_jax.replay(loss, params, ids)
    return parameters, time.perf_counter() - start, report


def _explanation(framework: str) -> dict[str, Any]:
    """The time of one explanation, measured in a process of its own, where nothing is compiled yet."""
    command = [sys.executable, "-m", "benchmarks.diagnosis", framework]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _explain_here(framework: str) -> dict[str, Any]:
    parameters, seconds, report = (_transformer_torch if framework == "torch" else _transformer_jax)()
    first = report.findings[0]
    return {
        "parameters": parameters,
        "seconds": round(seconds, 2),
        "operation": first.operation,
        "code": first.place.code,
        "cause": report.verdict.cause.value,
    }


def run() -> dict[str, Any]:
    """All figures."""
    return {
        "explanation": {framework: _explanation(framework) for framework in FRAMEWORKS},
        "steady": _steady(),
    }


if __name__ == "__main__":
    print(json.dumps(_explain_here(sys.argv[1])))
