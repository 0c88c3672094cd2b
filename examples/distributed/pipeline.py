"""A pipeline of two stages, with a bad activation in the second one.

    torchrun --nproc-per-node 2 examples/distributed/pipeline.py

Each rank has other layers, and only the last one has a loss. With ``process_group`` both decide on the norm
of the whole model's gradient and on that loss, and either of them skips what the other one skips.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import stablenum_torch

STEPS, ROWS, PARTS, BAD = 40, 64, 4, 25


def main() -> None:
    """Train, and let rank 0 print what the guard decided."""
    dist.init_process_group("gloo")  # on GPUs: "nccl", and "cuda" below
    rank, last = dist.get_rank(), dist.get_world_size() - 1

    torch.manual_seed(rank)
    layers = [
        nn.Sequential(nn.Linear(64, 128), nn.ReLU()),
        nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)),
    ]
    model = layers[rank]
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
    opt = stablenum_torch.wrap(
        inner, clip=1.0, loss_scale="dynamic", names=model, process_group=dist.group.WORLD
    )

    def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The share of one micro-batch in the loss, times the loss scale."""
        return nn.functional.cross_entropy(output, target) / PARTS * opt.scale()

    stage = PipelineStage(model, rank, last + 1, torch.device("cpu"))
    # The losses are divided by the number of micro-batches above, so the gradients need not be.
    schedule = ScheduleGPipe(stage, n_microbatches=PARTS, loss_fn=loss_of, scale_grads=False)

    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    for step in range(STEPS):
        rows = torch.randperm(len(images), generator=torch.Generator().manual_seed(step))[:ROWS]
        opt.zero_grad()
        if rank == 0:
            schedule.step(images[rows])
        else:
            losses: list[torch.Tensor] = []
            schedule.step(target=labels[rows], losses=losses)
            opt.scale(torch.stack(losses).sum() / opt.scale())  # tells the guard the loss of the whole batch
            if step == BAD:
                model[2].weight.grad[3, 0] = float("inf")  # as an overflow in this stage leaves it
        opt.step()

    if rank == 0:
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
