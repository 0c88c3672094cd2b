from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass
class Config:
    n_ids: int = 12
    per_id: int = 4
    ids_per_batch: int = 6
    in_dim: int = 20
    emb_dim: int = 8
    margin: float = 0.3
    lr: float = 2e-3
    steps: int = 400
    seed: int = 31


class Embedder(nn.Module):
    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.f = nn.Sequential(
            nn.Linear(cfg.in_dim, 64), nn.ReLU(inplace=True), nn.Linear(64, cfg.emb_dim)
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.f(x), dim=-1)


class BatchHardTriplet(nn.Module):
    def __init__(self, margin: float) -> None:
        super().__init__()
        self.margin = margin

    def forward(self, z: Tensor, ids: Tensor) -> Tensor:
        sim = z @ z.t()
        same = ids[:, None] == ids[None, :]
        eye = torch.eye(len(ids), dtype=torch.bool)
        hardest_pos = sim.masked_fill(~same | eye, 2.0).min(dim=1).values
        hardest_neg = sim.masked_fill(same, -2.0).max(dim=1).values
        gap = self.margin + hardest_neg - hardest_pos
        # only average over triplets that still violate the margin
        active = (gap > 0).float()
        return (gap * active).sum() / active.sum()


def sampler(cfg: Config, centres: Tensor):
    while True:
        ids = torch.randperm(cfg.n_ids)[: cfg.ids_per_batch].repeat_interleave(cfg.per_id)
        yield centres[ids] + 0.8 * torch.randn(len(ids), cfg.in_dim), ids


def train(cfg: Config) -> None:
    torch.manual_seed(cfg.seed)
    centres = 1.5 * torch.randn(cfg.n_ids, cfg.in_dim)
    model, criterion = Embedder(cfg), BatchHardTriplet(cfg.margin)
    opt = torch.optim.Adam(model.parameters(), lr=cfg.lr)
    for step, (x, ids) in enumerate(sampler(cfg, centres)):
        if step == cfg.steps:
            break
        loss = criterion(model(x), ids)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 20 == 0:
            print(f"step={step:03d} triplet={loss.item():.4f}")


if __name__ == "__main__":
    train(Config())
