"""FSDP2 over tensor parallelism on four ranks, with a bad batch on two of them.

    torchrun --nproc-per-node 4 examples/distributed/fsdp2_tp.py

Two groups of two ranks train on halves of each batch of handwritten digits (scikit-learn's, which are bundled
with it). The two ranks of a group share the layers. The guard needs no argument: it reads from the
parameters which ranks hold what.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import stablenum_torch

STEPS, ROWS, BAD = 40, 64, 25


def main() -> None:
    """Train, and let rank 0 print what the guard decided."""
    dist.init_process_group("gloo")  # on GPUs: "nccl", and "cuda" below
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh["data"])
    opt = stablenum_torch.wrap(
        torch.optim.AdamW(model.parameters(), lr=3e-3), clip=1.0, spike="skip", names=model
    )

    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    for step in range(STEPS):
        rows = torch.randperm(len(images), generator=torch.Generator().manual_seed(step))[:ROWS]
        own = rows.chunk(2)[mesh.get_local_rank("data")]  # ranks that share a layer have the same rows
        x = images[own].clone()
        if step == BAD and mesh.get_local_rank("data") == 1:
            x[0, 0] = float("nan")
        opt.zero_grad()
        opt.backward(nn.functional.cross_entropy(model(x), labels[own]))
        opt.step()

    if dist.get_rank() == 0:
        for row in opt.history():
            if not row["applied"]:
                worst = row["worst"].name
                print(f"step {row['step']}: {row['reason'].name}, first on rank {row['worst_rank']}, {worst}")
        print(
            f"{opt.last['skipped_total']} of {STEPS} steps skipped; the last loss is {opt.last['loss']:.2f}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
