"""One of four ranks that test_checkpoints_on_meshes.py starts: trains, saves, and resumes on other meshes.

Gradients are computed by a backward pass ("trained"), or given ("given"). Given ones have the same bits
however they are distributed, so that everything after them can be compared to the bit. State dicts are saved
as they are, or flattened ("given, flat").
"""

from __future__ import annotations

import json
import math
import os
import sys
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

import stablenum_torch as st
from stablenum import AdaGC, ClipByGlobalNorm, DynamicLossScale, GuardConfig, SpikeGuard

WORLD, ROWS = 4, 8
KINDS = ("trained", "given", "given, flat")
BREAK, STEPS = 6, 11  # saved after so many steps, of so many
NAN, SPIKE = (3, 8), 7  # steps with a NaN in a gradient, and with a large gradient
CONFIG = GuardConfig(
    clip=(AdaGC(warmup_steps=2), ClipByGlobalNorm(0.5)),
    loss_scale=DynamicLossScale(init_scale=2.0**8, growth_interval=3),
    spike=SpikeGuard(min_samples=4, window=32),
    exact_norms=True,
)


class Run(NamedTuple):
    """A model, its guarded optimizer, and its place among the ranks that have other rows of the batch."""

    model: nn.Module
    opt: st.GuardedOptimizer
    part: int = 0
    parts: int = 1


def net() -> nn.Sequential:
    # Every shard is a multiple of the width of a vector register: a kernel's remainder may round otherwise.
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64))


def start(mesh: DeviceMesh | None = None) -> Run:
    model = net()
    if mesh is not None:
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
    opt = st.wrap(torch.optim.AdamW(model.parameters(), lr=0.01), CONFIG, names=model)
    if mesh is None:
        return Run(model, opt)
    return Run(model, opt, mesh.mesh.flatten().tolist().index(dist.get_rank()), mesh.size())


def train(run: Run, kind: str, steps: range) -> list[dict[str, Any]]:
    """The decisions of some steps."""
    rows = []
    for step in steps:
        run.opt.zero_grad()
        backward(run, step) if kind == "trained" else give(run, step)
        run.opt.step()
        last = run.opt.last
        keys = ("applied", "loss", "grad_norm", "loss_scale", "clip_coefficient", "skipped_total")
        rows.append({key: last[key] for key in keys} | {"reason": last["reason"].name})  # type: ignore[literal-required]
    return rows


def size_of(step: int) -> float:
    return math.nan if step in NAN else 60.0 if step == SPIKE else 1.0


def backward(run: Run, step: int) -> None:
    x = torch.randn(ROWS, 16, generator=torch.Generator().manual_seed(step))
    x[-1] *= math.nan if step in NAN else 1.0
    own = x.chunk(run.parts)[run.part]
    loss = (run.model(own) - 1.0).square().mean()
    run.opt.backward(loss * 60.0 if step == SPIKE else loss)


def give(run: Run, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    run.opt.scale(torch.tensor(1.0 + step / 8))
    for p in run.model.parameters():
        grad = torch.randn(p.shape, generator=generator) * size_of(step) * run.opt.loss_scale
        p.grad = distribute_tensor(grad, p.device_mesh, p.placements) if hasattr(p, "device_mesh") else grad


def options_of(kind: str) -> states.StateDictOptions:
    return states.StateDictOptions(flatten_optimizer_state_dict=kind.endswith("flat"))


def saved(run: Run, kind: str) -> dict[str, Any]:
    """What a checkpoint holds; loading writes into it."""
    model, optim = states.get_state_dict(run.model, run.opt, options=options_of(kind))
    return {"model": model, "optim": optim}


def load(run: Run, kind: str, folder: str, group: dist.ProcessGroup | None = None) -> None:
    state = saved(run, kind)
    checkpoint.load(state, checkpoint_id=f"{folder}/{kind}", process_group=group)
    states.set_state_dict(
        run.model,
        run.opt,
        model_state_dict=state["model"],
        optim_state_dict=state["optim"],
        options=options_of(kind),
    )


def ending(run: Run, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What is compared: decisions, parameters, and the guard's state but for the places of the worst
    parameters, which name ranks."""
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in run.model.parameters()]
    guard = run.opt.guard_state_dict()["state"]
    guard["recorder"] = [(row["step"], row["reason"], row["grad_norm"]) for row in run.opt.history()]
    return {"rows": rows, "params": [p.detach().flatten().tolist() for p in whole], "guard": guard}


def main(rank: int, store: str, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    four, two = init_device_mesh("cpu", (WORLD,)), DeviceMesh("cpu", [0, 1])
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    found: dict[str, Any] = {}
    for kind in KINDS:
        run = start(four)
        before = train(run, kind, range(BREAK))
        checkpoint.save(saved(run, kind), checkpoint_id=f"{folder}/{kind}")
        found[f"{kind}, unbroken"] = ending(run, before + train(run, kind, range(BREAK, STEPS)))
        for name, mesh in (("fsdp2 on 4", four), ("fsdp2 on 2", two), ("hsdp on 2 x 2", square)):
            if mesh.get_coordinate() is not None:
                run = start(mesh)
                load(run, kind, folder, mesh.get_group() if mesh is two else None)
                found[f"{kind}, {name}"] = ending(run, before + train(run, kind, range(BREAK, STEPS)))
            dist.barrier()
    dist.barrier()  # not after the output, which is longer than a pipe and is read rank by rank
    sys.stdout.write("RESULT " + json.dumps(found))
    sys.stdout.flush()
    # Gloo's threads sometimes outlive their group and abort the interpreter at exit; the output is written.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
