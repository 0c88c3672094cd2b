"""One of two ranks that test_checkpoints_on_ranks.py starts: saves and loads shards with the other."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import stablenum_torch as st
from tests.torch.training_states import same_state

WORLD = 2


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def training(sharded: bool, steps: int) -> dict[str, Any]:
    """A model and its guarded optimizer after some steps; the same on all ranks unless it is sharded."""
    model = net()
    if sharded:
        mesh = init_device_mesh("cpu", (WORLD,))
        for part in (model[0], model[2], model):
            fully_shard(part, mesh=mesh)
    opt = st.wrap(torch.optim.AdamW(model.parameters(), lr=0.01), clip=1.0, spike="skip", names=model)
    for step in range(steps):
        opt.zero_grad()
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
        opt.backward(model(x).square().mean())
        opt.step()
    return {"model": model, "optimizer": opt}


def local(value: Any) -> Any:
    """A state with this rank's parts in place of DTensors."""
    if hasattr(value, "state_dict"):
        return local(value.state_dict())
    if isinstance(value, dict):
        return {key: local(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [local(part) for part in value]
    return (
        (value.to_local() if hasattr(value, "to_local") else value).clone()
        if torch.is_tensor(value)
        else value
    )


def error_of(action: Callable[[], object]) -> list[str]:
    """The type and the text of what an action raises."""
    try:
        return ["nothing", repr(action())]
    except Exception as error:  # noqa: BLE001 - looked at by the test
        return [type(error).__name__, str(error)]


class Stubborn:
    """Takes its own state, and no other."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            raise KeyError("nothing fits")


def fails(*args: Any, **kwargs: Any) -> Any:
    """Stands for a function that writes, on a full disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def main(rank: int, store: str, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    root, found = Path(folder), {}
    checkpoints = st.Checkpoints(root / "dcp", format="dcp")

    run = training(sharded=True, steps=2) | {"rank": rank, "rng": {"state": torch.full((2,), float(rank))}}
    for step in (1, 2):
        checkpoints.save(step, run)
    wanted = local(run)
    fresh = training(sharded=True, steps=0) | {"rank": None, "rng": None}
    found["loaded"] = checkpoints.load(fresh)
    found["equal"] = same_state(local(fresh), wanted)
    found["sharded"] = [hasattr(s["exp_avg"], "placements") for s in fresh["optimizer"].state.values()]
    found["rank"] = fresh["rank"]

    weight = run["model"][0].weight.to_local().detach()
    good = weight[0, 0].item()
    if rank == 1:
        weight[0, 0] = math.nan
    found["poisoned shard"] = error_of(lambda: checkpoints.save(3, run))
    weight[0, 0] = good
    found["in one file"] = error_of(lambda: st.Checkpoints(root / "whole").save(3, run))
    odd = run | {"odd": object() if rank == 1 else 1}
    found["odd on one rank"] = error_of(lambda: checkpoints.save(3, odd))
    write_text = Path.write_text
    if rank == 1:
        Path.write_text = fails  # type: ignore[method-assign, assignment]
    found["full on one rank"] = error_of(lambda: checkpoints.save(3, run))
    Path.write_text = write_text  # type: ignore[method-assign]

    copies = training(sharded=False, steps=2)
    for name in ("torch", "safetensors"):
        one_file = st.Checkpoints(root / name, format=name)  # type: ignore[arg-type]
        one_file.save(2, copies)
        other = training(sharded=False, steps=0)
        found[name] = [one_file.load(other), same_state(local(other), local(copies)), one_file.steps()]

    dist.barrier()
    if rank == 0:
        (file,) = (root / "dcp" / "step-000000002").glob("__1_*.distcp")
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(bytes(data))
    dist.barrier()
    before = local(run)
    found["a bit of rank 1's file"] = checkpoints.load(run)
    narrow = training(sharded=True, steps=1) | {"rank": None}
    if rank == 1:
        narrow["missing"] = 1
    kept_state = local(narrow)
    found["missing on one rank"] = error_of(lambda: checkpoints.load(narrow))
    stubborn = training(sharded=True, steps=1) | {"rng": Stubborn() if rank == 1 else None}
    kept_whole = local(stubborn)
    found["fits on one rank"] = error_of(lambda: checkpoints.load(stubborn))
    found["undone"] = same_state(local(stubborn), kept_whole)
    found["unchanged"] = same_state(local(narrow), kept_state) and same_state(local(run), before)
    found["steps"] = checkpoints.steps()

    dist.barrier()
    sys.stdout.write("RESULT " + json.dumps(found))
    sys.stdout.flush()
    # Gloo's threads sometimes outlive their group and abort the interpreter at exit; the output is written.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
