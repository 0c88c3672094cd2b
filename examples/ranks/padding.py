"""A language model under FSDP2 on four ranks, of which one is given a batch of padding.

torchrun --nproc-per-node 4 -m stablenum explain examples/ranks/padding.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group()
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(100, 16), nn.Linear(16, 100))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
text = torch.Generator().manual_seed(rank)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(1, 100, (8, 33), generator=text)
    if rank == 2 and step == 7:
        tokens[:] = 0  # nothing but padding
    return tokens[:, :-1], tokens[:, 1:]


for step in range(20):
    inputs, targets = batch(step)
    logits = model(inputs).flatten(0, 1)
    losses = nn.functional.cross_entropy(logits, targets.flatten(), reduction="none")
    keep = (targets.flatten() != 0).float()
    loss = (losses * keep).sum() / keep.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
