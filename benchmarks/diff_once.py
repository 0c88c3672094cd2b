"""``python -m benchmarks.diff_once SIZE KIND``: the process that ``diff_cost`` starts."""

from __future__ import annotations

import functools
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import optax
import torch

import stablenum
import stablenum_jax
import stablenum_torch
from benchmarks import diff_models as models
from benchmarks.steps.errors import BenchmarkError

__all__: list[str] = []

_ROUNDS = 5


def _torch_step(size: models.Size) -> Callable[[], object]:
    model = models.Transformer(size)
    optimizer = models.torch_optimizer(model)
    x, y = map(torch.tensor, models.batch())

    def step() -> None:
        optimizer.zero_grad()
        models.torch_loss(model, x, y).backward()
        optimizer.step()

    return step


def _jax_step(size: models.Size) -> Callable[[], object]:
    tx, batch = models.jax_optimizer(), models.batch()
    loss = functools.partial(models.jax_loss, heads=size.heads)
    params = models.jax_parameters(size)
    carried = [params, tx.init(params)]

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train(params: Any, state: Any, x: Any, y: Any) -> Any:
        gradients = jax.grad(loss)(params, x, y)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    def step() -> None:
        carried[:] = jax.block_until_ready(train(*carried, *batch))

    return step


def _steps(size: models.Size) -> dict[str, float]:
    found = {}
    for name, step in (("torch", _torch_step(size)), ("jax", _jax_step(size))):
        step()
        times = [_seconds(step) for _ in range(_ROUNDS)]
        found[name] = statistics.median(times)
    return found


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _programs(size: models.Size, *, approximate: bool) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = models.Transformer(size)
    x, y = models.batch()
    left = stablenum_torch.program(
        functools.partial(models.torch_loss, model),
        torch.tensor(x),
        torch.tensor(y),
        model=model,
        optimizer=models.torch_optimizer(model),
    )
    loss = functools.partial(models.jax_loss, heads=size.heads, approximate=approximate)
    right = stablenum_jax.program(loss, models.jax_parameters(size), x, y, optimizer=models.jax_optimizer())
    return left, right


def _diff(size: models.Size, *, differing: bool) -> dict[str, float]:
    return _compared(*_programs(size, approximate=differing), differing=differing)


def _compared(left: Any, right: Any, *, differing: bool) -> dict[str, float]:
    start = time.perf_counter()
    report = stablenum.diff(left, right)
    took = time.perf_counter() - start
    if [c.code for c in report.causes[:1]] != ["gelu_variant"] * differing or report.ok == differing:
        raise BenchmarkError(f"the transformers should {'differ' if differing else 'agree'}:\n{report}")
    return {"diff": took, "operations": sum(map(len, (report.left_rows, report.right_rows)))}


def _recorded(size: models.Size) -> dict[str, float]:
    """Record the left program, and compare the file with the right one."""
    left, right = _programs(size, approximate=False)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "left.snum"
        record = _seconds(lambda: stablenum.save_program(left, file))
        return {"record": record, **_compared(stablenum.load_program(file), right, differing=False)}


def main() -> None:
    """Measure and print one line of JSON."""
    name, what = sys.argv[1:]
    size = models.SIZES[name]
    kinds = {
        "steps": _steps,
        "alike": functools.partial(_diff, differing=False),
        "recorded": _recorded,
        "differing": functools.partial(_diff, differing=True),
    }
    found = kinds[what](size)
    found["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps(found))


if __name__ == "__main__":
    main()
