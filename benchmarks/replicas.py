"""What comparing the replicas costs: a checked step beside a guarded step without a check, on two replicas.

Two ranks over gloo in PyTorch, two devices of one process in JAX; each holds the whole model and its state.
"""

from __future__ import annotations

import functools
import json
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.launching import said_by_the_first
from benchmarks.repeats import pooled, ratio_to_bare, restless, timed, until_known
from benchmarks.steps.errors import BenchmarkError
from benchmarks.timing import interleaved

__all__ = ["FRAMEWORKS", "run"]

FRAMEWORKS = ("torch", "jax")
SHAPES = ((1000, 250),) * 40  # 10 M
REPLICAS = 2
ROUNDS = 30
# The largest relative uncertainty of the ratio of a checked step to one without a check.
BOUND = 0.15
_PATIENCE_S = 600


def run(
    rounds: int = ROUNDS,
    bound: float = BOUND,
    frameworks: Sequence[str] = FRAMEWORKS,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    *,
    say: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """One row for each framework: ``bare`` is the guarded step without a check.

    Raises:
        BenchmarkError: a process failed, or the uncertainty of a ratio stays above ``bound``.
    """
    return [_row(framework, rounds, bound, shapes, say) for framework in frameworks]


def _row(
    framework: str, rounds: int, bound: float, shapes: Sequence[Sequence[int]], say: Callable[[str], None]
) -> dict[str, Any]:
    parts = until_known(
        lambda turn: _measure(framework, rounds, turn, shapes),
        lambda parts: restless(f"{framework}, {REPLICAS} replicas", timed(parts), bound),
        say=say,
    )
    processes = timed(parts)
    ratio, known = ratio_to_bare(processes, "checked")
    checked = pooled(processes, "checked").as_dict() | {"ratio_to_bare": round(ratio, 3)}
    return {
        "framework": framework,
        "replicas": REPLICAS,
        "parameters": sum(map(math.prod, shapes)),
        "tensors": len(shapes),
        "processes": len(parts),
        "uncertainty_bound": bound,
        "variants": {
            "bare": pooled(processes, "bare").as_dict(),
            "checked": checked | {"uncertainty": round(known, 4)},
        },
    }


def _measure(framework: str, rounds: int, turn: int, shapes: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return the ``samples`` of both variants, as measured by the first rank or by the one process.

    Raises:
        BenchmarkError: a process failed, or did not end.
    """
    ranks = REPLICAS if framework == "torch" else 1
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.replicas"]
        command += [framework, str(rounds), str(turn), json.dumps(shapes), str(Path(folder) / "meeting")]
        samples = said_by_the_first(
            command,
            ranks,
            all_of_them="the replicas",
            one_of_them=f"a process of the replicas in {framework}",
            patience=_PATIENCE_S,
            environment={"JAX_PLATFORMS": "cpu"},
        )
    return {"samples": samples}


def _in_torch(rounds: int, turn: int, shapes: Sequence[Sequence[int]], meeting: str, rank: int) -> Any:
    import torch
    import torch.distributed as dist

    import stablenum_torch

    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=REPLICAS)
    torch.set_num_threads(1)

    def guarded(**settings: Any) -> Callable[[], None]:
        params = [torch.nn.Parameter(torch.ones(*shape)) for shape in shapes]
        for p in params:
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) * 1e-2
        inner = torch.optim.AdamW(params, lr=1e-3, fused=True)
        opt = stablenum_torch.wrap(inner, clip=1e9, loss_group=dist.group.WORLD, **settings)
        return opt.step

    steps = {"bare": guarded(), "checked": guarded(check_replicas_every=1)}
    times = interleaved(steps, rounds=rounds, prepare=lambda _: dist.barrier(), seed=turn)
    dist.barrier()
    dist.destroy_process_group()
    return {name: t.samples for name, t in times.items()}


def _in_jax(rounds: int, turn: int, shapes: Sequence[Sequence[int]]) -> Any:
    import jax

    jax.config.update("jax_num_cpu_devices", REPLICAS)
    import numpy as np
    import optax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import stablenum_jax

    whole = NamedSharding(Mesh(np.asarray(jax.devices()), ("replicas",)), PartitionSpec())
    tx = optax.chain(stablenum_jax.guard(clip=1e9), optax.adamw(1e-3))
    draw = np.random.default_rng(0)
    drawn = [draw.standard_normal(shape, "float32") * 1e-2 for shape in shapes]
    grads = jax.device_put(drawn, whole)
    step = jax.jit(functools.partial(stablenum_jax.step, tx), donate_argnums=(0, 1))
    carried = {}
    for name in ("bare", "checked"):
        params = jax.device_put([np.ones(shape, "float32") for shape in shapes], whole)
        carried[name] = (params, tx.init(params))

    def plain(name: str) -> None:
        carried[name] = jax.block_until_ready(step(*carried[name], grads))

    def checked() -> None:
        plain("checked")
        if not stablenum_jax.check_replicas(*carried["checked"]):
            raise BenchmarkError("there was nothing to compare")

    steps = {"bare": lambda: plain("bare"), "checked": checked}
    return {name: t.samples for name, t in interleaved(steps, rounds=rounds, seed=turn).items()}


if __name__ == "__main__":
    framework, numbers, (said, meeting, rank) = sys.argv[1], [*map(int, sys.argv[2:4])], sys.argv[4:]
    sizes = json.loads(said)
    found = (
        _in_torch(*numbers, sizes, meeting, int(rank)) if framework == "torch" else _in_jax(*numbers, sizes)
    )
    print(json.dumps(found))
